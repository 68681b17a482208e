"""Which pipelines get their stages filled (`planner.inner_solve`), in which settings, and what comes of it.

Branch and bound compares pipelines as the runtime splits them. The quickest are then looked at one by one, and among them
those that would be quick if all their stages need not recompute, or would fit if the layers lay otherwise. A pipeline is
dropped as soon as memory or bounds show that, however filled, it comes to no place in the list.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.branch_and_bound import Explored, grids_of
from planner.candidates import NODE, Nodes, plan_of
from planner.costs import cost_table
from planner.frameworks import Framework
from simulator.plan import MESH_AXES, Plan
from simulator.plan_columns import PlanColumns, distinct, joined
from simulator.screening import Screening
from topology.cluster import Cluster
from topology.orders import irregular

PIPELINE = (*NODE, "cp_method", "reshard")  # what makes a pipeline, but for what its stages may differ in
PIPELINES = 8  # with room in memory for some filling, whose stages are looked at one by one
TRIED = 24  # pipelines, of which the others have no room however they are filled
COUNTED = 256  # of the quickest pipelines, whose memory is counted out before that
SETTINGS = 4  # overlap modes and placements of a pipeline that are looked at with its stages
NEARLY = 0.01  # settings within so much of the best one
WORTH = 0.001  # relative, that stages of their own have to save: for less the runtime's are the simpler plan
NEAR_FIT = 1.15  # times the memory there is, that a pipeline may need as the runtime splits it to be looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """Plans with stages of their own and their steps, how many pipelines were `solved`, and the largest gap left."""

    plans: tuple[tuple[Plan, float], ...] = ()
    solved: int = 0
    gap: float = 0.0


def fill(
    screening: Screening,
    framework: Framework,
    nodes: Nodes,
    explored: Explored,
    recomputes: Sequence[str],
    *,
    top: int,
    deadline: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Filled:
    """Return the pipelines that are quicker with layers or recomputation of their own on each stage.

    Only what could come among the `top` grids counts: a pipeline has to beat the best plan of its own grid by what is
    worth the trouble, and the last grid of the list. None is begun after `deadline`, a reading of `time.monotonic`, but
    for the first.
    """
    if not (framework.lists_layers or framework.lists_recompute):
        return Filled()
    columns = _quickest(screening, framework, explored, recomputes)
    if not len(columns):
        return Filled()
    from planner.inner_solve import solve  # noqa: PLC0415 - only pipelines need it
    from planner.stage_options import priced  # noqa: PLC0415 - as above

    every, starts = _settings(screening, nodes, columns, recomputes)
    plans = [plan_of_row(every, row, screening.cluster) for row in range(len(every))]
    costs = priced(screening, plans, every, recomputes)
    grid = grids_of(joined([explored.columns, columns]))
    best = np.full(int(grid.max()) + 1, np.inf)
    np.minimum.at(best, grid[: len(explored)], explored.step_s)
    better, gap, solved = [], 0.0, 0
    for row, mine in enumerate(grid[len(explored) :]):
        if solved == PIPELINES or (row and deadline is not None and time.monotonic() > deadline):
            break
        if progress is not None:
            progress(f"pipeline {row + 1} of {len(columns)} at most: layers and recomputation by stage")
        last = float(np.partition(best, top - 1)[top - 1]) if len(best) >= top else np.inf
        limit = min(last, float(best[mine]) * (1 - WORTH))
        found = solve(screening, framework, costs, range(*starts[row : row + 2]), recomputes, cutoff_s=limit)
        solved += found.room
        gap = max(gap, found.gap)
        if found.plan is None:
            continue
        step_s = _whole_step_s(screening, found.plan)
        if step_s < limit:
            better.append((found.plan, step_s))
            best[mine] = step_s
    return Filled(plans=tuple(better), solved=solved, gap=gap)


def _quickest(screening: Screening, framework: Framework, explored: Explored, recomputes: Sequence[str]) -> PlanColumns:
    """Return a row of each pipeline, quickest first: of those that come near the list and fit, or nearly do.

    Where stages can differ in recomputation, plans that differ in nothing else are one pipeline, as quick as in the mode
    that costs least, fitting or not.
    """
    columns, steps = _first_of_each(explored.near, explored.near_s, (*PIPELINE, "recompute"))
    columns, steps = columns.take(slice(COUNTED)), steps[:COUNTED]
    if len(columns):  # some schedules' memory is only bounded so far
        counted = screening.plans(columns, screening.blocks(columns, recomputes), np.arange(len(columns)))
        fits = counted.reserved_bytes() <= NEAR_FIT * screening.capacity_bytes
        columns, steps = columns.take(fits), steps[fits]
    if framework.lists_recompute and len(columns):
        columns, steps = _first_of_each(columns, steps, PIPELINE)
        steps = np.minimum(steps, _steps(screening, columns, recomputes))
    return columns.take(np.argsort(steps, kind="stable")[:TRIED])


def _first_of_each(
    columns: PlanColumns, steps: NDArray[np.float64], fields: Sequence[str]
) -> tuple[PlanColumns, NDArray[np.float64]]:
    """Return the quickest of the plans that are alike in `fields`, quickest first, and their steps."""
    same = distinct(*(getattr(columns, name) for name in fields))[1]
    rows = np.argsort(steps, kind="stable")
    rows = rows[np.sort(np.unique(same[rows], return_index=True)[1])]
    return columns.take(rows), steps[rows]


def _steps(screening: Screening, columns: PlanColumns, recomputes: Sequence[str]) -> NDArray[np.float64]:
    """Return the step of every plan in the quickest mode of recomputation."""
    shared = screening.blocks(columns, recomputes)
    every = np.arange(len(columns))
    steps = [
        screening.plans(replace(columns, recompute=np.full(len(columns), word)), shared, every).step_s()
        for word in recomputes
    ]
    return np.asarray(np.min(steps, axis=0))


def _whole_step_s(screening: Screening, plan: Plan) -> float:
    """Return a plan's step with all that it is expected to cost."""
    s = screening
    return float(cost_table(s.model, s.cluster, s.workload, [plan], s.runtime, s.profile).step_s[0])


