"""What no way to fill a pipeline's stages can beat, and which alternatives of its ranks that leaves over.

Layers go to ranks in order, so a way to fill them is a path over (rank, layers so far, dense layers of the beginning so
far). Shortest paths forwards and backwards, by dynamic programming, say for every alternative what any filling that uses
it must at least take: the sum of all ranks' seconds, and the slowest of them. An alternative whose bound is no better than
what is known already cannot be part of anything better: it is fixed to "no" before a solver sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.stage_options import Options, Pipeline
from simulator.plan_table import Floats

ZERO_BUBBLE = ("ZBH1", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
ROUNDS = 4  # of fixing; each makes the next one's bounds a little sharper


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """Alternatives left over, `slowest` marks those that could be the slowest rank's; `order` is who is slower.

    `order` are whole numbers: of two ranks the one with the larger decides (of equals in time, the earlier rank).
    Nothing takes less than `bound_s`; without alternatives that is the value that was to be beaten.
    """

    options: Options
    slowest: NDArray[np.bool_]
    order: NDArray[np.int64]
    bound_s: float


def remaining(pipe: Pipeline, cutoff_s: float) -> Remaining:
    """Return the alternatives that a filling of less than `cutoff_s` could use."""
    options = pipe.options
    order = _order(options)
    alive = np.ones(len(options), dtype=np.bool_)
    slowest = alive.copy()
    bound = np.full(len(options), np.inf)
    for _ in range(ROUNDS):
        seconds = _through(pipe, options, np.where(alive, options.seconds, np.inf), summed=True)
        worst = _through(pipe, options, np.where(alive, order, np.inf), summed=False)
        bound = at_least_s(pipe, options, seconds)
        slowest = alive & np.isfinite(seconds) & (worst <= order) & (bound < cutoff_s)
        if not slowest.any():
            break
        kept = alive & np.isfinite(seconds) & (worst <= order[slowest].max())
        if pipe.plan.schedule not in ZERO_BUBBLE:
            kept &= _with_the_best_slowest(pipe, options, seconds, slowest) < cutoff_s
        if (kept == alive).all():
            break
        alive = kept
    if not slowest.any():
        nothing = np.zeros(0, dtype=np.intp)
        return Remaining(
            options=options.take(nothing),
            slowest=slowest[nothing],
            order=order[nothing],
            bound_s=cutoff_s,
        )
    return Remaining(
        options=options.take(alive),
        slowest=slowest[alive],
        order=order[alive],
        bound_s=min(cutoff_s, float(bound[slowest].min())),
    )


def at_least_s(pipe: Pipeline, slowest: Options, seconds: Floats) -> Floats:
    """Return a lower bound of the step, one micro batch taking all ranks `seconds` together, for each slowest rank."""
    stages, others = pipe.plan.virtual_stages, pipe.plan.pp - 1
    rest = np.maximum(seconds - slowest.seconds, 0.0)
    if pipe.plan.schedule in ZERO_BUBBLE:
        bubble = np.zeros_like(rest)
    elif stages > 1:
        bubble = np.maximum(rest, others * slowest.seconds) / stages
    else:
        bubble = rest
    return np.asarray(slowest.alone_least + host_and_bubble_s(pipe, slowest, bubble) + slowest.update)


def host_and_bubble_s(pipe: Pipeline, slowest: Options, bubble: Floats) -> Floats:
    """Return seconds of host and bubble together, hosts not waiting for each other: monotone in the bubble."""
    if pipe.synchronizes:
        return slowest.before + slowest.late + bubble
    return slowest.before + np.maximum(slowest.late, bubble + slowest.first)


def _with_the_best_slowest(pipe: Pipeline, options: Options, seconds: Floats, slowest: NDArray[np.bool_]) -> Floats:
    """Return for every alternative the least step with it, whoever is the slowest."""
    some = options.take(slowest)
    least = np.full(len(options), np.inf)
    for row in range(len(some)):
        one = some.take(np.array([row]))
        least = np.minimum(least, at_least_s(pipe, one, np.maximum(seconds, one.seconds)))
    return least


def _order(options: Options) -> NDArray[np.int64]:
    """Return whole numbers in the order of time; of equals the earlier rank is the slower."""
    sorted_rows = np.lexsort((-options.rank, options.seconds))
    steps = np.ones(len(options), dtype=np.int64)
    time, rank = options.seconds[sorted_rows], options.rank[sorted_rows]
    steps[1:] = (time[1:] != time[:-1]) | (rank[1:] != rank[:-1])
    order = np.empty(len(options), dtype=np.int64)
    order[sorted_rows] = np.cumsum(steps)
    return order


def _through(pipe: Pipeline, options: Options, cost: Floats, *, summed: bool) -> Floats:
    """Return for every alternative the least total (or largest) cost of a whole filling that uses it."""
    join = np.add if summed else np.maximum
    ranks, layers, leading = pipe.plan.pp, pipe.layers, pipe.leading
    kinds = _kinds(pipe, options, cost)
    forwards, backwards = [_start(layers, leading, 0, 0)], [_start(layers, leading, layers, leading)]
    for rank in range(ranks):
        after = np.full((layers + 1, leading + 1), np.inf)
        for kind in kinds[rank]:
            here, there = kind.step(layers, leading)
            np.minimum(after[there], join(forwards[-1][here], kind.cost), out=after[there])
        forwards.append(after)
    for rank in reversed(range(ranks)):
        before = np.full((layers + 1, leading + 1), np.inf)
        for kind in kinds[rank]:
            here, there = kind.step(layers, leading)
            np.minimum(before[here], join(backwards[-1][there], kind.cost), out=before[here])
        backwards.append(before)
    backwards.reverse()
    result = np.full(len(options), np.inf)
    for rank in range(ranks):
        for kind in kinds[rank]:
            here, there = kind.step(layers, leading)
            around = join(forwards[rank][here], backwards[rank + 1][there]).min(initial=np.inf)
            result[kind.rows] = join(around, cost[kind.rows])
    return result


def _start(layers: int, leading: int, at: int, dense: int) -> Floats:
    table = np.full((layers + 1, leading + 1), np.inf)
    table[at, dense] = 0.0
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Alternatives of a rank with the same layers, in whatever modes: `cost` is that of the cheapest."""

    count: int
    early: int
    dense: int
    cost: float
    rows: NDArray[np.intp]

    def step(self, layers: int, leading: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """Return (states before, states after): layers so far, and dense ones of the beginning among them.

        `dense` of a first stage of `early` layers are dense: all of them while the beginning lasts, then what is left.
        """
        come, gone = slice(0, layers + 1 - self.count), slice(self.count, layers + 1)
        if self.dense == self.early > 0:
            return (come, slice(0, leading - self.early + 1)), (gone, slice(self.early, leading + 1))
        at = leading - self.dense
        return (come, slice(at, at + 1)), (gone, slice(leading, leading + 1))


def _kinds(pipe: Pipeline, options: Options, cost: Floats) -> list[list[_Kind]]:
    """Return the kinds of alternatives of every rank."""
    width = (pipe.layers + 1, pipe.layers + 1, pipe.leading + 1)
    keys = np.ravel_multi_index((options.count, options.early, options.dense), width)
    edges = np.searchsorted(options.rank, np.arange(pipe.plan.pp + 1))
    found = []
    for low, high in pairwise(edges):
        mine = np.arange(low, high)
        kinds = []
        for key in np.unique(keys[low:high]):
            rows = mine[keys[low:high] == key]
            least = float(cost[rows].min())
            count, early, dense = (int(part) for part in np.unravel_index(int(key), width))
            if np.isfinite(least):
                kinds.append(_Kind(count=count, early=early, dense=dense, cost=least, rows=rows))
        found.append(kinds)
    return found
