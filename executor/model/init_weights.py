"""The same initial weights under every plan: each parameter is drawn from its name and the run's seed, then sharded.

Each rank draws one whole parameter at a time and keeps its part; nothing is communicated. A model on one process and
the same model on a thousand start from the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from executor.model.shards import ParameterShard, local_shard, local_tensor

STD = 0.02


def draw(name: str, shape: torch.Size, *, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the whole initial value of the parameter `name`: ones for norms, normal numbers for the rest."""
    if len(shape) == 1 and "norm" in name:
        return torch.ones(shape, device=device, dtype=dtype)
    if name.endswith("bias"):
        return torch.zeros(shape, device=device, dtype=dtype)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:6], "little"))
    # Always drawn in float32: for other types the generator would give different numbers.
    return (torch.randn(shape, generator=generator, device=device, dtype=torch.float32) * STD).to(dtype)


@torch.no_grad()
def init_weights(model: nn.Module, *, seed: int, parameter_shards: Mapping[str, ParameterShard] | None = None) -> None:
    """Fill every parameter of `model` (not on the meta device) in place. `parameter_shards` has its sharded parameters,
    by name.
    """
    for name, parameter in model.named_parameters():
        here, shard = local_tensor(parameter), (parameter_shards or {}).get(name)
        shape = parameter.shape if shard is None else shard.full_shape
        whole = draw(name, shape, seed=seed, device=here.device, dtype=here.dtype)
        here.copy_(local_shard(whole, parameter, shard))
