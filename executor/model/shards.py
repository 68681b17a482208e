"""Shards of parameters: which part of a parameter a rank holds.

Tensor and expert parallelism shard first and produce plain tensors, described by a `ParameterShard`: operators on plain
tensors cost the host a fraction of DTensor's dispatch. FSDP then shards these, as DTensors over its own mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """How a parameter of shape `full_shape` is sharded over the ranks of `group`.

    Rank r has chunk r along `dim` (as `torch.chunk`). With `dim` None every rank has the whole parameter, and its
    gradient is a partial sum over the ranks.
    """

    full_shape: torch.Size
    dim: int | None
    group: dist.ProcessGroup

    def local_part(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor of shape `full_shape`."""
        if self.dim is None:
            return tensor
        pieces, here = tensor.chunk(dist.get_world_size(self.group), dim=self.dim), dist.get_rank(self.group)
        return pieces[here] if here < len(pieces) else tensor.narrow(self.dim, 0, 0)


def shard_parameter(module: nn.Module, name: str, dim: int | None, group: dist.ProcessGroup) -> ParameterShard:
    """Replace a module's parameter `name` by this rank's part of it; return the description of that part."""
    parameter = module.get_parameter(name)
    shard = ParameterShard(parameter.shape, dim, group)
    if dim is not None:
        part = shard.local_part(parameter.detach()).clone(memory_format=torch.contiguous_format)
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    return shard


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor; under autograd its gradient has the same sharding."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shard(whole: Tensor, like: Tensor, shard: ParameterShard | None = None) -> Tensor:
    """Return this rank's part of `whole`, sharded like the parameter `like`: first by `shard`, then by FSDP."""
    part = whole if shard is None else shard.local_part(whole)
    if not isinstance(like, DTensor):
        return part
    mesh = like.device_mesh
    for axis in reversed(range(mesh.ndim)):
        placement = like.placements[axis]
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise ValueError(f"a sum that is still spread over ranks has no shard: {like.placements}")
        dim = cast("Shard", placement).dim  # strided or not
        pieces = part.chunk(mesh.size(axis), dim=dim)
        here = mesh.get_local_rank(axis)
        part = pieces[here] if here < len(pieces) else part.narrow(dim, 0, 0)
    return part
