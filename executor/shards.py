"""What a rank holds of a tensor that is cut over ranks.

Two things cut parameters. Tensor and expert parallelism come first and leave plain tensors, each rank's own part, with a
`Cut` that says which part of what it is: operators on plain tensors cost the host a fraction of what DTensor's cost.
FSDP then cuts what is there, and its parameters are DTensors over its own mesh.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter of shape `whole` lies on the ranks of `group`.

    Rank r has piece r along `dim`, as `torch.chunk` cuts. With `dim` None every rank has the whole, and its gradient is
    a part of a sum.
    """

    whole: torch.Size
    dim: int | None
    group: dist.ProcessGroup

    def piece(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the whole's shape."""
        if self.dim is None:
            return tensor
        pieces, here = tensor.chunk(dist.get_world_size(self.group), dim=self.dim), dist.get_rank(self.group)
        return pieces[here] if here < len(pieces) else tensor.narrow(self.dim, 0, 0)


def cut(module: nn.Module, name: str, dim: int | None, group: dist.ProcessGroup) -> Cut:
    """Leave a module this rank's part of its parameter `name`, and return which part that is."""
    parameter = module.get_parameter(name)
    made = Cut(parameter.shape, dim, group)
    if dim is not None:
        part = made.piece(parameter.detach()).clone(memory_format=torch.contiguous_format)
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    return made


def local(tensor: Tensor) -> Tensor:
    """Return the part held here. Where autograd looks on, the gradient goes back with the same sharding."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_of(whole: Tensor, like: Tensor, cut: Cut | None = None) -> Tensor:
    """Return the part of `whole` that this rank holds of the parameter `like`, which `cut` cut first."""
    part = whole if cut is None else cut.piece(whole)
    if not isinstance(like, DTensor):
        return part
    mesh = like.device_mesh
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
