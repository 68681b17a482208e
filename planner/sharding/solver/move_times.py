"""Times of redistributions between all layouts of a tensor at once.

Which primitives lead from which layout to which depends on a tensor's dims only through what divides them, so tensors of
one divisibility share a graph of layouts; times are then those of its edges, and all shortest paths are found together.
Layouts with blocks or uneven shards are not among them: `planner.sharding.layouts.redistribution` does those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra

from planner.sharding.layouts.collectives import ALL_GATHER, SLICE
from planner.sharding.layouts.layout import Layout
from planner.sharding.layouts.mesh import Mesh
from planner.sharding.layouts.redistribution import Redistributor
from planner.sharding.operators.operator import Tensor
from planner.sharding.solver.pricing import TimePricing
from simulator.config.runtime import ELEMENT_BYTES

Times = NDArray[np.float64]
_DTYPE = "f32"


@dataclass(slots=True)
class _LayoutGraph:
    """The layouts of tensors of one divisibility, and the primitives between them."""

    redistributor: Redistributor
    numbers: dict[Layout, int] = field(default_factory=dict)
    layouts: list[Layout] = field(default_factory=list)
    expanded: int = 0
    edges: list[tuple[int, int, int, float]] = field(default_factory=list)  # source, target, primitive, share of bytes
    primitives: dict[tuple[str, tuple[str, ...]], int] = field(default_factory=dict)

    def number(self, layout: Layout) -> int:
        if layout not in self.numbers:
            self.numbers[layout] = len(self.layouts)
            self.layouts.append(layout)
        return self.numbers[layout]

    def expand(self, layouts: Iterable[Layout]) -> None:
        """Add `layouts` and all that can be reached from them."""
        for layout in layouts:
            self.number(layout)
        total = prod(self.redistributor.shape) * ELEMENT_BYTES[_DTYPE]
        while self.expanded < len(self.layouts):
            source = self.expanded
            self.expanded += 1
            for step in self.redistributor.steps(self.layouts[source]):
                target = self.number(step.after)
                if step.collectives:
                    (one,) = step.collectives
                    nbytes = one.bytes_out if one.kind == ALL_GATHER else one.bytes_in
                    key = (one.kind, one.axes)
                else:
                    nbytes = total // max(1, self._shards(step.after))
                    key = (SLICE, ())
                primitive = self.primitives.setdefault(key, len(self.primitives))
                self.edges.append((source, target, primitive, nbytes / total))

    def _shards(self, layout: Layout) -> int:
        return self.redistributor.mesh.size(layout.axes())


@dataclass(slots=True)
class MoveTimes:
    """Times in picoseconds between layouts, by tensor shape and dtype."""

    mesh: Mesh
    pricing: TimePricing
    _graphs: dict[tuple[int, ...], _LayoutGraph] = field(default_factory=dict)
    _times: dict[tuple[tuple[int, ...], int, int], Times] = field(default_factory=dict)

    def prepare(self, tensor: Tensor, layouts: Iterable[Layout]) -> None:
        """Note layouts that will be asked about: all that are known before the first question are solved at once."""
        self._graph(tensor).expand(layouts)

    def _graph(self, tensor: Tensor) -> _LayoutGraph:
        signature = tuple(gcd(size, self.mesh.ranks) for size in tensor.shape)
        if signature not in self._graphs:
            self._graphs[signature] = _LayoutGraph(Redistributor(signature, _DTYPE, self.mesh))
        return self._graphs[signature]

    def between(self, tensor: Tensor, sources: Sequence[Layout], targets: Sequence[Layout]) -> Times:
        """Return the times of all pairs, infinite where there is no path."""
        graph = self._graph(tensor)
        graph.expand([*sources, *targets])
        nbytes = prod(tensor.shape) * ELEMENT_BYTES[tensor.dtype]
        key = (graph.redistributor.shape, nbytes, len(graph.layouts))
        if key not in self._times:
            self._times[key] = self._shortest(graph, nbytes)
        rows = [graph.numbers[layout] for layout in sources]
        columns = [graph.numbers[layout] for layout in targets]
        return self._times[key][np.ix_(rows, columns)]

    def _shortest(self, graph: _LayoutGraph, nbytes: int) -> Times:
        size = len(graph.layouts)
        if not graph.edges:
            return np.where(np.eye(size, dtype=bool), 0.0, np.inf)
        source, target, primitive, share = (np.array(column) for column in zip(*graph.edges, strict=True))
        sizes = share * nbytes
        times = np.empty(len(sizes))
        for (kind, axes), number in graph.primitives.items():
            at = primitive == number
            times[at] = self.pricing.copy(sizes[at]) if kind == SLICE else self.pricing.times(kind, axes, sizes[at])
        order = np.lexsort((times, target, source))
        source, target, times = source[order], target[order], times[order]
        first = np.concatenate([[True], (np.diff(source) != 0) | (np.diff(target) != 0)])
        matrix = csr_matrix((np.maximum(times[first], 1.0), (source[first], target[first])), shape=(size, size))
        return np.asarray(dijkstra(matrix))
