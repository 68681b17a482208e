"""What a collective of a program does to a rank's piece: torch.distributed on one group, and the order of elements.

Along the dim that is gathered or scattered, a piece is viewed as [blocks, rest] and the whole as [blocks, pieces,
rest]. Pieces of different sizes (a dim that the mesh axes do not divide) are padded to the largest one for a gather or
a scatter, and sent unpadded by an all-to-all, which takes every rank's count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from msgspec.structs import replace
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from executor.overlap import all_gather_matmul, matmul_reduce_scatter
from executor.parallel.context_parallel import ring_attention
from executor.sharding.places import Place
from simulator.overlap.modes import GATHER
from simulator.sharded.program import (
    OVERLAPPED,
    RING_ATTENTION,
    Buffer,
    Exchange,
    Kernel,
    RunnableProgram,
    axes_used,
    rank_groups,
)

# torch 2.13 renames these two and warns about the old names
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCERS = {
    "sum": dist.ReduceOp.SUM,
    "mask": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


@dataclass(frozen=True, slots=True)
class Group:
    """A process group over some mesh axes; for each index in the order of those axes, the position in the group."""

    group: dist.ProcessGroup
    size: int
    order: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        return self.order == tuple(range(self.size))


def make_groups(
    program: RunnableProgram,
    rank: int,
    mesh: DeviceMesh | None = None,
    known: Mapping[tuple[str, ...], Group] | None = None,
) -> dict[tuple[str, ...], Group]:
    """Return the groups of this rank by mesh axes. Every rank of the world calls this, since all take part in making
    each group that is not `known`. With a `mesh` of some of the ranks, groups are over its axes.
    """
    found = dict(known or {})
    stages = {(program.stage_axis,)} if program.stage_axis else set()
    wanted = sorted(stages | {axes for one in program.work.values() if (axes := axes_used(one))})
    made = {frozenset(axes): one.group for axes, one in found.items()}
    for axes in wanted:
        if axes in found:
            continue
        groups = rank_groups(program.mesh_names, program.mesh_shape, axes)
        mine = next(group for group in groups if rank in group)
        if frozenset(axes) not in made:
            made[frozenset(axes)] = _process_group(groups, mesh, axes)
        places = {Place.of(program, member).position(axes)[0]: position for position, member in enumerate(mine)}
        order = tuple(places[index] for index in range(len(mine)))
        found[axes] = Group(made[frozenset(axes)], len(mine), order)
    return found


def _process_group(groups: Sequence[Sequence[int]], mesh: DeviceMesh | None, axes: Sequence[str]) -> dist.ProcessGroup:
    """Return that of `groups` to which this rank belongs; all are over `axes`."""
    if mesh is not None:
        return group_of(mesh, axes)
    whole = len(groups[0]) == dist.get_world_size()
    own = dist.group.WORLD if whole else dist.new_subgroups_by_enumeration([list(one) for one in groups])[0]
    return cast("dist.ProcessGroup", own)


def group_of(mesh: DeviceMesh, axes: Sequence[str]) -> dist.ProcessGroup:
    """Return this rank's group over some axes of a mesh."""
    names = [name for name in mesh.mesh_dim_names or () if name in axes]  # in the mesh's order, as slicing it requires
    if len(names) == 1:
        return mesh.get_group(names[0])
    part = mesh if len(names) == mesh.ndim else mesh[tuple(names)]
    return part._flatten().get_group()  # noqa: SLF001 - torch's documentation has it, under this name


@dataclass(frozen=True, slots=True)
class Pieces:
    """The sizes of a group's pieces: of the buffer that an exchange reads, and of the one that it writes."""

    place: Place
    read: Buffer
    written: Buffer

    def along(self, dim: int, axes: Sequence[str], *, before: bool) -> tuple[int, ...] | None:
        """Return the sizes of a dim by rank of the group over `axes`, before or after; None if all are equal."""
        sizes = self.place.member_sizes(self.read if before else self.written, dim, axes)
        return None if len(set(sizes)) == 1 else sizes


