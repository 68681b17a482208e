"""Choose the pipelines and settings whose stages are assigned (`planner.search.stages.solver`), and collect better
plans.

Branch and bound compares pipelines with the stages that the runtime makes. The fastest of them are then examined one by
one, and also pipelines that would be fast if not all their stages recomputed, or would fit with other numbers of layers
per stage. A pipeline is dropped as soon as memory or bounds show that no assignment of its stages brings it into the
list.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.search.plan_space.branch_and_bound import Explored
from planner.search.plan_space.candidates import PIPELINE_FIELDS, Nodes
from planner.search.plan_space.judged import plan_of_row
from planner.search.plan_space.screened import grids_of
from planner.search.stages.options import CostedPlans, cost_blocks, rank_needs, stage_freedom
from planner.search.stages.solver import Accounted, StageSolution, least_room, solve_stages
from simulator.analytical.estimates import memory_of_plans
from simulator.bounds.screening import Screening, SharedBlocks
from simulator.columns.plan_columns import PlanColumns, concatenate, distinct, plan_columns
from simulator.columns.plan_table import Floats
from simulator.config.overlap_sites import NONE
from simulator.config.plan import Plan
from simulator.legality.frameworks import Framework
from simulator.memory.plan_memory import Replays
from topology.errors import Unproved

MAX_SOLVED = 8  # pipelines whose stages are assigned; those without an assignment that fits do not count
AT_ONCE = 24  # pipelines that are prepared together, and whose bounds are made close before they are put in order
MAX_ROOM_TRIES = 4  # assignments of a pipeline that are replayed until one of them fits
LESS_ROOM = 0.98  # share of the memory of one assignment that the next one may need at most
MAX_SETTINGS = 4  # overlap modes and placements of a pipeline that are tried with its stages
SETTING_MARGIN = 0.01  # relative to the best setting; slower settings are not tried
MIN_GAIN = 0.001  # relative saving required of an assignment: otherwise the runtime's stages are the simpler plan
NEAR_FIT = 1.15  # multiple of the capacity that a pipeline may need with the runtime's stages to be examined


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedPipelines:
    """(plan, step in seconds) with assigned stages, the number of pipelines `solved`, and the largest remaining gap.

    `left_s` is a lower bound in seconds of the steps of pipelines that were not begun before the deadline.
    """

    plans: tuple[tuple[Plan, float], ...] = ()
    solved: int = 0
    gap: float = 0.0
    left_s: float = np.inf


class Prepared(NamedTuple):
    """The costs of a pipeline's blocks, which plans of them are its settings, and what was accounted for of these."""

    costs: CostedPlans
    numbers: range
    known: dict[int, Accounted]


class KnownPipelines:
    """What is found of pipelines once for all levels of certainty. `shared` are the blocks of `nodes`, which overlap no
    communication: that needs more memory.
    """

    def __init__(self, framework: Framework, nodes: Nodes, shared: SharedBlocks, recomputes: Sequence[str]) -> None:
        self._framework, self._nodes, self._shared, self._recomputes = framework, nodes, shared, recomputes
        self._least: dict[Plan, Floats] = {}  # bytes that must be allocated and reserved
        self._prepared: dict[Plan, Prepared] = {}

    def prepared(self, screening: Screening, columns: PlanColumns) -> Iterator[tuple[int, Prepared]]:
        """Yield the rows of pipelines that may have room, with what their stages are assigned by; AT_ONCE are prepared
        together.
        """
        plans = [columns.plan(row) for row in range(len(columns))]
        possible = (row for row, plan in enumerate(plans) if self._may_have_room(screening, plan))
        while rows := [*islice(possible, AT_ONCE)]:
            if new := [row for row in rows if plans[row] not in self._prepared]:
                found = self._prepare(screening, columns.take(np.array(new)))
                self._prepared |= zip([plans[row] for row in new], found, strict=True)
            yield from ((row, self._prepared[plans[row]]) for row in rows)

    def _may_have_room(self, screening: Screening, pipeline: Plan) -> bool:
        """Return whether a pipeline may have room for all layers, whatever its stages hold."""
        plan = replace(pipeline, tp_overlap=NONE)
        freedom = stage_freedom(self._framework, plan, screening.scenario.model, self._recomputes)
        if not freedom.any:
            return True
        if plan not in self._least:
            columns = plan_columns([plan])
            blocks = SharedBlocks(costs=self._shared.costs, which=self._shared.which[self._nodes.of(columns)])
            costs = CostedPlans(plans=(plan,), columns=columns, shared=blocks)
            self._least[plan] = rank_needs(screening, costs, 0, freedom, np.inf).least_room
        return float(self._least[plan][int(screening.sure > 0)]) <= screening.limit_bytes

    def _prepare(self, screening: Screening, columns: PlanColumns) -> Iterator[Prepared]:
        settings, starts = _best_settings(screening, self._nodes, columns, self._recomputes)
        plans = [plan_of_row(settings, row, screening.scenario.cluster) for row in range(len(settings))]
        costs = cost_blocks(screening, plans, settings, self._recomputes)
        yield from (Prepared(costs, range(start, stop), {}) for start, stop in pairwise(starts))


