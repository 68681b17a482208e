"""Times of redistributions between all layouts of a tensor at once.

The primitives between layouts depend on a tensor's dims only through their divisors, so tensors with the same
divisibility share a graph of layouts; with the times of its edges, all shortest paths are found together. Tensors that
may have blocks or uneven shards have a graph of their own, as their sizes matter.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra

from planner.sharding.layouts.collectives import ALL_GATHER, REDUCE_SCATTER, SLICE
from planner.sharding.layouts.layout import Layout, Mesh, local_shape
from planner.sharding.layouts.redistribution import Redistributor
from planner.sharding.operators.operator import Tensor
from planner.sharding.problem.deadline import Deadline
from planner.sharding.solver.pricing import DUALS, TimePricing
from simulator.config.runtime import ELEMENT_BYTES

Times = NDArray[np.float64]
_DTYPE = "f32"
_OF_ROWS = (ALL_GATHER, REDUCE_SCATTER)


@dataclass(slots=True)
class _LayoutGraph:
    """The layouts of tensors with the same divisibility, and the primitives between them."""

    redistributor: Redistributor
    deadline: Deadline
    numbers: dict[Layout, int] = field(default_factory=dict)
    layouts: list[Layout] = field(default_factory=list)
    expanded: int = 0
    edges: list[tuple[int, int, int, float]] = field(default_factory=list)  # source, target, primitive, share of bytes
    # kind, mesh axes, how many run, and whether rows are gathered or scattered
    primitives: dict[tuple[str, tuple[str, ...], int, bool], int] = field(default_factory=dict)
    _sliced: dict[Layout, float] = field(default_factory=dict)

    def number(self, layout: Layout) -> int:
        if layout not in self.numbers:
            self.numbers[layout] = len(self.layouts)
            self.layouts.append(layout)
        return self.numbers[layout]

    def expand(self, layouts: Iterable[Layout]) -> None:
        """Add `layouts` and all that can be reached from them."""
        for layout in layouts:
            self.number(layout)
        moves = self.redistributor
        total = prod(moves.shape) * ELEMENT_BYTES[moves.dtype]
        while self.expanded < len(self.layouts):
            self.deadline.check()
            source = self.expanded
            self.expanded += 1
            for step in moves.steps(self.layouts[source]):
                target = self.number(step.after)
                if step.collectives:
                    one = step.collectives[0]
                    share = (one.bytes_out if one.kind == ALL_GATHER else one.bytes_in) / total
                    rows = one.kind in _OF_ROWS and self.layouts[source].dims[-1:] == step.after.dims[-1:]
                    key = (one.kind, one.axes, len(step.collectives), rows)
                else:
                    share = self._share(step.after)
                    key = (SLICE, (), 1, False)
                primitive = self.primitives.setdefault(key, len(self.primitives))
                self.edges.append((source, target, primitive, share))

    def _share(self, layout: Layout) -> float:
        """Return a rank's share of the tensor."""
        if layout not in self._sliced:
            moves = self.redistributor
            self._sliced[layout] = prod(local_shape(moves.shape, layout, moves.mesh)) / prod(moves.shape)
        return self._sliced[layout]


@dataclass(slots=True)
class MoveTimes:
    """Times in picoseconds between layouts, by tensor shape and dtype.

    Of what gathers or scatters rows, the share `hidden` takes no time: a product may run alongside it.
    """

    mesh: Mesh
    pricing: TimePricing
    deadline: Deadline = field(default_factory=Deadline)  # of listing layouts
    hidden: float = 0.0
    _graphs: dict[Hashable, _LayoutGraph] = field(default_factory=dict)
    _times: dict[tuple[int, int, int, bool], Times] = field(default_factory=dict)

    def prepare(self, tensor: Tensor, own: Redistributor, layouts: Iterable[Layout]) -> None:
        """Note layouts that will be asked about: all that are known before the first question are solved at once."""
        self._graph(tensor, own).expand(layouts)

    def _graph(self, tensor: Tensor, own: Redistributor) -> _LayoutGraph:
        """Return the graph of a tensor; `own` is its redistributor, whose irregular specs and excluded primitives are
        kept.
        """
        if own.irregular_specs or own.excluded_kinds:
            key: Hashable = (tensor.shape, tensor.dtype, own.irregular_specs, own.excluded_kinds)
        else:
            key = tuple(gcd(size, self.mesh.ranks) for size in tensor.shape)
        if key not in self._graphs:
            if own.irregular_specs or own.excluded_kinds:
                moves = Redistributor(tensor.shape, tensor.dtype, self.mesh, own.irregular_specs, own.excluded_kinds)
            else:
                moves = Redistributor(tuple(gcd(size, self.mesh.ranks) for size in tensor.shape), _DTYPE, self.mesh)
            self._graphs[key] = _LayoutGraph(moves, self.deadline)
        return self._graphs[key]

    def between(
        self, tensor: Tensor, own: Redistributor, sources: Sequence[Layout], targets: Sequence[Layout], *, duals: bool
    ) -> Times:
        """Return the times of all pairs, infinite where there is no path; with `duals` those of the gradient as
        well.
        """
        graph = self._graph(tensor, own)
        graph.expand([*sources, *targets])
        nbytes = prod(tensor.shape) * ELEMENT_BYTES[tensor.dtype]
        key = (id(graph), nbytes, len(graph.layouts), duals)
        if key not in self._times:
            self._times[key] = self._shortest(graph, nbytes, duals=duals)
        rows = [graph.numbers[layout] for layout in sources]
        columns = [graph.numbers[layout] for layout in targets]
        return self._times[key][np.ix_(rows, columns)]

    def _shortest(self, graph: _LayoutGraph, nbytes: int, *, duals: bool) -> Times:
        size = len(graph.layouts)
        if not graph.edges:
            return np.where(np.eye(size, dtype=bool), 0.0, np.inf)
        source, target, primitive, share = (np.array(column) for column in zip(*graph.edges, strict=True))
        sizes = share * nbytes
        times = np.empty(len(sizes))
        for (kind, axes, number_of, rows), number in graph.primitives.items():
            at = primitive == number
            one = self.pricing.copy(sizes[at]) if kind == SLICE else self.pricing.times(kind, axes, sizes[at])
            if duals:
                back = DUALS.get(kind, kind)
                one = one + (one if back == kind else self.pricing.times(back, axes, sizes[at]))
            times[at] = one * number_of * (1 - self.hidden * rows)
        order = np.lexsort((times, target, source))
        source, target, times = source[order], target[order], times[order]
        first = np.concatenate([[True], (np.diff(source) != 0) | (np.diff(target) != 0)])
        matrix = csr_matrix((np.maximum(times[first], 1.0), (source[first], target[first])), shape=(size, size))
        return np.asarray(dijkstra(matrix))