def exchange(
    do: Exchange,
    x: torch.Tensor,
    group: Group,
    pieces: Pieces,
    members: Sequence[int],
    others: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return this rank's piece after the exchange; a mean over ranks is their sum divided by their number. `members`
    are the ranks of the mesh.

    On all ranks but the target, a reduction to one rank returns `others`, the results of earlier reductions.
    """
    if do.kind in {"broadcast", "reduce"}:
        return _rooted(do, x, group, others)
    if order := pieces.written.order:  # with dims in memory order, the outermost one is not copied
        do = replace(do, dim=order.index(do.dim), to_dim=order.index(do.to_dim))
        read, written = (_with_dims_in(order, one) for one in (pieces.read, pieces.written))
        x, pieces = x.permute(order), Pieces(pieces.place, read, written)
    out = _exchanged(do, x, group, pieces, members)
    out = out / group.size if do.reducer == "avg" else out
    return out.permute(_inverse(order)) if order else out


def _with_dims_in(order: Sequence[int], buffer: Buffer) -> Buffer:
    shape, dims, local = (tuple(one[dim] for dim in order) for one in (buffer.shape, buffer.dims, buffer.local))
    return replace(buffer, shape=shape, dims=dims, local=local, order=())


def _exchanged(do: Exchange, x: torch.Tensor, group: Group, pieces: Pieces, members: Sequence[int]) -> torch.Tensor:
    match do.kind:
        case "all_reduce":
            return _all_reduce(do, x, group)
        case "all_gather":
            return _all_gather(do, x, group, pieces.along(do.dim, do.axes, before=True))
        case "reduce_scatter":
            return _reduce_scatter(do, x, group, pieces.along(do.dim, do.axes, before=False))
        case "all_to_all":
            return _all_to_all(do, x, group, pieces)
    return _permute(do, x, members, pieces)


def _all_gather(do: Exchange, x: torch.Tensor, group: Group, sizes: tuple[int, ...] | None) -> torch.Tensor:
    if sizes is not None:
        x = _padded(x, do.dim, max(sizes))
    found = x.new_empty(group.size, *x.shape)
    _GATHER(found.view(-1), x.contiguous().view(-1), group=group.group)
    found = _by_index(found, group)
    if sizes is None:
        return _concatenated(found, do.dim, do.blocks)
    return torch.cat([piece.narrow(do.dim, 0, size) for piece, size in zip(found, sizes, strict=True)], do.dim)


def _all_to_all(do: Exchange, x: torch.Tensor, group: Group, pieces: Pieces) -> torch.Tensor:
    came, goes = (pieces.along(do.dim, do.axes, before=True), pieces.along(do.to_dim, do.axes, before=False))
    if came is not None or goes is not None:
        return _all_to_all_by_counts(do, x, group, pieces)
    sent = _split(x, do.to_dim, do.to_blocks, group.size)
    sent = sent if group.in_order else sent[_inverse(group.order)]
    found = torch.empty_like(sent := sent.contiguous())
    dist.all_to_all_single(found.view(-1), sent.view(-1), group=group.group)
    return _concatenated(_by_index(found, group), do.dim, do.blocks)


def _all_to_all_by_counts(do: Exchange, x: torch.Tensor, group: Group, pieces: Pieces) -> torch.Tensor:
    """An all-to-all of pieces of different sizes: only their own elements are sent, without padding. Only dims of equal
    pieces have blocks.
    """
    came = pieces.place.member_sizes(pieces.read, do.dim, do.axes)
    goes = pieces.along(do.to_dim, do.axes, before=False)
    own = pieces.place.size(pieces.written, do.to_dim)
    parts = _split(x, do.to_dim, do.to_blocks, group.size) if goes is None else x.split(goes, do.to_dim)
    sent = [parts[index].contiguous().view(-1) for index in _inverse(group.order)]
    shapes = [
        tuple(size if d == do.dim else own if d == do.to_dim else n for d, n in enumerate(x.shape)) for size in came
    ]
    counts = [prod(shapes[index]) for index in _inverse(group.order)]
    found = x.new_empty(sum(counts))
    dist.all_to_all_single(found, torch.cat(sent), counts, [len(one) for one in sent], group=group.group)
    received = found.split(counts)
    by_index = [received[group.order[index]].view(shape) for index, shape in enumerate(shapes)]
    return (
        torch.cat(by_index, do.dim) if len(set(came)) > 1 else _concatenated(torch.stack(by_index), do.dim, do.blocks)
    )


def _rooted(do: Exchange, x: torch.Tensor, group: Group, others: torch.Tensor | None) -> torch.Tensor:
    rank, root = dist.get_rank(), dist.get_global_rank(group.group, group.order[do.root])
    if do.kind == "broadcast":
        out = x.contiguous() if rank == root else torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.broadcast(out, root, group=group.group)
        return out
    out = x.clone(memory_format=torch.contiguous_format)
    dist.reduce(out, root, _REDUCERS[do.reducer], group=group.group)
    if rank == root:
        return out
    return x if others is None else others  # before its turn a rank has no value, and none is read


def _all_reduce(do: Exchange, x: torch.Tensor, group: Group) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, _REDUCERS[do.reducer], group=group.group)
    return out


def _reduce_scatter(do: Exchange, x: torch.Tensor, group: Group, sizes: tuple[int, ...] | None) -> torch.Tensor:
    if sizes is None:
        pieces = _split(x, do.dim, do.blocks, group.size)
    else:
        pieces = torch.stack([_padded(piece, do.dim, max(sizes)) for piece in x.split(sizes, do.dim)])
    pieces = (pieces if group.in_order else pieces[_inverse(group.order)]).contiguous()
    out = torch.empty_like(pieces[0])
    _SCATTER(out.view(-1), pieces.view(-1), _REDUCERS[do.reducer], group=group.group)
    return out if sizes is None else out.narrow(do.dim, 0, sizes[group.order.index(dist.get_rank(group.group))])


def _padded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return a piece padded with zeros, so that a dim has `size` elements."""
    return functional.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, size - x.shape[dim]])


