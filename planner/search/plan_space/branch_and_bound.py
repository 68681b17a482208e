"""Branch and bound over all legal plans: every plan is bounded, few are costed in full, and the best is proved best.

The search tree is that of `planner.search.plan_space.candidates`: a node is a (grid, batch, schedule), and its leaves
are the policies. Lower bounds prune it, the cheapest first:

    memory       what the worst rank reserves: a leaf that does not fit is removed with all its variants
    step         what no step can beat, as no clock is followed (`simulator.bounds.lower_bound`)
    schedule     the same of passes and messages in the order of the schedule's table
      (`simulator.bounds.schedule_bound`)
    best so far  plans are accounted for in the order of those bounds, until they exceed the last plan that will be
    listed

Everything is vectorised over plans (`simulator.bounds.screening`), so the order of the work depends neither on a
clock nor on the number of workers. The batch sizes below decide only how many plans are costed in vain: what is
returned follows from each plan's own values and those of the last plan to list. With a deadline, the plans left
unexplored are bounded by the model's FLOP at the GPUs' peak rate, which no plan can beat; the gap says how far the
answer may be from the best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.search.plan_space.candidates import Nodes
from planner.search.plan_space.collected import Threshold
from planner.search.plan_space.screened import (
    PLANS_AT_ONCE,
    Progress,
    Rows,
    Screened,
    StepBounds,
    expiry,
    floor_s,
    ignore,
)
from simulator.bounds.screening import Screening
from simulator.columns.plan_columns import PlanColumns, concatenate, distinct
from simulator.columns.plan_table import Floats, PlanTable
from simulator.pipeline.schedules.registry import where
from topology.errors import Unproved

FIRST_PLANS = 64  # plans costed in full at first; the best of them bounds the rest
PLANS_A_TABLE = 16  # of so many plans costed at once, one schedule table's
SCHEDULES_AT_ONCE = 64  # plans whose schedule table is counted at once
# How much slower than the last plan to list a pipeline may be, split evenly, for its stages to be assigned: better
# stages took off 7 % at most in the searches of tests/bench/search_cost.py, mostly less than 2.
NEAR_LIST = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """The plans costed in full that fit, and an account of all others.

    `fitting` leaves were not shown to need too much memory; those of them without a row cannot be among the plans to
    list. `bound` is a lower bound of the objective (seconds, or bytes for memory) over all legal plans that fit; unless
    a deadline passed it is the value of the best plan. `floor_s` is a lower bound of the step of all plans, whatever
    the objective. `near_pipelines` are pipelines that other stages than the runtime's may bring into the list (a little
    too slow, or a little too large), with lower bounds of their steps in `near_bound_s`; only where they were asked
    for.
    """

    columns: PlanColumns
    step_s: Floats
    reserved_bytes: Floats
    legal: int
    fitting: int
    bound: float
    floor_s: float
    complete: bool
    near_pipelines: PlanColumns
    near_bound_s: Floats

    def __len__(self) -> int:
        return len(self.step_s)


def explore(
    screening: Screening,
    nodes: Nodes,
    recomputes: tuple[str, ...],
    *,
    objective: str = "time",
    keep: int = 1,
    one_per_grid: bool = True,
    deadline: float | None = None,
    progress: Progress | None = None,
    nearly: float = 1.0,
    screened: Screened | None = None,
) -> Explored:
    """Return every plan that could be among the `keep` best, costed in full.

    `objective` is time, memory or pareto (the plans that no other beats in both). With `one_per_grid` the `keep` best
    have different degrees. `deadline` is a reading of `time.monotonic`. With `nearly` above one, pipelines that come
    near the list are returned as well, among them those that need up to that many times the memory there is. `screened`
    is the space screened before, for as much memory or more.
    """
    if screened is None:
        screened = Screened(screening, nodes, recomputes, nearly=nearly, deadline=deadline, progress=progress)
    legal = int(nodes.leaf_counts.sum())
    near = screened.near_misses(screening.limit_bytes, nearly)
    if not (screened.leaves[2] <= screening.limit_bytes).any():
        return Explored(
            columns=nodes.columns.take(slice(0)),
            step_s=np.empty(0),
            reserved_bytes=np.empty(0),
            legal=legal,
            fitting=0,
            bound=np.inf,
            floor_s=floor_s(screening, nodes.columns),
            complete=True,
            near_pipelines=near[0],
            near_bound_s=near[1],
        )
    search = _BestFirst(
        screening,
        screened.bounds,
        objective=objective,
        keep=keep,
        one_per_grid=one_per_grid,
        deadline=deadline,
        report=progress or ignore,
    )
    search.run()
    return search.result(
        legal=legal, all_nodes_seen=screened.all_nodes_seen, near_misses=near if nearly > 1.0 else None
    )


class _BestFirst:
    """Costs plans in full, in the order of their lower bounds, until the bound exceeds the last plan to list.

    Arrays are by variant; those `within` the memory are searched. `bound` is a lower bound of the objective, `seconds`
    the step, with `reserved` bytes, of a plan that was costed. `step` and `exact` are the step and the bytes once they
    are certain: for some schedules `reserved` is only a lower bound until the schedule table is counted. `step` is
    infinite before, and where the plan does not fit.
    """

    def __init__(
        self,
        screening: Screening,
        bounds: StepBounds,
        *,
        objective: str,
        keep: int,
        one_per_grid: bool,
        deadline: float | None,
        report: Progress,
    ) -> None:
        self.screening, self.bounds = screening, bounds
        self.variants, self.reserved, self.grid = bounds.variants, bounds.reserved, bounds.grid
        self.objective, self.report = objective, report
        self.deadline, self.expired = deadline, expiry(deadline)
        self.table, self.shared, self.step_bound = bounds.table, bounds.shared, bounds.step_bound
        self.bound = self.reserved if objective == "memory" else self.step_bound
        self.within = np.nonzero(self.reserved <= screening.limit_bytes)[0]
        self.left = self.within  # variants not costed yet, lowest bound first
        count = len(self.variants)
        self.costed = np.zeros(count, dtype=np.bool_)
        self.seconds, self.step = np.zeros(count), np.full(count, np.inf)
        self.exact = self.reserved.copy()
        self.needs_counting = where(self.variants.schedule, lambda kind: kind.splits_backward)
        self.threshold = Threshold(keep, one_per_grid=one_per_grid, grids=int(self.grid.max()) + 1)
        self.schedule_table = _schedule_tables(self.table)

    def run(self) -> None:
        """Bound all variants, then cost them in full until no other can be listed or the time is over."""
        try:
            self._search()
        except Unproved:
            if not np.isfinite(self.step).any():
                raise

    def _search(self) -> None:
        self.bounds.find(self.expired, self.report)
        self.left = self.within[np.argsort(self.bound[self.within], kind="stable")]
        size = walked = FIRST_PLANS
        while len(self.left):
            rows = self._promising(walked)
            if not len(rows):
                break
            limits = self.threshold.of(self.grid[rows])
            if self.objective == "time" and np.isfinite(limits).all() and not self.bounds.walked[rows].all():
                self.bounds.walk(rows, float(limits.max()))
                walked = min(2 * walked, PLANS_AT_ONCE // 8)
                self.left = self.left[np.argsort(self.bound[self.left], kind="stable")]
            else:
                rows = self._promising(size)
                self._cost_by_table(rows[:size])
                self.left = self.left[~self.costed[self.left]]
                size = min(2 * size, PLANS_AT_ONCE // 8)
            self.report(f"costed {self.costed.sum():,} of {len(self.within):,} plans that fit")
            if self.expired() and np.isfinite(self.step).any():
                break

    def _promising(self, size: int) -> Rows:
        """Return the plans to look at next, lowest bound first: those of the schedule tables of the first ones that may
        be listed. Plans of one table are costed together in little more time than one of them.
        """
        if self.objective == "pareto":
            self.left = self._undominated(self.left)
            return self.left[:size]
        limits = self.threshold.of(self.grid[self.left])
        promising = self.bound[self.left] <= limits
        rows = self.left[promising]
        if self.objective == "memory":
            return rows[:size]
        unlimited = rows[~np.isfinite(limits[promising])]
        if len(unlimited):  # plans without a pipeline, as they are cheap, then one of every grid
            alone = unlimited[self.variants.pp[unlimited] == 1]
            return alone if len(alone) else unlimited[np.sort(np.unique(self.grid[unlimited], return_index=True)[1])]
        tables = self.schedule_table[rows]
        first = np.sort(np.unique(tables, return_index=True)[1])
        return rows[np.isin(tables, tables[first[: max(1, size // PLANS_A_TABLE)]])]

    def result(self, *, legal: int, all_nodes_seen: bool, near_misses: tuple[PlanColumns, Floats] | None) -> Explored:
        """Return what was found.

        `near_misses` are pipelines that nearly fit; None where stages are not to be assigned.
        """
        # Plans costed in vain are left out: which those are depends on how many were costed at once.
        needed = np.zeros(len(self.variants), dtype=np.bool_)
        limits = self.threshold.of(self.grid)
        needed[self.within] = self.bound[self.within] <= limits[self.within]
        if self.objective == "pareto":
            self.left = self._undominated(self.left)
            needed = np.isin(np.arange(len(self.variants)), self._undominated(self.within))
        elif self.objective == "time":
            needed[self.within] = (self.costed & (self.seconds <= limits))[self.within]
        found = np.nonzero(needed & np.isfinite(self.step))[0]
        near, near_s = self.variants.take(slice(0)), np.empty(0)
        complete = all_nodes_seen and (
            not len(self.left) or (self.objective != "pareto" and (self.bound[self.left] > limits[self.left]).all())
        )
        bound = self._bound_of_all(found, all_nodes_seen=all_nodes_seen)
        if near_misses is not None and (self.objective == "time" or not len(found)):
            near, near_s = self._near_pipelines(near_misses)
        too_large = needed & (self.exact > self.screening.limit_bytes)
        return Explored(
            columns=self.variants.take(found),
            step_s=self.step[found],
            reserved_bytes=self.exact[found],
            legal=legal,
            fitting=len(self.within) - int(too_large.sum()),
            bound=bound,
            floor_s=float(self.step_bound[self.within].min())
            if all_nodes_seen
            else floor_s(self.screening, self.variants),
            complete=bool(complete),
            near_pipelines=near,
            near_bound_s=near_s,
        )

    def _cost_by_table(self, rows: Rows) -> None:
        """Cost some plans: with a deadline one schedule table's after another's, until it has passed and one fits.

        Together they take a tenth less.
        """
        of_table = self.schedule_table[rows] if self.deadline is not None else np.zeros(len(rows))
        for table in of_table[np.sort(np.unique(of_table, return_index=True)[1])]:
            self._cost(rows[of_table == table])
            if self.expired() and np.isfinite(self.step).any():
                break

    def _cost(self, rows: Rows) -> None:
        by_memory = self.objective == "memory"
        self.bounds.account(rows)
        some = self.screening.plans(self.table.take(rows), self.shared, rows)
        self.seconds[rows] = self.bounds.step_s[rows] + some.flush_s(self.exact[rows])
        self._add_exact(rows[~self.needs_counting[rows]])
        # Counting schedule tables is slow: fastest plans first, and none that have lost by then.
        uncertain = rows[self.needs_counting[rows]]
        uncertain = uncertain[np.argsort((self.exact if by_memory else self.seconds)[uncertain], kind="stable")]
        batches = np.array_split(uncertain, -(-len(uncertain) // SCHEDULES_AT_ONCE)) if len(uncertain) else ()
        for batch in batches:
            if self.objective == "time" and self.seconds[batch[0]] > self.threshold.value:
                break
            counted = self.screening.plans(self.table.take(batch), self.shared, batch)
            self.exact[batch] = counted.reserved_bytes()
            self.seconds[batch] = self.bounds.step_s[batch] + counted.flush_s(self.exact[batch])
            self._add_exact(batch)
        self.costed[rows] = True

    def _add_exact(self, rows: Rows) -> None:
        """Take note of plans whose memory is certain by now."""
        fits = self.exact[rows] <= self.screening.limit_bytes
        self.step[rows] = np.where(fits, self.seconds[rows], np.inf)
        runs = np.isfinite(self.step[rows])  # a plan whose GPUs cannot reach each other has no place in a list
        values = self.exact[rows] if self.objective == "memory" else self.step[rows]
        self.threshold.add(self.grid[rows], np.where(runs, values, np.inf))

    def _bound_of_all(self, found: Rows, *, all_nodes_seen: bool) -> float:
        """Return a lower bound of the objective over all legal plans that fit."""
        unexplored = float(self.bound[self.left[0]]) if len(self.left) else np.inf
        if not all_nodes_seen:
            unexplored = 0.0 if self.objective == "memory" else floor_s(self.screening, self.variants)
        least = (self.exact if self.objective == "memory" else self.step)[found].min() if len(found) else np.inf
        return float(min(least, unexplored))

    def _near_pipelines(self, near_misses: tuple[PlanColumns, Floats]) -> tuple[PlanColumns, Floats]:
        """Return the pipelines whose step may come near the list, with lower bounds of their steps in seconds."""
        limit_s = self.threshold.value * (1 + NEAR_LIST) if self.objective == "time" else np.inf
        fitting = self.within[(self.variants.pp[self.within] > 1) & (self.step_bound[self.within] <= limit_s)]
        if np.isfinite(limit_s) and not self.expired():
            self.bounds.walk(fitting, limit_s)
            fitting = fitting[self.step_bound[fitting] <= limit_s]
        columns, bound_s = near_misses
        missing = np.nonzero(bound_s <= limit_s)[0]
        near = concatenate([self.variants.take(fitting), columns.take(missing)])
        return near, np.concatenate([self.step_bound[fitting], bound_s[missing]])

    def _undominated(self, rows: Rows) -> Rows:
        """Return those of `rows` that no costed plan beats in both time and memory, whatever their exact values."""
        known = np.nonzero(np.isfinite(self.step))[0]
        if not len(known):
            return rows
        known = known[np.argsort(self.exact[known], kind="stable")]
        fastest = np.minimum.accumulate(self.step[known])
        # Compare with the fastest costed plan that needs no more memory than the lower bound of this one. A plan that
        # is equal in both beats nothing: of equal plans the first is listed, whichever was costed first.
        position = np.searchsorted(self.exact[known], self.reserved[rows], side="right") - 1
        beaten = (position >= 0) & (fastest[np.maximum(position, 0)] < self.step_bound[rows])
        position = np.searchsorted(self.exact[known], self.reserved[rows], side="left") - 1
        beaten |= (position >= 0) & (fastest[np.maximum(position, 0)] <= self.step_bound[rows])
        return rows[~beaten]


def _schedule_tables(table: PlanTable) -> Rows:
    """Return a number for each plan, equal for plans that go through the same schedule table."""
    schedule = np.unique(table.schedule, return_inverse=True)[1]
    kept = table.fully_sharded & ~table.keeps_gathered
    piped = table["pp"] > 1
    return distinct(
        table["pp"], table["virtual_stages"], schedule, np.where(piped, table.micro_batches, 0), piped & kept
    )[1]


def pareto_rows(step_s: Floats, reserved_bytes: Floats) -> list[int]:
    """Return the plans that no other beats in both, fastest first; of equal plans the first."""
    order = np.lexsort((np.arange(len(step_s)), reserved_bytes, step_s))
    rows, least = [], np.inf
    for row in order:
        if np.isfinite(step_s[row]) and reserved_bytes[row] < least:
            rows.append(int(row))
            least = float(reserved_bytes[row])
    return rows
