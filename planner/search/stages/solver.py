"""Assign layers and recompute modes to the stages of one pipeline, and choose its overlap and placement.

The degrees, the schedule and the micro batch are given. The option of each rank (`planner.search.stages.options`) and
the setting of the whole pipeline (overlap mode of each communication, placement on an irregular node) are chosen
together, within the memory of every rank. Assignments are compared by the account of their steps
(`simulator.analytical.account`), many at once, and excluded by a lower bound of every account
(`planner.search.stages.solver`).

If few assignments have a bound below the best step, all of them are accounted for, and the best is certain. If there
are many, the search goes from those with the lowest bound to their neighbours (a layer moved from one rank to another,
or another recompute mode on one rank) as long as that helps; the lowest bound limits how much better any other may be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from planner.search.stages.options import (
    CostedPlans,
    Ints,
    Pipeline,
    RankOptions,
    build_pipeline,
    rank_needs,
    stage_freedom,
)
from simulator.analytical.account import AccountInputs, account_assignments, at_clocks
from simulator.analytical.pipeline_account import KnownPasses
from simulator.bounds.screening import Screening
from simulator.columns.plan_table import Floats
from simulator.config.plan import Plan
from simulator.legality.frameworks import Framework
from topology.time_limit import check_time

AT_ONCE = 128  # assignments accounted for together, which takes little longer than one
STARTS = 16  # assignments with the lowest bound from which the search for better ones starts
ROUNDS = 4  # rounds of examining neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSolution:
    """The best assignment found, and its step in seconds; `plan` is None if none is below the cutoff.

    Steps exclude the expected cost of a nearly full allocator (`simulator.memory.flushes`). No assignment takes less
    than `bound_s`. `has_room` is whether any may fit into memory.
    """

    plan: Plan | None
    step_s: float
    bound_s: float
    has_room: bool = True

    @property
    def gap(self) -> float:
        """Largest relative distance of the optimum below `step_s`."""
        return max(0.0, 1 - self.bound_s / self.step_s) if np.isfinite(self.step_s) and self.step_s > 0 else 0.0


def solve_stages(
    screening: Screening,
    framework: Framework,
    costs: CostedPlans,
    numbers: Sequence[int],
    recomputes: Sequence[str],
    *,
    cutoff_s: float = float("inf"),
    limit_bytes: float = float("inf"),
    at_once: int = AT_ONCE,
    known: dict[int, Accounted] | None = None,
) -> StageSolution:
    """Return the best assignment of layers and recompute modes to the stages of one pipeline, over all its settings.

    `numbers` index the plans of `costs` that are the settings of this pipeline. `recomputes` are the modes to choose
    from if the framework allows one per stage; otherwise the plan's mode is kept. Only steps below `cutoff_s` count,
    and only ranks whose bound of memory is at most `limit_bytes`, or the available memory. `known` has what was
    accounted for with other limits, by setting, and is added to.
    """
    known = {} if known is None else known
    freedom = stage_freedom(framework, costs.plans[numbers[0]], screening.scenario.model, recomputes)
    if not freedom.any:
        return StageSolution(plan=None, step_s=cutoff_s, bound_s=0.0)
    bound_s, step_s, best, has_room = cutoff_s, cutoff_s, None, False
    for number in numbers:
        pipeline = build_pipeline(screening, costs, number, freedom, cutoff_s, limit_bytes)
        if pipeline is None:
            continue
        has_room = True
        search = _Assignments(pipeline, step_s, at_once, known.setdefault(number, Accounted(pipeline.inputs)))
        bound_s = min(bound_s, search.run())
        if search.best is not None:
            step_s, best = search.step_s, pipeline.plan_with(pipeline.options.take(search.best))
    if best is None:
        return StageSolution(plan=None, step_s=cutoff_s, bound_s=min(bound_s, step_s), has_room=has_room)
    return StageSolution(plan=best, step_s=step_s, bound_s=min(step_s, bound_s))


def least_room(
    screening: Screening,
    framework: Framework,
    costs: CostedPlans,
    numbers: Sequence[int],
    recomputes: Sequence[str],
    *,
    cutoff_s: float,
) -> float:
    """Return the least `limit_bytes` with which `solve_stages` finds that an assignment may fit."""
    freedom = stage_freedom(framework, costs.plans[numbers[0]], screening.scenario.model, recomputes)
    if not freedom.any:
        return 0.0
    needs = (rank_needs(screening, costs, number, freedom, cutoff_s) for number in numbers)
    return min(float(one.least_room[int(screening.sure > 0)]) for one in needs)


class Accounted:
    """What is known of the assignments of one pipeline in one setting: steps in seconds, and passes counted for them.
    `inputs` are those of every account.
    """

    def __init__(self, inputs: AccountInputs) -> None:
        self._inputs = inputs
        self._passes: KnownPasses = {}
        self._steps: dict[Plan, float] = {}

    @cached_property
    def inputs(self) -> AccountInputs:
        """The inputs at the clocks of their kernels."""
        return at_clocks(self._inputs)

    def steps_s(self, plans: Sequence[Plan]) -> Floats:
        """Return the steps of some assignments; those that are new are accounted for together."""
        new = [plan for plan in plans if plan not in self._steps]
        if new:
            with np.errstate(invalid="ignore"):
                account = account_assignments(self.inputs, new, self._passes)
            self._steps |= zip(new, np.nan_to_num(account.total_s, nan=np.inf).tolist(), strict=True)
        return np.array([self._steps[plan] for plan in plans])


class _Assignments:
    """The search for the best assignment of one pipeline in one setting: `best` are its options, if it beats
    `cutoff_s`.
    """

    def __init__(self, pipeline: Pipeline, cutoff_s: float, at_once: int, known: Accounted) -> None:
        self.pipeline, self.at_once, self._known = pipeline, at_once, known
        self.bounds = AssignmentBounds(pipeline)
        self.step_s = cutoff_s
        self.best: Rows | None = None
        # The fastest assignment accounted for, below the cutoff or not. Every single option of a rank fits.
        self._nearest, self._nearest_s = np.zeros(0, dtype=np.intp), np.inf
        self._seen: set[bytes] = set()
        options = pipeline.options
        keys = zip(options.rank, options.layers, options.dense, options.mode_mix, strict=True)
        self._row_of = {tuple(int(part) for part in key): row for row, key in enumerate(keys)}

    def run(self) -> float:
        """Search, and return a lower bound in seconds of all assignments; infinite if none can be below the cutoff."""
        least = self.bounds.least(self.step_s)
        if least is None:
            return np.inf
        self._account(self.bounds.below(least[1], STARTS)[0])
        every, complete = self.bounds.below(self.step_s, self.at_once)
        if not complete:
            for _ in range(ROUNDS):
                if not self._account(self._neighbours()):
                    break
            every, complete = self.bounds.below(self.step_s, self.at_once)
        if complete:
            self._account(every)
        return self.step_s if complete else least[0]

    def _account(self, assignments: Sequence[Rows]) -> bool:
        """Account for the new ones among the assignments; return whether one of them is the fastest so far."""
        new = [rows for rows in assignments if rows.tobytes() not in self._seen]
        if not new:
            return False
        self._seen |= {rows.tobytes() for rows in new}
        pipeline = self.pipeline
        plans = [pipeline.accounted(pipeline.plan_with(pipeline.options.take(rows))) for rows in new]
        step_s = self._known.steps_s(plans)
        number = int(np.argmin(step_s))
        if step_s[number] >= self._nearest_s:
            return False
        self._nearest, self._nearest_s = new[number], float(step_s[number])
        if self._nearest_s < self.step_s:
            self.best, self.step_s = new[number], self._nearest_s
        return True

    def _neighbours(self) -> list[Rows]:
        """Return the assignments with a layer moved or a rank's modes changed that may be faster, lowest bound
        first.
        """
        bounded: list[tuple[float, int, Rows]] = []
        for rows in self._changed(self._nearest):
            bound_s = self.bounds.bound_s(rows)
            if bound_s < self.step_s:
                bounded.append((bound_s, len(bounded), rows))
        return [rows for _, _, rows in sorted(bounded)[: self.at_once]]

    def _changed(self, rows: Rows) -> Iterator[Rows]:
        options = self.pipeline.options.take(rows)
        layers, mixes = options.layers, options.mode_mix
        for one, other in permutations(range(len(rows)), 2) if not self.pipeline.runtime_layers else ():
            moved = layers.copy()
            moved[one] -= 1
            moved[other] += 1
            yield from self._assignment(moved, mixes)
        for rank in range(len(rows)):
            for mix in range(len(self.pipeline.mode_mixes)):
                changed = mixes.copy()
                changed[rank] = mix
                yield from self._assignment(layers, changed)

    def _assignment(self, layers: Ints, mixes: Ints) -> Iterator[Rows]:
        """Yield the assignment with these numbers of layers and modes on each rank, if all of its options still
        exist.
        """
        leading, stages, dense, found = self.pipeline.leading_dense_layers, self.pipeline.plan.virtual_stages, 0, []
        for rank, (count, mix) in enumerate(zip(layers, mixes, strict=True)):
            # Of a rank's stages the first has the most layers, and all leading dense ones.
            here = min(-(-int(count) // stages), leading - dense)
            row = self._row_of.get((rank, int(count), here, int(mix)))
            if row is None:
                return
            found.append(row)
            dense += here
        yield np.array(found, dtype=np.intp)


# A lower bound of all assignments of layers to the stages of one pipeline, and the assignments that may be below a
# limit.
#
# Layers are assigned to ranks in order, so an assignment is a path over states (layers so far, leading dense layers so
# far), one step per rank. An option bounds the time of its rank (`simulator.bounds.lower_bound.RankBounds`) from the
# arrival of the first micro batch, which is later the longer the ranks before take. So the earliest of all paths to a
# state is the best for the ranks after it, and one pass over the ranks shows whether any assignment is below a limit.


CLOSE = 1e-4  # relative: how closely the least bound is found
Rows = NDArray[np.intp]


class AssignmentBounds:
    """The bounds of all assignments of the options of one pipeline. Limits are in seconds of the whole step."""

    def __init__(self, pipe: Pipeline) -> None:
        self.pipe, self.options = pipe, pipe.options
        self.of_rank = [np.nonzero(self.options.rank == rank)[0] for rank in range(pipe.plan.pp)]

    def least(self, cutoff_s: float) -> tuple[float, float] | None:
        """Return (a lower bound of all assignments, a slightly larger bound that some assignment has); None if all take
        `cutoff_s` or more.
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
        """Return at most `most` assignments with a bound within a limit, as rows of the options, one per rank; and
        whether these are all.
        """
        found: list[Rows] = []
        for rows in self._paths(self._latest(limit_s), limit_s):
            if len(found) == most:
                return found, False
            found.append(rows)
        return found, True

    def bound_s(self, rows: Rows) -> float:
        """Return a lower bound of an assignment."""
        chosen: RankOptions = self.options.take(rows)
        since = np.concatenate([[0.0], np.cumsum(chosen.passing_s)[:-1]])
        ends = np.maximum(chosen.own_s + np.maximum(since - chosen.deferred_s, chosen.drain_s), chosen.alone_s)
        return self.pipe.fixed_s + float(ends.max())

    def _begins_by(self, limit_s: float) -> Floats:
        """Return for every option the latest time at which its rank must begin; negative if it cannot end in time."""
        options, left = self.options, limit_s - self.pipe.fixed_s
        return np.where(options.at_least_s <= left, options.deferred_s + left - options.own_s, -np.inf)

    def _possible(self, limit_s: float) -> bool:
        return bool(self._latest(limit_s)[0][0, 0] >= 0.0)

    def _latest(self, limit_s: float) -> list[Floats]:
        """Return for every rank, and after the last one, the latest time to begin in each state."""
        layers, leading = self.pipe.layers, self.pipe.leading_dense_layers
        begins_by = self._begins_by(limit_s)
        begins_by[begins_by < 0.0] = -np.inf
        after = np.full((layers + 2, leading + 1), -np.inf)  # no state has more than all layers
        after[layers, leading] = np.inf
        tables = [after]
        for rows, (onward, allowed) in zip(reversed(self.of_rank), reversed(self._onward), strict=True):
            check_time()
            begins, passing_s = (each[rows, None, None] for each in (begins_by, self.options.passing_s))
            latest = np.where(allowed, np.minimum(begins, after[onward] - passing_s), -np.inf)
            after = latest.max(axis=0, initial=-np.inf)
            tables.append(after)
        return tables[::-1]

    @cached_property
    def _onward(self) -> list[tuple[tuple[Ints, Ints], NDArray[np.bool_]]]:
        """Return for the options of each rank, and each state before it, the state after it, and whether the option is
        one of that state.
        """
        layers, leading, options = self.pipe.layers, self.pipe.leading_dense_layers, self.options
        before, dense = np.arange(layers + 2)[:, None], np.arange(leading + 1)
        found = []
        for rows in self.of_rank:
            count, first, own = (
                each[rows, None, None] for each in (options.layers, options.first_stage_layers, options.dense)
            )
            onward = np.minimum(dense + first, leading)
            found.append(((np.minimum(before + count, layers + 1), onward), onward - dense == own))
        return found

    def _paths(self, latest: list[Floats], limit_s: float) -> Iterator[Rows]:
        """Yield the assignments that meet the latest times of all ranks."""
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
