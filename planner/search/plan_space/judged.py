"""A search that judges the plans to list by a replay of their allocations; and the fastest plan that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import nextafter
from time import monotonic

from planner.search.plan_space.branch_and_bound import BestFirst, Explored
from planner.search.plan_space.candidates import plan_of
from planner.search.plan_space.screened import Screened
from simulator.columns.plan_columns import PlanColumns
from simulator.config.estimate import LEVELS
from simulator.config.plan import MESH_AXES, Plan
from simulator.memory.plan_memory import Replays
from topology.cluster import Cluster
from topology.errors import Unproved
from topology.rates.orders import irregular
from topology.rates.placement import place
from topology.time_limit import ended, until

# Return the rows of an explored space that would be listed.
Listed = Callable[[Explored], Sequence[int]]
GRACE_S = 0.6  # seconds after the time limit for a first answer that is nearly ready


def explore(
    search: BestFirst, replays: Replays, listed: Listed, tell: Callable[[Explored], None] | None = None
) -> Explored:
    """Return every plan that could be among those to list, all of them judged.

    Plans that are found not to fit, or to cost more than predicted, are replaced by others, which are judged in turn.
    By time, one rank shows most of a plan's cost; all ranks are replayed only for plans that would still be listed.
    `tell` receives the state before each turn. When time is over, the plans judged by then are returned. If there are
    none, the first plans are judged until one fits; Unproved is raised if none does within GRACE_S.
    """
    end = None if search.deadline is None else search.deadline + GRACE_S
    try:
        found = _judged(search, replays, listed, tell, end)
    except Unproved:
        found = search.judged_ones()
        if not len(found):
            raise
    return search.with_near_pipelines(found, None if end is None else end - GRACE_S / 2)


def _judged(
    search: BestFirst,
    replays: Replays,
    listed: Listed,
    tell: Callable[[Explored], None] | None,
    end: float | None,
) -> Explored:
    """Return the result of `explore`, without pipelines near the list."""
    bounds, cluster = search.bounds, search.screening.scenario.cluster
    costs_first, sure = search.objective == "time", search.screening.sure
    while True:
        found = search.run()
        if tell is not None:
            tell(found)
        if _ruled_out(search, found, replays):
            search.judged()
            continue
        rows, late = [int(found.rows[row]) for row in listed(found)], search.expired()
        judged = bounds.judged[found.rows]
        unknown = [row for row in (rows[:1] if late else rows) if not bounds.judged[row]]
        if not unknown or (late and judged.any()):
            return found.take(judged) if late else found
        if end is not None and monotonic() >= end:
            raise ended()
        plans = [plan_of_row(bounds.variants, row, cluster) for row in unknown]
        with suppress(Unproved):
            replays.look_ahead(plans, sure)
        # A replay that is cut short by the end of the time shows nothing: the earlier result is the answer.
        with suppress(Unproved), until(end):
            for row, plan in zip(unknown, plans, strict=True):
                if row != unknown[0] and search.expired():
                    break
                memory = replays[plan]
                if late or not (costs_first and bounds.costs_more(row, memory, sure)):
                    bounds.judge(row, memory, sure)
        search.judged()


def _ruled_out(search: BestFirst, found: Explored, replays: Replays) -> bool:
    """Rule out found plans that failed an earlier required certainty of fitting and fail the present one as well;
    return whether there are any.
    """
    bounds, cluster, sure = search.bounds, search.screening.scenario.cluster, search.screening.sure
    out = False
    for row in found.rows[bounds.doubted(found.rows)] if sure and not search.expired() else ():
        if not replays[plan_of_row(bounds.variants, int(row), cluster)].may_be(sure):
            bounds.fit_probability[row], out = nextafter(sure, 0.0), True
    return out


def fastest_fitting(
    screened: Screened, replays: Replays, deadline: float | None = None, slack: float = 0.0
) -> Plan | None:
    """Return the fastest plan of a space that surely fits, else of those likeliest to fit, by the analytical model; or
    one that is slower by no more than `slack`, relative.
    """
    for sure in (*LEVELS, 0.0):
        screening = replace(screened.screening, sure=sure)
        found = explore(BestFirst(screening, screened, deadline=deadline, slack=slack), replays, _fastest)
        if len(found):
            return plan_of_row(found.columns, _fastest(found)[0], screening.scenario.cluster)
    return None


def _fastest(found: Explored) -> list[int]:
    return [int(found.step_s.argmin())] if len(found) else []


def plan_of_row(columns: PlanColumns, row: int, cluster: Cluster) -> Plan:
    """Return a row as a plan, with ranks placed on GPUs if that affects it."""
    plan = plan_of(columns, row, cluster)
    if plan.placement or plan.gpus == 1 or not irregular(cluster):
        return plan

    axes = {axis: int(getattr(plan, axis)) for axis in MESH_AXES if getattr(plan, axis) > 1}
    return replace(plan, placement=tuple(place(cluster, axes)))
