"""Equal weights for every plan: each parameter is drawn from its own name and the run's seed, then sharded.

The whole of one parameter exists for a moment on each rank; nothing is sent. So a model on one process and the same
model on a thousand start from the same numbers, whatever the plan.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

STD = 0.02


def draw(name: str, shape: torch.Size, *, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the whole initial value of the parameter `name`: ones for norms, normal numbers for the rest."""
    if len(shape) == 1 and "norm" in name:
        return torch.ones(shape, device=device, dtype=dtype)
    if name.endswith("bias"):
        return torch.zeros(shape, device=device, dtype=dtype)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:6], "little"))
    wide = torch.promote_types(dtype, torch.float32)
    return (torch.randn(shape, generator=generator, device=device, dtype=wide) * STD).to(dtype)


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of `whole` that this rank holds of the parameter `like`.

    Mesh axes are gone through from the fastest to the slowest: tensor and expert parallelism cut first, FSDP cuts
    what they left (torch's `_StridedShard` says just that).
    """
    if not isinstance(like, DTensor):
        return whole
    mesh, part = like.device_mesh, whole
    for axis in reversed(range(mesh.ndim)):
        placement = like.placements[axis]
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise ValueError(f"a sum that is still spread over ranks has no shard: {like.placements}")
        pieces = part.chunk(mesh.size(axis), dim=placement.dim)
        here = mesh.get_local_rank(axis)
        part = pieces[here] if here < len(pieces) else part.narrow(placement.dim, 0, 0)
    return part


@torch.no_grad()
def init_weights(model: nn.Module, *, seed: int) -> None:
    """Fill every parameter of `model` (not on the meta device) in place."""
    for name, parameter in model.named_parameters():
        here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        whole = draw(name, parameter.shape, seed=seed, device=here.device, dtype=here.dtype)
        here.copy_(shard_of(whole, parameter))
