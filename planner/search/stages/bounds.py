"""Lower bounds of all stage assignments of one pipeline, and the rank options that they rule out.

Layers go to ranks in order, so an assignment is a path over states (rank, layers so far, leading dense layers so far).
Shortest paths forwards and backwards, by dynamic programming, give for every option the least that any assignment using
it takes: the sum of all ranks' seconds, and the slowest of them. An option whose bound is not below the value to beat
cannot be part of a better assignment and is removed before a solver sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.search.stages.options import Pipeline, RankOptions
from simulator.columns.plan_table import Floats
from simulator.pipeline.schedules import SPLIT_BACKWARD

ROUNDS = 4  # of pruning; each tightens the bounds of the next


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedOptions:
    """The options that remain; `slowest` marks those that the slowest rank could have.

    `order` ranks options by time: the larger is the slower, and of equals in time the earlier rank. No assignment takes
    less than `bound_s`; without options that is the value to beat.
    """

    options: RankOptions
    slowest: NDArray[np.bool_]
    order: NDArray[np.int64]
    bound_s: float


def prune_options(pipe: Pipeline, cutoff_s: float) -> PrunedOptions:
    """Return the options that an assignment of less than `cutoff_s` could use."""
    options = pipe.options
    order = _slowness_order(options)
    usable = np.ones(len(options), dtype=np.bool_)
    slowest = usable.copy()
    bound = np.full(len(options), np.inf)
    for _ in range(ROUNDS):
        seconds = _least_cost_through(pipe, options, np.where(usable, options.seconds, np.inf), summed=True)
        worst = _least_cost_through(pipe, options, np.where(usable, order, np.inf), summed=False)
        bound = step_bound_s(pipe, options, seconds)
        slowest = usable & np.isfinite(seconds) & (worst <= order) & (bound < cutoff_s)
        if not slowest.any():
            break
        still_usable = usable & np.isfinite(seconds) & (worst <= order[slowest].max())
        if pipe.plan.schedule not in SPLIT_BACKWARD:
            still_usable &= _bound_with_best_slowest(pipe, options, seconds, slowest) < cutoff_s
        if (still_usable == usable).all():
            break
        usable = still_usable
    if not slowest.any():
        nothing = np.zeros(0, dtype=np.intp)
        return PrunedOptions(
            options=options.take(nothing),
            slowest=slowest[nothing],
            order=order[nothing],
            bound_s=cutoff_s,
        )
    return PrunedOptions(
        options=options.take(usable),
        slowest=slowest[usable],
        order=order[usable],
        bound_s=min(cutoff_s, float(bound[slowest].min())),
    )


def step_bound_s(pipe: Pipeline, slowest: RankOptions, seconds: Floats) -> Floats:
    """Return a lower bound of the step for each option as the slowest; `seconds` is a micro batch summed over all
    ranks.
    """
    stages, others = pipe.plan.virtual_stages, pipe.plan.pp - 1
    rest = np.maximum(seconds - slowest.seconds, 0.0)
    if pipe.plan.schedule in SPLIT_BACKWARD:
        bubble = np.zeros_like(rest)
    elif stages > 1:
        bubble = np.maximum(rest, others * slowest.seconds) / stages
    else:
        bubble = rest
    return np.asarray(slowest.device_least_s + host_and_bubble_s(pipe, slowest, bubble) + slowest.optimizer_s)


def host_and_bubble_s(pipe: Pipeline, slowest: RankOptions, bubble: Floats) -> Floats:
    """Return the seconds of host and bubble together, if hosts do not wait for each other; monotone in the bubble."""
    if pipe.synchronizes:
        return slowest.host_before_s + slowest.host_late_s + bubble
    return slowest.host_before_s + np.maximum(slowest.host_late_s, bubble + slowest.host_first_s)


def _bound_with_best_slowest(
    pipe: Pipeline, options: RankOptions, seconds: Floats, slowest: NDArray[np.bool_]
) -> Floats:
    """Return for every option the least step with it, over all choices of the slowest rank."""
    some = options.take(slowest)
    least = np.full(len(options), np.inf)
    for row in range(len(some)):
        one = some.take(np.array([row]))
        least = np.minimum(least, step_bound_s(pipe, one, np.maximum(seconds, one.seconds)))
    return least


def _slowness_order(options: RankOptions) -> NDArray[np.int64]:
    """Return integers in the order of time; of equals the earlier rank is the slower."""
    sorted_rows = np.lexsort((-options.rank, options.seconds))
    steps = np.ones(len(options), dtype=np.int64)
    time, rank = options.seconds[sorted_rows], options.rank[sorted_rows]
    steps[1:] = (time[1:] != time[:-1]) | (rank[1:] != rank[:-1])
    order = np.empty(len(options), dtype=np.int64)
    order[sorted_rows] = np.cumsum(steps)
    return order


def _least_cost_through(pipe: Pipeline, options: RankOptions, cost: Floats, *, summed: bool) -> Floats:
    """Return for every option the least sum (or maximum) of the costs of an assignment that uses it."""
    combine = np.add if summed else np.maximum
    ranks, layers, leading = pipe.plan.pp, pipe.layers, pipe.leading_dense_layers
    choices = _layer_choices(pipe, options, cost)
    forwards, backwards = [_start_table(layers, leading, 0, 0)], [_start_table(layers, leading, layers, leading)]
    for rank in range(ranks):
        after = np.full((layers + 1, leading + 1), np.inf)
        for choice in choices[rank]:
            source, target = choice.states(layers, leading)
            np.minimum(after[target], combine(forwards[-1][source], choice.cost), out=after[target])
        forwards.append(after)
    for rank in reversed(range(ranks)):
        before = np.full((layers + 1, leading + 1), np.inf)
        for choice in choices[rank]:
            source, target = choice.states(layers, leading)
            np.minimum(before[source], combine(backwards[-1][target], choice.cost), out=before[source])
        backwards.append(before)
    backwards.reverse()
    result = np.full(len(options), np.inf)
    for rank in range(ranks):
        for choice in choices[rank]:
            source, target = choice.states(layers, leading)
            rest = combine(forwards[rank][source], backwards[rank + 1][target]).min(initial=np.inf)
            result[choice.rows] = combine(rest, cost[choice.rows])
    return result


def _start_table(layers: int, leading: int, at: int, dense: int) -> Floats:
    table = np.full((layers + 1, leading + 1), np.inf)
    table[at, dense] = 0.0
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerChoice:
    """The options of a rank with the same layers, in all recompute modes; `cost` is that of the cheapest."""

    layers: int
    first_stage_layers: int
    dense: int
    cost: float
    rows: NDArray[np.intp]

    def states(self, layers: int, leading: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """Return (states before, states after), each as slices of layers so far and leading dense layers so far.

        `dense` of the `first_stage_layers` are leading dense layers: all of them until those run out.
        """
        sources, targets = slice(0, layers + 1 - self.layers), slice(self.layers, layers + 1)
        if self.dense == self.first_stage_layers > 0:
            return (sources, slice(0, leading - self.first_stage_layers + 1)), (
                targets,
                slice(self.first_stage_layers, leading + 1),
            )
        at = leading - self.dense
        return (sources, slice(at, at + 1)), (targets, slice(leading, leading + 1))


def _layer_choices(pipe: Pipeline, options: RankOptions, cost: Floats) -> list[list[_LayerChoice]]:
    """Return the layer choices of every rank."""
    width = (pipe.layers + 1, pipe.layers + 1, pipe.leading_dense_layers + 1)
    keys = np.ravel_multi_index((options.layers, options.first_stage_layers, options.dense), width)
    edges = np.searchsorted(options.rank, np.arange(pipe.plan.pp + 1))
    found = []
    for low, high in pairwise(edges):
        of_rank = np.arange(low, high)
        choices = []
        for key in np.unique(keys[low:high]):
            rows = of_rank[keys[low:high] == key]
            least = float(cost[rows].min())
            count, early, dense = (int(part) for part in np.unravel_index(int(key), width))
            if np.isfinite(least):
                choices.append(_LayerChoice(layers=count, first_stage_layers=early, dense=dense, cost=least, rows=rows))
        found.append(choices)
    return found
