"""From one layout of a tensor to another: the cheapest sequence of primitives, by Dijkstra's algorithm over layouts.

Layouts are the nodes of the graph; its edges are the primitives:

    slice           a replicated mesh axis shards a dim; local, no bytes
    all-gather      the innermost mesh axes of a dim are gathered; several at once as one flattened group
    reduce-scatter  pending mesh axes are reduced and shard a dim
    all-reduce      pending mesh axes are reduced
    all-to-all      the innermost mesh axes of a dim move to another dim
    permute         every rank's shard moves to another rank: mesh axes swap, or shard the same dims in another order

Costs add up along a path, so the result is the cheapest sequence of these primitives, and the triangle inequality holds
by construction: no detour through a third layout is cheaper than the direct path.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, permutations

import numpy as np
from numpy.typing import NDArray

from planner.sharding.layouts.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    FREE,
    PERMUTE,
    REDUCE_SCATTER,
    SLICE,
    Collective,
    Cost,
    add_costs,
    cost_of,
)
from planner.sharding.layouts.layout import DimSpec, Layout, Mesh, divides_evenly, local_shape, normalize_spec
from topology.errors import Infeasible

MAX_LAYOUTS = 20_000
CostTable = tuple[NDArray[np.float64], NDArray[np.int64]]


def tie_of(cost: Cost) -> int:
    """Return the order among equal costs: collectives, then ring steps, then slices; five bits are reserved for
    others.
    """
    _, number, hops, _, slices = cost
    return (number << 34) + (min(hops, 1 << 20) << 12) + (slices << 5)


@dataclass(frozen=True, slots=True)
class RedistributionStep:
    """One primitive and the layout after it. A slice has no collective; one on a strided layout may take several."""

    kind: str
    after: Layout
    collectives: tuple[Collective, ...] = ()


@dataclass(slots=True)
class Redistributor:
    """Shortest paths between the layouts of tensors of one shape and dtype; every source is solved once.

    `irregular_specs` are (dim, spec) pairs with blocks or uneven shards, which paths use only if some layout asks for
    them. `excluded_kinds` are primitives that must not be used. `price` returns the cost of a step to pieces of a given
    shape; without it, costs are ring bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    mesh: Mesh
    irregular_specs: frozenset[tuple[int, DimSpec]] = frozenset()
    excluded_kinds: frozenset[str] = frozenset()
    price: Callable[[RedistributionStep, Sequence[int]], Cost] | None = None
    _numbers: dict[Layout, int] = field(default_factory=dict)  # layouts are numbered, since hashing them is slow
    _layouts: list[Layout] = field(default_factory=list)
    _edges: dict[int, list[tuple[Cost, int, RedistributionStep]]] = field(default_factory=dict)
    _paths: dict[int, dict[int, tuple[Cost, int, RedistributionStep | None]]] = field(default_factory=dict)
    _tables: dict[tuple[tuple[int, ...], tuple[int, ...]], CostTable] = field(default_factory=dict)

    def allow_irregular_specs(self, layouts: Iterable[Layout]) -> None:
        """Let paths use the strided and uneven specs of `layouts`."""
        found = {
            (dim, spec)
            for layout in layouts
            for dim, spec in enumerate(layout.dims)
            if any(isinstance(item, int) for item in spec) or not divides_evenly(self.shape[dim], spec, self.mesh)
        }
        if not found <= self.irregular_specs:
            self.irregular_specs |= found
            self._edges.clear()
            self._paths.clear()
            self._tables.clear()

    def costs_between(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> CostTable:
        """Return the cost of every pair and its rank among equal ones (`tie_of`); infinite if there is no path.

        Tables are cached and must not be changed.
        """
        key = tuple(map(self._number, sources)), tuple(map(self._number, targets))
        if key not in self._tables:
            costs = np.full((len(sources), len(targets)), np.inf)
            ties = np.zeros(costs.shape, dtype=np.int64)
            for i, source in enumerate(sources):
                paths = self._paths_from(source)
                for j, target in enumerate(key[1]):
                    if target in paths:
                        costs[i, j], ties[i, j] = paths[target][0][0], tie_of(paths[target][0])
            costs.setflags(write=False)
            ties.setflags(write=False)
            self._tables[key] = costs, ties
        return self._tables[key]

    def cost(self, source: Layout, target: Layout) -> Cost | None:
        """Return the cost of the cheapest path, or None if there is none: a finished sum cannot become pending
        again.
        """
        found = self._paths_from(source).get(self._number(target))
        return found[0] if found else None

    def path(self, source: Layout, target: Layout) -> tuple[RedistributionStep, ...]:
        """Return the steps of the cheapest path. Raises KeyError where `cost` is None."""
        tree, steps, layout = self._paths_from(source), [], self._number(target)
        while layout != self._number(source):
            _, layout, step = tree[layout]
            if step is not None:
                steps.append(step)
        return tuple(reversed(steps))

    def _number(self, layout: Layout) -> int:
        if layout not in self._numbers:
            self._numbers[layout] = len(self._layouts)
            self._layouts.append(layout)
        return self._numbers[layout]

    def _paths_from(self, source: Layout) -> dict[int, tuple[Cost, int, RedistributionStep | None]]:
        number = self._number(source)
        if number not in self._paths:
            self._paths[number] = self._solve_forward(number)
        return self._paths[number]

    def _solve_forward(self, source: int) -> dict[int, tuple[Cost, int, RedistributionStep | None]]:
        best: dict[int, tuple[Cost, int, RedistributionStep | None]] = {source: (FREE, source, None)}
        order = count()  # ties in order of insertion, so that results are deterministic
        queue: list[tuple[Cost, int, int]] = [(FREE, next(order), source)]
        done: set[int] = set()
        while queue:
            _check_layout_count(len(best), len(self.shape))
            cost, _, layout = heapq.heappop(queue)
            if layout in done:
                continue
            done.add(layout)
            for price, after, step in self._edges_from(layout):
                total = add_costs(cost, price)
                if after not in best or total < best[after][0]:
                    best[after] = (total, layout, step)
                    heapq.heappush(queue, (total, next(order), after))
        return best

    def _edges_from(self, number: int) -> list[tuple[Cost, int, RedistributionStep]]:
        if number not in self._edges:
            self._edges[number] = [
                (self._cost(step), self._number(step.after), step) for step in self.steps(self._layouts[number])
            ]
        return self._edges[number]

    def _cost(self, step: RedistributionStep) -> Cost:
        if self.price is not None:
            return self.price(step, local_shape(self.shape, step.after, self.mesh))
        return cost_of(step.collectives, self.mesh.ranks, slices=int(step.kind == SLICE))

    def steps(self, layout: Layout) -> Iterator[RedistributionStep]:
        """Yield every primitive that applies to `layout`."""
        for found in (self._slices, self._gathers, self._reductions, self._permutes):
            yield from (step for step in found(layout) if step.kind not in self.excluded_kinds)

    def _slices(self, layout: Layout) -> Iterator[RedistributionStep]:
        used = layout.axes() | {axis for axis, _ in layout.pending}
        for axis in self.mesh.names:
            if axis not in used:
                for dim in range(len(self.shape)):
                    for spec in self._specs_with(layout, dim, (axis,)):
                        yield RedistributionStep(SLICE, _with_dims(layout, {dim: spec}))

    def _gathers(self, layout: Layout) -> Iterator[RedistributionStep]:
        """Yield all-gathers, and all-to-alls that shard another dim instead; the innermost mesh axis first."""
        order = {name: position for position, name in enumerate(self.mesh.names)}
        dims = sorted(
            range(len(layout.dims)), key=lambda dim: -order[str(layout.dims[dim][-1])] if layout.dims[dim] else 0
        )
        for dim, spec in ((dim, layout.dims[dim]) for dim in dims):
            num_axes = 0
            while num_axes < len(spec) and isinstance(spec[-1 - num_axes], str):
                num_axes += 1
                moved_axes = tuple(str(item) for item in spec[-num_axes:])
                if self._has_axis_of_one_rank(moved_axes):
                    continue
                remaining = normalize_spec(spec[:-num_axes])
                blocks = 1 if remaining == spec[:-num_axes] else int(spec[-num_axes - 1])
                if not self._is_allowed(dim, remaining):
                    continue
                gathered = _with_dims(layout, {dim: remaining})
                yield self._collective_step(ALL_GATHER, layout, gathered, moved_axes, dim, blocks=blocks)
                for other in range(len(self.shape)):
                    if other != dim:
                        for sharded in self._specs_with(layout, other, moved_axes):
                            yield self._collective_step(
                                ALL_TO_ALL, layout, _with_dims(gathered, {other: sharded}), moved_axes
                            )

    def _reductions(self, layout: Layout) -> Iterator[RedistributionStep]:
        sums = {"sum", "mask"} if "sum" in dict(layout.pending).values() else set()  # a sum also ends `mask`
        for reducer in dict.fromkeys("sum" if reducer in sums else reducer for _, reducer in layout.pending):
            axes = [axis for axis, how in layout.pending if how == reducer or (reducer == "sum" and how in sums)]
            for length in range(1, len(axes) + 1):
                for chosen in permutations(axes, length):
                    if self._has_axis_of_one_rank(chosen):
                        continue
                    remaining = tuple(pair for pair in layout.pending if pair[0] not in chosen)
                    if list(chosen) == sorted(chosen, key=axes.index):
                        whole = Layout(layout.dims, remaining)
                        yield self._collective_step(ALL_REDUCE, layout, whole, chosen, reducer=reducer)
                    for dim in range(len(self.shape)):
                        for spec in self._specs_with(layout, dim, chosen):
                            after = Layout(_with_dims(layout, {dim: spec}).dims, remaining)
                            blocks = 1
                            if len(spec) > length and isinstance(spec[-length - 1], int):
                                blocks = int(spec[-length - 1])
                            yield self._collective_step(
                                REDUCE_SCATTER, layout, after, chosen, dim, reducer=reducer, blocks=blocks
                            )

    def _permutes(self, layout: Layout) -> Iterator[RedistributionStep]:
        """Yield permutes: to layouts with the same shards on other ranks.

        Swapping mesh axes of equal size renumbers the ranks, pending reductions included. Any other assignment of mesh
        axes to the same shards does so as well, if it leaves the pending mesh axes alone.
        """
        if len(self.mesh.names) == 1:
            return
        layouts = {*self._other_axis_assignments(layout), *self._swapped_axes(layout)} - {layout}
        buffer = local_shape(self.shape, layout, self.mesh)
        for after in sorted(layouts, key=repr):
            allowed = all(self._is_allowed(dim, spec) for dim, spec in enumerate(after.dims))
            if allowed and self._has_same_pieces(layout, after):
                collective = Collective(
                    kind=PERMUTE,
                    mesh_dim="world",
                    axes=self.mesh.names,
                    group=self.mesh.ranks,
                    dtype=self.dtype,
                    local_in=buffer,
                    local_out=buffer,
                )
                yield RedistributionStep(PERMUTE, after, (collective,))

    def _has_same_pieces(self, before: Layout, after: Layout) -> bool:
        """Return whether pieces with the same index are equal: for an uneven dim they depend on the order of its
        splits.
        """
        both = zip(self.shape, before.dims, after.dims, strict=True)
        return all(
            divides_evenly(size, old, self.mesh) or _cuts(old, self.mesh) == _cuts(new, self.mesh)
            for size, old, new in both
        )

    def _other_axis_assignments(self, layout: Layout) -> Iterator[Layout]:
        """Yield the layouts with the same shards over other mesh axes, except pending axes."""
        pending = {axis for axis, _ in layout.pending}
        shard_counts = [_shard_counts(spec, self.mesh) for spec in layout.dims]
        for order in permutations(axis for axis in self.mesh.names if axis not in pending):
            dims, remaining = [], list(order)
            for counts in shard_counts:
                spec = _assign_axes(counts, remaining, self.mesh)
                if spec is None:
                    break
                dims.append(spec)
            else:
                yield Layout(tuple(dims), layout.pending)

    def _swapped_axes(self, layout: Layout) -> Iterator[Layout]:
        """Yield the layouts in which mesh axes of equal size have swapped."""
        names = self.mesh.names
        for order in permutations(names):
            if any(self.mesh.size(old) != self.mesh.size(new) for old, new in zip(names, order, strict=True)):
                continue
            renamed = dict(zip(names, order, strict=True))
            dims = tuple(tuple(renamed[i] if isinstance(i, str) else i for i in spec) for spec in layout.dims)
            pending = sorted(((renamed[axis], how) for axis, how in layout.pending), key=lambda p: names.index(p[0]))
            yield Layout(dims, tuple(pending))

    def _specs_with(self, layout: Layout, dim: int, axes: tuple[str, ...]) -> Iterator[DimSpec]:
        """Yield the specs of `dim` with `axes` added innermost: directly, or inside blocks that `irregular_specs`
        has.
        """
        prefix = layout.dims[dim]
        unblocked = (*prefix, *axes)
        if self._is_allowed(dim, unblocked):
            yield unblocked
        for where, spec in sorted(self.irregular_specs, key=repr):
            block = spec[len(prefix) : len(prefix) + 1]
            blocked = (*prefix, *block, *axes)
            if where == dim and spec[: len(blocked)] == blocked and blocked != unblocked and isinstance(block[0], int):
                yield blocked

    def _has_axis_of_one_rank(self, axes: tuple[str, ...]) -> bool:
        """Return whether the group over `axes` is also one over fewer axes, because one of them has a single rank."""
        return len(axes) > 1 and any(self.mesh.size(axis) == 1 for axis in axes)

    def _is_allowed(self, dim: int, spec: DimSpec) -> bool:
        return divides_evenly(self.shape[dim], spec, self.mesh) or any(
            where == dim and special[: len(spec)] == spec for where, special in self.irregular_specs
        )

    def _collective_step(
        self,
        kind: str,
        layout: Layout,
        after: Layout,
        axes: tuple[str, ...],
        dim: int = 0,
        *,
        reducer: str = "",
        blocks: int = 1,
    ) -> RedistributionStep:
        """Return the step of a collective over `axes`. Where `dim` has `blocks` major to them, there is one per block.

        This is what a loop over tiles does, and it needs no copy to reorder elements.
        """
        group = self.mesh.size(axes)
        if group == 1:
            return RedistributionStep(SLICE, after)
        before_shape = list(local_shape(self.shape, layout, self.mesh))
        after_shape = list(local_shape(self.shape, after, self.mesh))
        # Uneven shards are padded: the gathered buffer is the largest shard times the group size.
        if kind == ALL_GATHER:
            after_shape[dim] = before_shape[dim] * group
        elif kind == REDUCE_SCATTER:
            before_shape[dim] = after_shape[dim] * group
        elif kind == ALL_TO_ALL:
            for position, (was, now) in enumerate(zip(before_shape, after_shape, strict=True)):
                if layout.dims[position] != after.dims[position]:
                    if len(layout.dims[position]) > len(after.dims[position]):
                        after_shape[position] = was * group
                    else:
                        before_shape[position] = now * group
        if blocks > 1:
            before_shape[dim] //= blocks
            after_shape[dim] //= blocks
        collective = Collective(
            kind=kind,
            mesh_dim=self.mesh.group_name(axes),
            axes=axes,
            group=group,
            dtype=self.dtype,
            local_in=tuple(before_shape),
            local_out=tuple(after_shape),
            reducer=reducer,
        )
        return RedistributionStep(kind, after, (collective,) * blocks)


def _check_layout_count(layouts: int, dims: int) -> None:
    if layouts > MAX_LAYOUTS:
        raise Infeasible(
            f"a tensor of {dims} dims has more than {MAX_LAYOUTS:,} layouts on this mesh",
            why="redistributions search all of them",
            remedy="use fewer mesh axes, or merge dims that are not sharded",
        )


def _with_dims(layout: Layout, dims: dict[int, DimSpec]) -> Layout:
    return Layout(tuple(dims.get(dim, spec) for dim, spec in enumerate(layout.dims)), layout.pending)


def _cuts(spec: DimSpec, mesh: Mesh) -> list[int]:
    """Return the number of pieces into which each item of a spec splits the rest left by the items before it."""
    return [n for item in spec if (n := item if isinstance(item, int) else mesh.size(item)) > 1]


def _shard_counts(spec: DimSpec, mesh: Mesh) -> list[int]:
    """Return a spec without axis names: shards over adjacent mesh axes as positive counts, blocks as negative ones."""
    out: list[int] = []
    for item in spec:
        if isinstance(item, int):
            out.append(-item)
        elif out and out[-1] > 0:
            out[-1] *= mesh.size(item)
        else:
            out.append(mesh.size(item))
    return out


def _assign_axes(counts: list[int], remaining: list[str], mesh: Mesh) -> DimSpec | None:
    """Return a spec with these `_shard_counts`, of mesh axes from the front of `remaining`; None if none fits."""
    spec: list[str | int] = []
    for entry in counts:
        if entry < 0:
            spec.append(-entry)
            continue
        shards = entry
        while shards > 1:
            if not remaining or shards % mesh.size(remaining[0]):
                return None
            shards //= mesh.size(remaining[0])
            spec.append(remaining.pop(0))
    return tuple(spec)
