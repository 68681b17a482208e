"""What a rank holds of a tensor that is cut over a mesh."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return the part held here. Where autograd looks on, the gradient goes back with the same sharding."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
