"""From one layout of a tensor to another: the cheapest sequence of primitives, by Dijkstra over layouts.

Layouts are the nodes; the edges are what can be done in one step:

    slice           a mesh axis that holds copies cuts a dim; local, no bytes
    all-gather      the innermost axes of a dim are joined; several at once as one flattened group
    reduce-scatter  pending axes are reduced and cut a dim
    all-reduce      pending axes are reduced
    all-to-all      the innermost axes of a dim move to another one
    permute         every rank's whole block moves to one other rank: swapped axes, another order of the same cuts

Costs add up along the path, so what is found is the cheapest there is in these primitives, and the triangle inequality
holds by construction: no detour through a third layout is cheaper than the direct way.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, permutations

from planner.sharding.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    FREE,
    PERMUTE,
    REDUCE_SCATTER,
    SLICE,
    Collective,
    Cost,
    cost_of,
    plus,
)
from planner.sharding.layout import Items, Layout, fits, local_shape, trimmed
from planner.sharding.mesh import Mesh

MAX_LAYOUTS = 20_000


@dataclass(frozen=True, slots=True)
class Step:
    """One primitive: what it turns a layout into. A slice has no collective; a strided one may take several."""

    kind: str
    after: Layout
    collectives: tuple[Collective, ...] = ()


@dataclass(slots=True)
class Redistributor:
    """Shortest paths between the layouts of tensors of one shape and type; every source is solved once.

    `special` are dims' items that a search would not invent, since blocks stay whole or a cut is uneven, but that some
    layout asked for has. `without` are kinds of primitives not to be used.
    """

    shape: tuple[int, ...]
    dtype: str
    mesh: Mesh
    special: frozenset[tuple[int, Items]] = frozenset()
    without: frozenset[str] = frozenset()
    _numbers: dict[Layout, int] = field(default_factory=dict)  # layouts by number: hashing them is what costs
    _layouts: list[Layout] = field(default_factory=list)
    _moves: dict[int, list[tuple[Cost, int, Step]]] = field(default_factory=dict)
    _trees: dict[int, dict[int, tuple[Cost, int, Step | None]]] = field(default_factory=dict)

    def allow(self, layouts: Iterable[Layout]) -> None:
        """Let paths pass through the strided and uneven cuts of `layouts`."""
        found = {
            (dim, items)
            for layout in layouts
            for dim, items in enumerate(layout.dims)
            if any(isinstance(item, int) for item in items) or not fits(self.shape[dim], items, self.mesh)
        }
        if not found <= self.special:
            self.special |= found
            self._moves.clear()
            self._trees.clear()

    def cost(self, source: Layout, target: Layout) -> Cost | None:
        """Return the cost of the best path, None if there is none: nothing makes a finished sum pending again."""
        found = self._tree(source).get(self._number(target))
        return found[0] if found else None

    def path(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        """Return the steps of the best path. Raises KeyError where `cost` is None."""
        tree, steps, here = self._tree(source), [], self._number(target)
        while here != self._number(source):
            _, here, step = tree[here]
            if step is not None:
                steps.append(step)
        return tuple(reversed(steps))

    def _number(self, layout: Layout) -> int:
        if layout not in self._numbers:
            self._numbers[layout] = len(self._layouts)
            self._layouts.append(layout)
        return self._numbers[layout]

    def _tree(self, source: Layout) -> dict[int, tuple[Cost, int, Step | None]]:
        number = self._number(source)
        if number not in self._trees:
            self._trees[number] = self._solve(number)
        return self._trees[number]

    def _solve(self, source: int) -> dict[int, tuple[Cost, int, Step | None]]:
        best: dict[int, tuple[Cost, int, Step | None]] = {source: (FREE, source, None)}
        order = count()  # equal costs: first come, so that the answer does not depend on hashes
        queue: list[tuple[Cost, int, int]] = [(FREE, next(order), source)]
        done: set[int] = set()
        while queue and len(best) < MAX_LAYOUTS:
            cost, _, here = heapq.heappop(queue)
            if here in done:
                continue
            done.add(here)
            for price, after, step in self._from(here):
                total = plus(cost, price)
                if after not in best or total < best[after][0]:
                    best[after] = (total, here, step)
                    heapq.heappush(queue, (total, next(order), after))
        return best

    def _from(self, here: int) -> list[tuple[Cost, int, Step]]:
        if here not in self._moves:
            self._moves[here] = [
                (cost_of(s.collectives, self.mesh.ranks, slices=int(s.kind == SLICE)), self._number(s.after), s)
                for s in self.steps(self._layouts[here])
            ]
        return self._moves[here]

    def steps(self, here: Layout) -> Iterator[Step]:
        """Yield every primitive that applies to `here`."""
        for found in (self._slices, self._joins, self._reductions, self._permutes):
            yield from (step for step in found(here) if step.kind not in self.without)

    def _slices(self, here: Layout) -> Iterator[Step]:
        used = here.axes() | {axis for axis, _ in here.pending}
        for axis in self.mesh.names:
            if axis not in used:
                for dim in range(len(self.shape)):
                    for items in self._with(here, dim, (axis,)):
                        yield Step(SLICE, _replaced(here, {dim: items}))

    def _joins(self, here: Layout) -> Iterator[Step]:
        """All-gathers, and all-to-alls that cut another dim instead."""
        for dim, items in enumerate(here.dims):
            names = 0
            while names < len(items) and isinstance(items[-1 - names], str):
                names += 1
                moved = tuple(str(item) for item in items[-names:])
                rest = trimmed(items[:-names])
                blocks = 1 if rest == items[:-names] else int(items[-names - 1])
                if not self._allowed(dim, rest):
                    continue
                joined = _replaced(here, {dim: rest})
                yield self._step(ALL_GATHER, here, joined, moved, dim, blocks=blocks)
                for other in range(len(self.shape)):
                    if other != dim:
                        for longer in self._with(here, other, moved):
                            yield self._step(ALL_TO_ALL, here, _replaced(joined, {other: longer}), moved)

    def _reductions(self, here: Layout) -> Iterator[Step]:
        for reducer in dict.fromkeys(reducer for _, reducer in here.pending):
            axes = [axis for axis, how in here.pending if how == reducer]
            for length in range(1, len(axes) + 1):
                for chosen in permutations(axes, length):
                    left = tuple(pair for pair in here.pending if pair[0] not in chosen)
                    if list(chosen) == sorted(chosen, key=axes.index):
                        whole = Layout(here.dims, left)
                        yield self._step(ALL_REDUCE, here, whole, chosen, reducer=reducer)
                    for dim in range(len(self.shape)):
                        for items in self._with(here, dim, chosen):
                            after = Layout(_replaced(here, {dim: items}).dims, left)
                            blocks = 1
                            if len(items) > length and isinstance(items[-length - 1], int):
                                blocks = int(items[-length - 1])
                            yield self._step(REDUCE_SCATTER, here, after, chosen, dim, reducer=reducer, blocks=blocks)

    def _permutes(self, here: Layout) -> Iterator[Step]:
        """Layouts whose blocks are the same ones on other ranks.

        Exchanging axes of one size always is a renumbering of ranks, pending reductions included. With reductions left
        alone, so is every other assignment of axes to the same cuts.
        """
        if len(self.mesh.names) == 1:
            return
        pending = {axis for axis, _ in here.pending}
        free = [axis for axis in self.mesh.names if axis not in pending]
        wanted = [_blocks(items, self.mesh) for items in here.dims]
        seen = {here}
        for order in permutations(free):
            dims, left = [], list(order)
            for blocks in wanted:
                items = _filled(blocks, left, self.mesh)
                if items is None:
                    break
                dims.append(items)
            else:
                seen.add(Layout(tuple(dims), here.pending))
        for order in permutations(self.mesh.names):
            if all(self.mesh.size(a) == self.mesh.size(b) for a, b in zip(self.mesh.names, order, strict=True)):
                new = dict(zip(self.mesh.names, order, strict=True))
                seen.add(
                    Layout(
                        tuple(tuple(new[i] if isinstance(i, str) else i for i in items) for items in here.dims),
                        tuple(
                            sorted(
                                ((new[a], how) for a, how in here.pending), key=lambda p: self.mesh.names.index(p[0])
                            )
                        ),
                    )
                )
        buffer = local_shape(self.shape, here, self.mesh)
        for after in sorted(seen - {here}, key=repr):
            if all(self._allowed(dim, items) for dim, items in enumerate(after.dims)):
                moved = Collective(
                    kind=PERMUTE,
                    mesh_dim="world",
                    axes=self.mesh.names,
                    group=self.mesh.ranks,
                    dtype=self.dtype,
                    local_in=buffer,
                    local_out=buffer,
                )
                yield Step(PERMUTE, after, (moved,))

    def _with(self, here: Layout, dim: int, axes: tuple[str, ...]) -> Iterator[Items]:
        """Yield the items of `dim` with `axes` as the innermost cuts: plain, or inside blocks that are asked for."""
        start = here.dims[dim]
        plain = (*start, *axes)
        if self._allowed(dim, plain):
            yield plain
        for where, items in sorted(self.special, key=repr):
            middle = items[len(start) : len(start) + 1]
            longer = (*start, *middle, *axes)
            if where == dim and items[: len(longer)] == longer and longer != plain and isinstance(middle[0], int):
                yield longer

    def _allowed(self, dim: int, items: Items) -> bool:
        return fits(self.shape[dim], items, self.mesh) or any(
            where == dim and special[: len(items)] == items for where, special in self.special
        )

    def _step(
        self,
        kind: str,
        here: Layout,
        after: Layout,
        axes: tuple[str, ...],
        dim: int = 0,
        *,
        reducer: str = "",
        blocks: int = 1,
    ) -> Step:
        """Return a collective over `axes`. Where `dim` keeps `blocks` whole outside the cut, each goes on its own.

        That is what a loop over tiles does, and it needs no copy into another order.
        """
        group = self.mesh.size(axes)
        before, behind = list(local_shape(self.shape, here, self.mesh)), list(local_shape(self.shape, after, self.mesh))
        # Uneven pieces travel padded: the joined buffer is the piece times the group.
        if kind == ALL_GATHER:
            behind[dim] = before[dim] * group
        elif kind == REDUCE_SCATTER:
            before[dim] = behind[dim] * group
        elif kind == ALL_TO_ALL:
            for position, (was, now) in enumerate(zip(before, behind, strict=True)):
                if here.dims[position] != after.dims[position]:
                    if len(here.dims[position]) > len(after.dims[position]):
                        behind[position] = was * group
                    else:
                        before[position] = now * group
        if blocks > 1:
            before[dim] //= blocks
            behind[dim] //= blocks
        one = Collective(
            kind=kind,
            mesh_dim=self.mesh.group_name(axes),
            axes=axes,
            group=group,
            dtype=self.dtype,
            local_in=tuple(before),
            local_out=tuple(behind),
            reducer=reducer,
        )
        return Step(kind, after, (one,) * blocks)


def _replaced(here: Layout, dims: dict[int, Items]) -> Layout:
    return Layout(tuple(dims.get(dim, items) for dim, items in enumerate(here.dims)), here.pending)


def _blocks(items: Items, mesh: Mesh) -> list[int]:
    """Return the cuts of a dim without names: pieces over neighbouring axes as positive, whole blocks as negative."""
    out: list[int] = []
    for item in items:
        if isinstance(item, int):
            out.append(-item)
        elif out and out[-1] > 0:
            out[-1] *= mesh.size(item)
        else:
            out.append(mesh.size(item))
    return out


def _filled(blocks: list[int], left: list[str], mesh: Mesh) -> Items | None:
    """Return items that cut as `blocks` do, taking axes from the front of `left`; None if they do not come out even."""
    items: list[str | int] = []
    for block in blocks:
        if block < 0:
            items.append(-block)
            continue
        pieces = block
        while pieces > 1:
            if not left or pieces % mesh.size(left[0]):
                return None
            pieces //= mesh.size(left[0])
            items.append(left.pop(0))
    return tuple(items)