def assign_stages(
    screening: Screening,
    framework: Framework,
    explored: Explored,
    recomputes: Sequence[str],
    *,
    top: int,
    replays: Replays,
    known: KnownPipelines,
    deadline: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> AssignedPipelines:
    """Return the pipelines that are faster with layers or recompute modes assigned to each stage.

    They are examined in the order of their bounds until MAX_SOLVED of them had room, or none is left near the list. A
    pipeline has to beat the best plan of its own degrees by MIN_GAIN, and the last of the `top` plans. Only the first
    may start after `deadline`, a reading of `time.monotonic`; pipelines that do not end in time are left out.
    """
    if not (framework.lists_layers or framework.lists_recompute):
        return AssignedPipelines()
    columns = _fastest_pipelines(screening, framework, explored, recomputes)
    if not len(columns):
        return AssignedPipelines()

    grid = grids_of(concatenate([explored.columns, columns]))
    best = np.full(int(grid.max()) + 1, np.inf)
    np.minimum.at(best, grid[: len(explored)], explored.step_s)
    better, gap, solved, left_s = [], 0.0, 0, np.inf
    try:
        for number, (row, one) in enumerate(known.prepared(screening, columns)):
            if number and deadline is not None and time.monotonic() > deadline:
                left_s = explored.least_near_s
                break
            if progress is not None:
                progress(f"pipeline {row + 1} of {len(columns)} at most: layers and recomputation by stage")
            own_grid = grid[len(explored) + row]
            last = float(np.partition(best, top - 1)[top - 1]) if len(best) >= top else np.inf
            limit = min(last, float(best[own_grid]) * (1 - MIN_GAIN))
            asked = (screening, framework, one.costs, one.numbers, recomputes)
            solve = partial(solve_stages, *asked, cutoff_s=limit, known=one.known)
            found, step_s = _fitting(screening, solve, least_room(*asked, cutoff_s=limit), replays)
            one.costs.needs.clear()
            solved += found.has_room
            gap = max(gap, found.gap)
            if found.plan is not None and step_s < limit:
                better.append((found.plan, step_s))
                best[own_grid] = step_s
            if solved == MAX_SOLVED:
                break
    except Unproved:
        left_s = explored.least_near_s
    return AssignedPipelines(plans=tuple(better), solved=solved, gap=gap, left_s=left_s)


def _fitting(
    screening: Screening, solve: Callable[..., StageSolution], least_bytes: float, replays: Replays
) -> tuple[StageSolution, float]:
    """Return the best assignment found that fits by its replay, and its step in seconds.

    Options of ranks are judged by a bound of their memory. If the best assignment does not fit, the limit for the next
    is its bound divided by the factor by which its replay exceeds the memory, at most LESS_ROOM of the limit before: a
    replay ends where that is less than the `least_bytes` with which there is room for any.
    """
    limit_bytes = screening.limit_bytes
    for tries_left in reversed(range(MAX_ROOM_TRIES)):
        found = solve(limit_bytes=limit_bytes)
        if found.plan is None:
            break
        held = replays[found.plan]
        if held.fits_with(screening.sure):
            return found, found.step_s + held.full_s
        if not tries_left:
            break
        none = replace(found, plan=None, step_s=np.inf, has_room=False), np.inf
        if limit_bytes * LESS_ROOM < least_bytes:
            return none
        bound = float(screening.least_bytes(memory_of_plans(screening.scenario, [found.plan])).max())
        if screening.sure and not held.reserves_at_most(bound * screening.limit_bytes / least_bytes):
            return none
        needed = held.reserved_bytes if screening.sure else held.peak_bytes
        limit_bytes = min(bound * min(1.0, screening.limit_bytes / needed), limit_bytes * LESS_ROOM)
    return replace(found, plan=None), np.inf


def _fastest_pipelines(
    screening: Screening, framework: Framework, explored: Explored, recomputes: Sequence[str]
) -> PlanColumns:
    """Return one row for each pipeline near the list that fits or nearly fits, fastest first.

    If stages can differ in recompute mode, plans that differ in nothing else are one pipeline, ranked by its fastest
    mode, whether that fits or not.
    """
    columns, steps = _fastest_of_each(explored.near_pipelines, explored.near_bound_s, (*PIPELINE_FIELDS, "recompute"))
    if framework.lists_recompute and len(columns):
        columns, steps = _fastest_of_each(columns, steps, PIPELINE_FIELDS)
        steps = np.minimum(steps, _least_steps_s(screening, columns, recomputes))
    return columns.take(np.argsort(steps, kind="stable"))


def _fastest_of_each(
    columns: PlanColumns, steps: NDArray[np.float64], fields: Sequence[str]
) -> tuple[PlanColumns, NDArray[np.float64]]:
    """Return the fastest of the plans that are equal in `fields` by their bounds, lowest first."""
    same = distinct(*(getattr(columns, name) for name in fields))[1]
    rows = np.argsort(steps, kind="stable")
    rows = rows[np.sort(np.unique(same[rows], return_index=True)[1])]
    return columns.take(rows), steps[rows]


def _least_steps_s(screening: Screening, columns: PlanColumns, recomputes: Sequence[str]) -> NDArray[np.float64]:
    """Return a lower bound of the step of every plan in its fastest recompute mode, in seconds."""
    shared = screening.blocks(columns, recomputes)
    every = np.arange(len(columns))
    steps = [
        screening.plans(replace(columns, recompute=np.full(len(columns), word)), shared, every).at_least_s()
        for word in recomputes
    ]
    return np.asarray(np.min(steps, axis=0))


def _best_settings(
    screening: Screening, nodes: Nodes, plans: PlanColumns, recomputes: Sequence[str]
) -> tuple[PlanColumns, list[int]]:
    """Return every plan in its best overlap modes and placements, and the rows where the settings of each plan start.

    These are the settings whose bound with the runtime's stages is nearly as low as the lowest one, lowest first. The
    last row number is the end of the last plan's settings.
    """
    by_pipeline = [nodes.settings(plans.take(np.array([row]))) for row in range(len(plans))]
    columns = concatenate(by_pipeline)
    starts = [0, *np.cumsum([len(some) for some in by_pipeline]).tolist()]
    if len(columns) == len(plans):
        return columns, starts
    steps = screening.plans(columns, screening.blocks(columns, recomputes), np.arange(len(columns))).at_least_s()
    kept = []
    for start, stop in pairwise(starts):
        order = start + np.argsort(steps[start:stop], kind="stable")[:MAX_SETTINGS]
        kept.append(order[steps[order] <= steps[order[0]] * (1 + SETTING_MARGIN)])
    return columns.take(np.concatenate(kept)), [0, *np.cumsum([len(rows) for rows in kept]).tolist()]
