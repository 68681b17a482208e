"""What no assignment of layers to the stages of one pipeline can beat, and the assignments that may be below a limit.

Layers go to ranks in order, so an assignment is a path over states (layers so far, leading dense layers so far), one
step a rank. A rank with an option takes as long as that says (`simulator.bounds.lower_bound.RankBounds`) after the
first micro batch has reached it, which is later the more the ranks before it do: so of all paths to a state the one
that gets there first is the best for what follows, and whether any assignment is below a limit follows from one pass
over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from planner.search.stages.options import Pipeline, RankOptions
from simulator.columns.plan_table import Floats
from topology.time_limit import check_time

CLOSE = 1e-4  # relative: how closely the least bound is found
Rows = NDArray[np.intp]


class AssignmentBounds:
    """The bounds of all assignments of the options of one pipeline. A limit is of seconds of the whole step."""

    def __init__(self, pipe: Pipeline) -> None:
        self.pipe, self.options = pipe, pipe.options
        self.of_rank = [np.nonzero(self.options.rank == rank)[0] for rank in range(pipe.plan.pp)]

    def least(self, cutoff_s: float) -> tuple[float, float] | None:
        """Return (seconds that no assignment is below, a little more that some assignment is bounded by); None where
        all take `cutoff_s` or more.
        """
        if any(not len(rows) for rows in self.of_rank):
            return None
        options = self.options
        low = self.pipe.fixed_s + max(float(options.at_least_s[rows].min()) for rows in self.of_rank)
        longest = self.pipe.fixed_s + float(options.at_least_s.max() + self.pipe.plan.pp * options.passing_s.max())
        high = min(cutoff_s, longest)
        if low > high or not self._possible(high):
            return None
        if self._possible(low * (1 + CLOSE)):
            return low, low * (1 + CLOSE)
        while high > low * (1 + CLOSE):
            middle = (low + high) / 2
            low, high = (low, middle) if self._possible(middle) else (middle, high)
        return low, high

    def below(self, limit_s: float, most: int) -> tuple[list[Rows], bool]:
        """Return assignments with a bound of no more than a limit, as rows of the options, one a rank; `most` of them
        at most, and whether that is all.
        """
        found: list[Rows] = []
        for rows in self._paths(self._latest(limit_s), limit_s):
            if len(found) == most:
                return found, False
            found.append(rows)
        return found, True

    def bound_s(self, rows: Rows) -> float:
        """Return what an assignment takes at least."""
        chosen: RankOptions = self.options.take(rows)
        since = np.concatenate([[0.0], np.cumsum(chosen.passing_s)[:-1]])
        ends = np.maximum(chosen.own_s + np.maximum(since - chosen.deferred_s, chosen.drain_s), chosen.alone_s)
        return self.pipe.fixed_s + float(ends.max())

    def _begins_by(self, limit_s: float) -> Floats:
        """Return of every option when its rank has to have begun at the latest; before the start where it cannot end in
        time.
        """
        options, left = self.options, limit_s - self.pipe.fixed_s
        return np.where(options.at_least_s <= left, options.deferred_s + left - options.own_s, -np.inf)

    def _possible(self, limit_s: float) -> bool:
        return bool(self._latest(limit_s)[0][0, 0] >= 0.0)

    def _latest(self, limit_s: float) -> list[Floats]:
        """Return for every rank, and after the last, when it has to begin at the latest in each state."""
        layers, leading = self.pipe.layers, self.pipe.leading_dense_layers
        options, begins_by = self.options, self._begins_by(limit_s)
        after = np.full((layers + 1, leading + 1), -np.inf)
        after[layers, leading] = np.inf
        tables = [after]
        dense = np.arange(leading + 1)
        for rows in reversed(self.of_rank):
            check_time()
            before = np.full((layers + 1, leading + 1), -np.inf)
            for row in rows[begins_by[rows] >= 0.0]:
                count = int(options.layers[row])
                onward = np.minimum(dense + options.first_stage_layers[row], leading)
                some = np.nonzero(onward - dense == options.dense[row])[0]
                time = np.minimum(begins_by[row], after[count:, onward[some]] - options.passing_s[row])
                source = slice(0, layers + 1 - count)
                before[source, some] = np.maximum(before[source, some], time)
            tables.append(before)
            after = before
        return tables[::-1]

    def _paths(self, latest: list[Floats], limit_s: float) -> Iterator[Rows]:
        """Yield the assignments that keep to the latest times of all ranks."""
        options, leading, begins_by = self.options, self.pipe.leading_dense_layers, self._begins_by(limit_s)

        def extended(path: tuple[int, ...], layers: int, dense: int, since: float) -> Iterator[Rows]:
            rank = len(path)
            if rank == len(self.of_rank):
                yield np.array(path, dtype=np.intp)
                return
            rows = self.of_rank[rank]
            onward = np.minimum(dense + options.first_stage_layers[rows], leading)
            can = (onward - dense == options.dense[rows]) & (since <= begins_by[rows])
            can &= layers + options.layers[rows] <= self.pipe.layers
            rows, onward = rows[can], onward[can]
            begins = since + options.passing_s[rows]
            in_time = begins <= latest[rank + 1][layers + options.layers[rows], onward]
            for row, at, then in zip(rows[in_time], onward[in_time], begins[in_time], strict=True):
                yield from extended((*path, int(row)), layers + int(options.layers[row]), int(at), float(then))

        return extended((), 0, 0, 0.0)