def _permute(do: Exchange, x: torch.Tensor, members: Sequence[int], pieces: Pieces) -> torch.Tensor:
    rank = members.index(dist.get_rank())
    source, targets = do.source[rank], [r for r, s in enumerate(do.source) if s == rank]
    if source == rank:
        return x
    x, out = x.contiguous(), x.new_empty(pieces.place.shape(pieces.written))
    moves = [dist.P2POp(dist.isend, x, members[target]) for target in targets]
    for work in dist.batch_isend_irecv([*moves, dist.P2POp(dist.irecv, out, members[source])]):
        work.wait()
    return out


def _by_index(pieces: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the group's pieces in the order of its mesh axes."""
    return pieces if group.in_order else pieces[list(group.order)]


def _inverse(order: Sequence[int]) -> list[int]:
    return [list(order).index(position) for position in range(len(order))]


def _split(x: torch.Tensor, dim: int, blocks: int, pieces: int) -> torch.Tensor:
    """Return the pieces of `x` along `dim`, stacked: [pieces, ..., dim / pieces, ...]."""
    shape = x.shape
    seen = x.reshape(*shape[:dim], blocks, pieces, shape[dim] // blocks // pieces, *shape[dim + 1 :])
    first = seen.movedim(dim + 1, 0)
    return first.reshape(pieces, *shape[:dim], shape[dim] // pieces, *shape[dim + 1 :])


def _concatenated(pieces: torch.Tensor, dim: int, blocks: int) -> torch.Tensor:
    """Return stacked pieces as one tensor along `dim`: the inverse of `_split`."""
    number, shape = pieces.shape[0], pieces.shape[1:]
    seen = pieces.reshape(number, *shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])
    return seen.movedim(0, dim + 1).reshape(*shape[:dim], shape[dim] * number, *shape[dim + 1 :])


def is_overlapped(kernel: Kernel) -> bool:
    return kernel.op.startswith((OVERLAPPED, RING_ATTENTION))


def run_overlapped(
    kernel: Kernel, values: Mapping[str, torch.Tensor], groups: Mapping[tuple[str, ...], Group]
) -> torch.Tensor:
    """Return the rank's piece of a product that overlaps with gathering its operand or summing its result, or of
    attention around a ring.

    On the CPU, modes that need copy engines run as one exchange and one product instead.
    """
    if kernel.op == RING_ATTENTION:
        *tensors, causal = kernel.args
        q, k, v = (values[one["tensor"]] for one in tensors)
        return ring_attention(q, k, v, groups[tuple(kernel.kwargs["axes"])].group, causal=causal)
    x, weight = (values[one["tensor"]] for one in kernel.args)
    mode, dim = kernel.kwargs["mode"], kernel.kwargs["dim"]
    group = groups[tuple(kernel.kwargs["axes"])].group
    if kernel.op == OVERLAPPED + GATHER:
        return all_gather_matmul(x, (weight,), group, mode=mode, dim=dim)[0]
    return matmul_reduce_scatter(x, weight, group, mode=mode, dim=dim)