def _settings(
    screening: Screening, nodes: Nodes, plans: PlanColumns, recomputes: Sequence[str]
) -> tuple[PlanColumns, list[int]]:
    """Return every plan in the overlap modes and placements that could be best once its stages are filled: those that are
    nearly as quick with the runtime's own stages, quickest first. And where each plan's begin, and the last one's end.
    """
    several = [nodes.settings(plans.take(np.array([row]))) for row in range(len(plans))]
    every = joined(several)
    starts = [0, *np.cumsum([len(some) for some in several]).tolist()]
    if len(every) == len(plans):
        return every, starts
    steps = screening.plans(every, screening.blocks(every, recomputes), np.arange(len(every))).step_s()
    kept = []
    for start, stop in pairwise(starts):
        order = start + np.argsort(steps[start:stop], kind="stable")[:SETTINGS]
        kept.append(order[steps[order] <= steps[order[0]] * (1 + NEARLY)])
    return every.take(np.concatenate(kept)), [0, *np.cumsum([len(rows) for rows in kept]).tolist()]


def plan_of_row(columns: PlanColumns, row: int, cluster: Cluster) -> Plan:
    """Return a row as a plan, with ranks placed on GPUs where that matters."""
    plan = plan_of(columns, row, cluster)
    if plan.placement or plan.gpus == 1 or not irregular(cluster):
        return plan
    from topology.placement import place  # noqa: PLC0415 - only irregular machines whose orders are too many to list

    axes = {axis: int(getattr(plan, axis)) for axis in MESH_AXES if getattr(plan, axis) > 1}
    return replace(plan, placement=tuple(place(cluster, axes)))
