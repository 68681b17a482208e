"""Where the pieces of one tensor lie, and the two ways to write it.

A `Layout` gives every tensor dim an ordered list of items, major first. A name is a mesh axis that cuts the dim there; a
number is a block that stays whole. `("tp", "dp")` is a weight cut by tp first and then by dp; `(2, "tp")` on a fused
gate|up dim cuts each of its two halves. Mesh axes not named hold copies, or, if `pending`, terms of a reduction still to
be made. This says what a list of placements per mesh axis says, including DTensor's `_StridedShard` and more, in the
form that projections need: concatenating items is all that merging two axes into one dim takes.

The placement form is one token per mesh axis: `R`, `S(k)`, `SS(k,f)` (of what earlier axes left, view dim k as
[f, n, rest] and take index r of n), `P(op)`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from planner.sharding.mesh import Mesh
from topology.errors import BadInput

Items = tuple[str | int, ...]
REDUCERS = ("sum", "avg", "max", "min", "product", "mask")

_TOKEN = re.compile(r"R|S\((\d{1,3})\)|SS\((\d{1,3}),\s?(\d{1,12})\)|P(?:\((\w{1,16})\))?", flags=re.ASCII)


@dataclass(frozen=True, slots=True)
class Layout:
    """Items per tensor dim, and (mesh axis, reducer) for every axis with a reduction pending, in mesh order."""

    dims: tuple[Items, ...]
    pending: tuple[tuple[str, str], ...] = ()

    def axes(self) -> set[str]:
        """Return the mesh axes that cut some dim."""
        return {item for items in self.dims for item in items if isinstance(item, str)}


def replicated(rank: int) -> Layout:
    return Layout(((),) * rank)


def trimmed(items: Sequence[str | int]) -> Items:
    """Return `items` in the one form that means the same: no blocks of 1, neighbours joined, none at the end."""
    out: list[str | int] = []
    for item in items:
        if isinstance(item, int):
            if item == 1:
                continue
            if out and isinstance(out[-1], int):
                out[-1] *= item
                continue
        out.append(item)
    while out and isinstance(out[-1], int):
        out.pop()
    return tuple(out)


def cut(items: Items, mesh: Mesh) -> int:
    """Return into how many pieces `items` cut a dim over all ranks."""
    return prod(mesh.size(item) for item in items if isinstance(item, str))


def fits(size: int, items: Items, mesh: Mesh) -> bool:
    """Return whether a dim of `size` is cut evenly."""
    return size % prod(item if isinstance(item, int) else mesh.size(item) for item in items) == 0


def local_size(size: int, items: Items, mesh: Mesh) -> int:
    """Return the largest local extent: uneven cuts are torch.chunk's, so every piece but the last ones is full."""
    if any(isinstance(item, int) for item in items):
        return size // cut(items, mesh)
    for item in items:
        size = -(-size // mesh.size(str(item)))
    return size


def local_shape(shape: Sequence[int], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of the buffer that every rank holds, padded to the largest where cuts are uneven."""
    return tuple(local_size(size, items, mesh) for size, items in zip(shape, layout.dims, strict=True))


def layout_of(tokens: Sequence[str], shape: Sequence[int], mesh: Mesh, *, of: str) -> Layout:
    """Return the layout that placements of the tensor `of` say. Raises BadInput with the reason if there is none."""
    if len(tokens) != len(mesh.names):
        raise BadInput(
            f"{of} has {len(tokens)} placements on a mesh of {len(mesh.names)} axes", remedy="one token per mesh axis"
        )
    # Per dim: every piece in order, and whether it is still to be cut. A block not yet cut is a number, the rest of the
    # dim after all cuts is left out.
    cuts: list[list[str | int]] = [[] for _ in shape]
    pending = []
    for axis, ranks, token in zip(mesh.names, mesh.shape, tokens, strict=True):
        found = _TOKEN.fullmatch(token)
        if found is None:
            raise BadInput(
                f"{of}: {token[:40]!r} is no placement", remedy="R, S(dim), SS(dim,factor) or P(op), one per mesh axis"
            )
        plain, strided, factor, reducer = found.groups()
        if token == "R":  # noqa: S105 - a placement
            continue
        if token.startswith("P"):
            if (reducer or "sum") not in REDUCERS:
                raise BadInput(f"{of}: unknown reduction {reducer!r}", remedy=f"one of {', '.join(REDUCERS)}")
            pending.append((axis, reducer or "sum"))
            continue
        dim = int(plain or strided)
        if dim >= len(shape):
            raise BadInput(f"{of}: {token} on a tensor of {len(shape)} dims", remedy="dims count from 0")
        _cut(cuts[dim], axis, ranks, int(factor or 1), shape[dim], mesh, f"{of}: {token} over {axis}")
    return Layout(tuple(trimmed(items) for items in cuts), tuple(pending))


def _cut(items: list[str | int], axis: str, ranks: int, factor: int, size: int, mesh: Mesh, where: str) -> None:
    """Cut what earlier axes left of a dim: skip `factor` of it, then take one of `ranks` pieces."""
    if factor < 1:
        raise BadInput(f"{where}: a factor of {factor}", remedy="factors are positive")
    position = 0
    while position < len(items):  # blocks that stay whole are what later axes may cut
        block = items[position]
        if isinstance(block, int):
            if factor == 1:
                if block % ranks:
                    raise BadInput(
                        f"{where} is not possible", why=f"a block of {block} is not cut by {ranks}", remedy="a factor"
                    )
                items[position : position + 1] = [axis, *([block // ranks] if block > ranks else [])]
                return
            if factor % block:
                if block % factor or (block // factor) % ranks:
                    raise BadInput(f"{where} is not possible", why=f"it would split a block of {block} unevenly")
                items[position : position + 1] = [
                    factor,
                    axis,
                    *([left] if (left := block // factor // ranks) > 1 else []),
                ]
                return
            factor //= block
        position += 1
    blocks = prod(item if isinstance(item, int) else mesh.size(item) for item in items) * factor
    if (factor > 1 or any(isinstance(item, int) for item in items)) and size % (blocks * ranks):
        why = f"{size} elements do not divide into {blocks} blocks and those by {ranks}"
        raise BadInput(f"{where} is not possible", why=why, remedy="a factor that divides")
    items.extend([factor, axis] if factor > 1 else [axis])


def tokens_of(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """Return the placements, one per mesh axis, that say `layout`."""
    out = dict.fromkeys(mesh.names, "R")
    out.update({axis: f"P({reducer})" for axis, reducer in layout.pending})
    for dim, items in enumerate(layout.dims):
        for position, axis in enumerate(items):
            if isinstance(axis, str):
                # What stands before it and is not cut yet when its turn comes: whole blocks, and axes later in the mesh.
                skipped = prod(
                    item if isinstance(item, int) else mesh.size(item)
                    for item in items[:position]
                    if isinstance(item, int) or mesh.names.index(item) > mesh.names.index(axis)
                )
                out[axis] = f"S({dim})" if skipped == 1 else f"SS({dim},{skipped})"
    return tuple(out[name] for name in mesh.names)
