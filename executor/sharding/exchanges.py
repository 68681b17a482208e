"""What a collective of a program does to a rank's piece: torch.distributed on one group, and the order of elements.

A piece is seen as [blocks, rest] along the dim that is gathered or scattered, the whole as [blocks, pieces, rest].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist

from executor.sharding.places import Place
from simulator.sharded.program import Exchange, RunnableProgram, axes_used, rank_groups

# torch 2.13 gives these two new names and warns about the old ones
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
    """A process group over some mesh axes, and by index in the order of those axes the position in the group."""

    group: dist.ProcessGroup
    size: int
    order: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        return self.order == tuple(range(self.size))


def make_groups(program: RunnableProgram, rank: int) -> dict[tuple[str, ...], Group]:
    """Return the groups of this rank by mesh axes. Every rank of the world calls this, as all take part in making each."""
    found: dict[tuple[str, ...], Group] = {}
    stages = {(program.stage_axis,)} if program.stage_axis else set()
    wanted = sorted(stages | {axes for one in program.work.values() if (axes := axes_used(one))})
    made: dict[frozenset[str], dist.ProcessGroup] = {}
    for axes in wanted:
        groups = rank_groups(program.mesh_names, program.mesh_shape, axes)
        mine = next(group for group in groups if rank in group)
        if frozenset(axes) not in made:
            whole = len(mine) == dist.get_world_size()
            own = dist.group.WORLD if whole else dist.new_subgroups_by_enumeration([list(g) for g in groups])[0]
            made[frozenset(axes)] = own
        places = {Place.of(program, member).position(axes)[0]: position for position, member in enumerate(mine)}
        order = tuple(places[index] for index in range(len(mine)))
        found[axes] = Group(made[frozenset(axes)], len(mine), order)
    return found


def exchange(
    do: Exchange, x: torch.Tensor, group: Group, rank: int, others: torch.Tensor | None = None
) -> torch.Tensor:
    """Return this rank's piece after the exchange; a mean over ranks is their sum by their number.

    A reduction to one rank returns, on all other ranks, `others`: what earlier ones have brought them.
    """
    if do.kind in {"broadcast", "reduce"}:
        return _rooted(do, x, group, rank, others)
    out = _exchanged(do, x, group, rank)
    return out / group.size if do.reducer == "avg" else out


def _exchanged(do: Exchange, x: torch.Tensor, group: Group, rank: int) -> torch.Tensor:
    match do.kind:
        case "all_reduce":
            return _all_reduce(do, x, group)
        case "all_gather":
            pieces = x.new_empty(group.size, *x.shape)
            _GATHER(pieces.view(-1), x.contiguous().view(-1), group=group.group)
            return _concatenated(_by_index(pieces, group), do.dim, do.blocks)
        case "reduce_scatter":
            return _reduce_scatter(do, x, group)
        case "all_to_all":
            sent = _split(x, do.to_dim, do.to_blocks, group.size)
            sent = sent if group.in_order else sent[_inverse(group.order)]
            pieces = torch.empty_like(sent := sent.contiguous())
            dist.all_to_all_single(pieces.view(-1), sent.view(-1), group=group.group)
            return _concatenated(_by_index(pieces, group), do.dim, do.blocks)
    return _permute(do, x, rank)


def _rooted(do: Exchange, x: torch.Tensor, group: Group, rank: int, others: torch.Tensor | None) -> torch.Tensor:
    root = dist.get_global_rank(group.group, group.order[do.root])
    if do.kind == "broadcast":
        out = x.contiguous() if rank == root else torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.broadcast(out, root, group=group.group)
        return out
    out = x.clone(memory_format=torch.contiguous_format)
    dist.reduce(out, root, _REDUCERS[do.reducer], group=group.group)
    if rank == root:
        return out
    return x if others is None else others  # before its turn a rank has nothing yet, and nobody reads it


def _all_reduce(do: Exchange, x: torch.Tensor, group: Group) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, _REDUCERS[do.reducer], group=group.group)
    return out


def _reduce_scatter(do: Exchange, x: torch.Tensor, group: Group) -> torch.Tensor:
    pieces = _split(x, do.dim, do.blocks, group.size)
    pieces = (pieces if group.in_order else pieces[_inverse(group.order)]).contiguous()
    out = torch.empty_like(pieces[0])
    _SCATTER(out.view(-1), pieces.view(-1), _REDUCERS[do.reducer], group=group.group)
    return out


def _permute(do: Exchange, x: torch.Tensor, rank: int) -> torch.Tensor:
    source, targets = do.source[rank], [r for r, s in enumerate(do.source) if s == rank]
    if source == rank:
        return x
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    moves = [dist.P2POp(dist.isend, x, target) for target in targets]
    for work in dist.batch_isend_irecv([*moves, dist.P2POp(dist.irecv, out, source)]):
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
