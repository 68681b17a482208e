"""Branch and bound over all legal plans: every plan is bounded, few are costed in full, and the best is proved best.

The search tree is that of `planner.search.plan_space.candidates`: a node is a (grid, batch, schedule), and its leaves
are the policies. Lower bounds prune it, the cheapest first:

    memory       what the fullest rank holds at least: a leaf that cannot fit is removed with all its variants
    computation  what the busiest device computes
    step         what no step can beat, as no clock is followed (`simulator.bounds.lower_bound`)
    schedule     the same of passes and messages in the order of the schedule's table
      (`simulator.bounds.schedule_bound`)
    best so far  plans are accounted for in the order of those bounds, until they exceed the last plan that will be
      listed; the first of their grids as soon as they are likely to lower that

Whether a plan fits follows from the replay of its allocations (`simulator.memory`), which is asked of those alone that
would be listed: until then a plan is taken to fit, and to need no more than its bound. `BestFirst.run` is called again
after what was shown, until all that would be listed have been judged.

Everything is vectorised over plans (`simulator.bounds.screening`), so the order of the work depends neither on a
clock nor on the number of workers. The batch sizes below decide only how many plans are costed in vain: what is
returned follows from each plan's own values and those of the last plan to list. With a deadline, the plans left
unexplored are bounded by the model's FLOP at the GPUs' peak rate, which no plan can beat; the gap says how far the
answer may be from the best.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.search.plan_space.candidates import PIPELINE_FIELDS
from planner.search.plan_space.collected import ListedTies, Threshold
from planner.search.plan_space.screened import (
    PLANS_AT_ONCE,
    Progress,
    Rows,
    Screened,
    expiry,
    floor_s,
    ignore,
    never,
)
from simulator.bounds.screening import Screening
from simulator.columns.plan_columns import PlanColumns, concatenate, distinct
from simulator.columns.plan_table import Floats
from topology.errors import Unproved
from topology.time_limit import reading, until

FIRST_BOUNDED = 1 << 14  # plans bounded more closely at once before enough are costed to limit the others
FIRST_PLANS = 64  # plans costed in full at first; the best of them bounds the rest
PLANS_A_TABLE = 16  # of so many plans costed at once, one schedule table's
LOWERED = 0.02  # of the limit of plans to list: what it may be lowered by at least for plans to be costed before others
# How much above the limit of plans to list bounds are walked, relative, once plans of the list were rejected, and how
# many at once: the next rejections raise it.
AHEAD, PLANS_AHEAD = 0.03, 256
# How much slower than the last plan to list a pipeline may be, split evenly, for its stages to be assigned: better
# stages took off 7 % at most in the searches of tests/bench/search_cost.py, mostly less than 2.
NEAR_LIST = 0.07


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """The plans costed in full that may be listed, and an account of all others. `rows` are those of the variants.

    `fitting` leaves were not shown to need too much memory; those of them without a row cannot be among the plans to
    list. `bound` is a lower bound of the objective (seconds, or bytes for memory) over all legal plans that fit; unless
    a deadline passed it is the value of the best plan. `floor_s` is a lower bound of the step of all plans, whatever
    the objective. `near_pipelines` are pipelines that other stages than the runtime's may bring into the list (a little
    too slow, or a little too large), with lower bounds of their steps in `near_bound_s`; only where they were asked
    for.
    """

    columns: PlanColumns
    rows: Rows
    step_s: Floats
    reserved_bytes: Floats
    legal: int
    fitting: int
    bound: float
    floor_s: float
    complete: bool
    near_pipelines: PlanColumns
    near_bound_s: Floats

    @property
    def least_near_s(self) -> float:
        """The seconds below which no near pipeline comes, if stages take off no more than NEAR_LIST."""
        return float(self.near_bound_s.min(initial=np.inf)) / (1 + NEAR_LIST)

    def __len__(self) -> int:
        return len(self.step_s)

    def take(self, rows: NDArray[np.bool_]) -> Explored:
        """Return the account with some of the plans."""
        return replace(
            self,
            columns=self.columns.take(np.nonzero(rows)[0]),
            rows=self.rows[rows],
            step_s=self.step_s[rows],
            reserved_bytes=self.reserved_bytes[rows],
        )


class BestFirst:
    """Costs plans in full, in the order of their lower bounds, until the bound exceeds the last plan to list.

    `objective` is time, memory or pareto (the plans that no other beats in both). With `one_per_grid` the `keep` best
    have different degrees. `deadline` is a reading of `time.monotonic`. With `nearly` above one, pipelines that come
    near the list are returned as well, among them those that need up to that many times the memory there is; bounds of
    the `nearest` of them are close, of all where that is None. A plan that is faster than those to list by less than
    `slack`, relative, is not looked for.

    Arrays are by variant; those `within` the memory are searched. `bound` is a lower bound of the objective. `costed`
    are those of this search and of others before it. `step` is the step of a plan that was costed, infinite before, and
    where the plan does not fit.
    """

    def __init__(
        self,
        screening: Screening,
        screened: Screened,
        *,
        objective: str = "time",
        keep: int = 1,
        ties: ListedTies | None = None,
        one_per_grid: bool = True,
        deadline: float | None = None,
        progress: Progress | None = None,
        nearly: float = 1.0,
        nearest: int | None = None,
        slack: float = 0.0,
    ) -> None:
        bounds = screened.bounds
        self.screening, self.screened, self.bounds = screening, screened, bounds
        self.nearly, self.nearest, self.slack = nearly, nearest, slack
        self.variants, self.grid = bounds.variants, bounds.grid
        self._grids = int(self.grid.max(initial=-1)) + 1
        self.objective, self.report = objective, progress or ignore
        self.deadline, self.expired = deadline, expiry(deadline)
        self.step_bound = bounds.step_bound
        self.reserved = bounds.held[:, 1]
        self.bound = self.reserved if objective == "memory" else self.step_bound
        self.costed = bounds.accounted
        self.step = np.full(len(self.variants), np.inf)
        self.keep, self.ties, self.one_per_grid = keep, ties, one_per_grid
        self._groups = None if ties is None else bounds.tie_groups
        self.schedule_table = bounds.schedule_table
        self._begun, self._order = False, np.arange(len(self.variants))
        self.judged()

    def judged(self) -> None:
        """Take in what replays have shown of the variants' memory: no plan that was left out for another that does not
        fit, or costs more than was thought, stays left out.
        """
        self._within = self.bounds.may_fit(self.screening)
        self.within = np.nonzero(self._within)[0]
        self._put_in_order()
        self.threshold = Threshold(
            self.keep, one_per_grid=self.one_per_grid, grids=self._grids, listed=self.ties, groups=self._groups
        )
        self.step[:] = np.inf
        self._add(self.within[self.costed[self.within]])

    def _put_in_order(self) -> None:
        """Find what is left: the plans that are not costed yet, lowest bound first."""
        self._order = self._in_order(self._order)
        self.left = self._order[(self._within & ~self.costed)[self._order]]

    def _in_order(self, rows: Rows) -> Rows:
        return rows[np.argsort(self.bound[rows], kind="stable")]

    def run(self) -> Explored:
        """Bound all variants, then cost them in full until no other can be listed or the time is over."""
        try:
            self._search()
        except Unproved:
            if not np.isfinite(self.step).any():
                raise
        return self._found()

    def _search(self) -> None:
        again = self._begun
        if not again:
            self.bounds.find(self.expired, self.report)
            if self.objective != "time":
                self.bounds.bound(self.within, self.expired)
            self._begun = True
            self._put_in_order()
        size = FIRST_PLANS
        while len(self.left):
            rows = self._promising(size)
            if self.objective == "time" and len(rough := self._computation_alone(rows[:size])):
                self.bounds.bound(rough, never)
                self._put_in_order()
                continue
            if not len(rows):
                break
            limits = self.threshold.of(self.grid[rows])
            if self.objective == "time" and np.isfinite(limits).all() and not self.bounds.walked[rows].all():
                mine = np.union1d(rows, self._same_tables(rows, ahead=again))
                self.bounds.walk(mine, float(limits.max()) * (1 + NEAR_LIST * again))
                self._cost_leaders(mine)
                self._put_in_order()
                size = min(2 * size, PLANS_AT_ONCE // 8)
            else:
                self._cost_by_table(self._leading(rows[:size]))
                self.left = self.left[~self.costed[self.left]]
                if np.isfinite(limits).all():
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
        rows = self._below(0.0)
        if self.objective == "memory":
            return rows[:size]
        unlimited = rows[~np.isfinite(self.threshold.of(self.grid[rows]))]
        if len(unlimited):  # plans without a pipeline, as they are cheap, then one of every grid
            alone = unlimited[self.variants.pp[unlimited] == 1]
            first = np.sort(np.unique(self.grid[unlimited], return_index=True)[1])
            return alone if len(alone) else unlimited[first[: self.threshold.missing]]
        tables = self.schedule_table[rows]
        first = np.sort(np.unique(tables, return_index=True)[1])
        return rows[np.isin(tables, tables[first[: max(1, size // PLANS_A_TABLE)]])]

    def _computation_alone(self, rows: Rows) -> Rows:
        """Return the plans that may come near the list and are bounded by their computation alone; before there is a
        limit some of them, as long as there are any among the `rows` to be looked at next.
        """
        near = self._below(NEAR_LIST)
        if not np.isfinite(self.threshold.value):
            near = near[:0] if self.bounds.bounded[rows].all() else np.union1d(rows, near[:FIRST_BOUNDED])
        rough: Rows = near[~self.bounds.bounded[near]]
        return rough

    def _ahead(self) -> Rows:
        """Return the next plans that may be listed now or when some of those before them are rejected."""
        return self._below(AHEAD)[:PLANS_AHEAD]

    def _below(self, further: float) -> Rows:
        """Return the plans whose bound is no more than the limit of the list and so much, relative, lowest first."""
        more = (1 + further) * (1 - self.slack)
        end = bisect_right(self.left, self.threshold.value * more, key=self.bound.__getitem__)
        rows = self.left[:end]
        return rows[self.bound[rows] <= self.threshold.of(self.grid[rows]) * more]

    def _same_tables(self, rows: Rows, *, ahead: bool) -> Rows:
        """Return the plans that may come near the list and go through the schedule tables of some, or of the next ones
        `ahead`: bounds of all plans of a table take little more time than that of one.
        """
        near, some = self._below(NEAR_LIST), [rows, *([self._ahead()] if ahead else [])]
        return near[np.isin(self.schedule_table[near], self.schedule_table[np.concatenate(some)])]

    def _leading(self, rows: Rows) -> Rows:
        """Return of promising plans, lowest bound first, those through the table of the first of their grid, where one
        of each grid is listed: what that one takes shows which of the others may be faster.
        """
        if not self.one_per_grid or self.objective != "time" or not len(rows):
            return rows
        _, first, grid = np.unique(self.grid[rows], return_index=True, return_inverse=True)
        leading: Rows = rows[self.schedule_table[rows] == self.schedule_table[rows[first]][grid]]
        return leading

    def _cost_leaders(self, rows: Rows) -> None:
        """Cost of plans with close bounds the first of their grids where they are likely to lower the limit by much:
        most others are then ruled out by what is known of them already.
        """
        rows = self._in_order(rows[self.bounds.walked[rows] & ~self.costed[rows]])
        leaders = rows[np.sort(np.unique(self.grid[rows], return_index=True)[1])]
        leaders = leaders[self.bound[leaders] < self.threshold.of(self.grid[leaders])]
        likely = self.threshold.value_with(self.grid[leaders], self.bound[leaders])
        if len(leaders) and likely < self.threshold.value * (1 - LOWERED):
            self._cost_by_table(leaders[self.bound[leaders] <= likely])

    def _found(self) -> Explored:
        """Return what was found, without near pipelines."""
        # Plans costed in vain are left out: which those are depends on how many were costed at once.
        found = np.nonzero(self._within & np.isfinite(self.step))[0]
        if self.objective == "pareto":
            self.left = self._undominated(self.left)
            found = found[np.isin(found, self._undominated(self.within))]
        else:
            values = self.step if self.objective == "time" else self.bound
            found = found[values[found] <= self.threshold.of(self.grid[found])]
        all_nodes_seen = self.screened.all_nodes_seen
        complete = all_nodes_seen and not len(self.left if self.objective == "pareto" else self._below(0.0))
        return Explored(
            columns=self.variants.take(found),
            rows=found,
            step_s=self.step[found],
            reserved_bytes=self.reserved[found],
            legal=int(self.screened.nodes.leaf_counts.sum()),
            fitting=len(self.within),
            bound=self._bound_of_all(found, all_nodes_seen=all_nodes_seen),
            floor_s=float(self.step_bound[self.within].min(initial=np.inf))
            if all_nodes_seen and len(self.within)
            else floor_s(self.screening, self.screened.nodes.columns),
            complete=complete,
            near_pipelines=self.variants.take(slice(0)),
            near_bound_s=np.empty(0),
        )

    def with_near_pipelines(self, found: Explored, end: float | None = None) -> Explored:
        """Return what `run` found with the pipelines that come near its list, where they were asked for. Where the time
        is over before they are known, or where there is one at `end`, one may be as fast as a plan can be.
        """
        if self.nearly <= 1.0 or (self.objective != "time" and len(found)):
            return found
        try:
            with until(reading() if end is None else end):
                near, near_s = self._near_pipelines(self.screened.near_misses(self.screening, self.nearly))
        except Unproved:
            return replace(found, near_bound_s=np.array([found.floor_s]))
        return replace(found, near_pipelines=near, near_bound_s=near_s)

    def judged_ones(self) -> Explored:
        """Return of what was found the plans that have been judged."""
        self.judged()
        found = self._found()
        return found.take(self.bounds.judged[found.rows])

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
        self._add(self.bounds.account(rows, self._alike(rows)))

    def _alike(self, rows: Rows) -> Rows:
        """Return the next plans that may be listed, or may be soon, and go through the same schedule tables as some."""
        if self.objective != "time":
            return rows[:0]
        near = self._ahead()
        return near[np.isin(self.schedule_table[near], self.schedule_table[rows])]

    def _add(self, rows: Rows) -> None:
        """Take note of plans that were costed."""
        self.step[rows] = self.bounds.step_s[rows] + self.bounds.flush_s[rows]
        runs = np.isfinite(self.step[rows])  # a plan whose GPUs cannot reach each other has no place in a list
        values = self.reserved[rows] if self.objective == "memory" else self.step[rows]
        self.threshold.add(self.grid[rows], np.where(runs, values, np.inf))

    def _bound_of_all(self, found: Rows, *, all_nodes_seen: bool) -> float:
        """Return a lower bound of the objective over all legal plans that fit."""
        unexplored = float(self.bound[self.left].min(initial=np.inf))
        if not all_nodes_seen:
            unexplored = 0.0 if self.objective == "memory" else floor_s(self.screening, self.screened.nodes.columns)
        least = (self.reserved if self.objective == "memory" else self.step)[found].min() if len(found) else np.inf
        return float(min(least, unexplored))

    def _near_pipelines(self, near_misses: tuple[PlanColumns, Floats]) -> tuple[PlanColumns, Floats]:
        """Return the pipelines whose step may come near the list, with lower bounds of their steps in seconds."""
        limit_s = self.threshold.value * (1 + NEAR_LIST) if self.objective == "time" else np.inf
        fitting = self.within[(self.variants.pp[self.within] > 1) & (self.step_bound[self.within] <= limit_s)]
        self.bounds.bound(fitting, self.expired)
        fitting = fitting[self.step_bound[fitting] <= limit_s]
        columns, missing_s = near_misses
        missing = np.nonzero(missing_s <= limit_s)[0]
        near = concatenate([self.variants.take(fitting), columns.take(missing)])
        near_s = np.concatenate([self.step_bound[fitting], missing_s[missing]])
        if np.isfinite(limit_s) and not self.expired():
            same = distinct(*(getattr(near, name) for name in (*PIPELINE_FIELDS, "recompute")))[1]
            while len(rough := self._rough(near_s, same, fitting)):
                self.bounds.walk(fitting[rough], limit_s)
                near_s[rough] = self.step_bound[fitting[rough]]
            near, near_s = near.take(np.nonzero(near_s <= limit_s)[0]), near_s[near_s <= limit_s]
        return near, near_s

    def _rough(self, near_s: Floats, same: Rows, fitting: Rows) -> Rows:
        """Return which of the `fitting` rows may be among the nearest pipelines, `same` ones being one, and have bounds
        that are not close yet.
        """
        order = np.argsort(near_s, kind="stable")
        firsts = np.sort(np.unique(same[order], return_index=True)[1])
        some = order[: firsts[self.nearest]] if self.nearest is not None and self.nearest < len(firsts) else order
        some = some[some < len(fitting)]
        rough: Rows = some[~self.bounds.walked[fitting[some]]]
        return rough

    def _undominated(self, rows: Rows) -> Rows:
        """Return those of `rows` that no costed plan beats in both time and memory, whatever their exact values."""
        known = np.nonzero(np.isfinite(self.step))[0]
        if not len(known):
            return rows
        known = known[np.argsort(self.reserved[known], kind="stable")]
        fastest = np.minimum.accumulate(self.step[known])
        # Compare with the fastest costed plan that needs no more memory than the lower bound of this one. A plan that
        # is equal in both beats nothing: of equal plans the first is listed, whichever was costed first.
        position = np.searchsorted(self.reserved[known], self.reserved[rows], side="right") - 1
        beaten = (position >= 0) & (fastest[np.maximum(position, 0)] < self.step_bound[rows])
        position = np.searchsorted(self.reserved[known], self.reserved[rows], side="left") - 1
        beaten |= (position >= 0) & (fastest[np.maximum(position, 0)] <= self.step_bound[rows])
        return rows[~beaten]


def pareto_rows(step_s: Floats, reserved_bytes: Floats) -> list[int]:
    """Return the plans that no other beats in both, fastest first; of equal plans the first."""
    order = np.lexsort((np.arange(len(step_s)), reserved_bytes, step_s))
    rows, least = [], np.inf
    for row in order:
        if np.isfinite(step_s[row]) and reserved_bytes[row] < least:
            rows.append(int(row))
            least = float(reserved_bytes[row])
    return rows
