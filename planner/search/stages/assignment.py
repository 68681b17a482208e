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
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.search.plan_space.branch_and_bound import Explored
from planner.search.plan_space.candidates import PIPELINE_FIELDS, Nodes
from planner.search.plan_space.judged import plan_of_row
from planner.search.plan_space.screened import grids_of, least_bytes
from planner.search.stages.options import CostedPlans, cost_blocks
from planner.search.stages.solver import StageSolution, has_room, solve_stages
from simulator.analytical.estimates import memory_of_plans
from simulator.bounds.screening import Screening
from simulator.columns.plan_columns import PlanColumns, concatenate, distinct
from simulator.columns.plan_table import Floats
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


class Rooms:
    """How much memory pipelines need at least, whatever their stages hold: found once for all levels of certainty."""

    def __init__(self) -> None:
        self._least: dict[Plan, tuple[float, Floats]] = {}  # the cutoff in seconds; bytes to allocate and to reserve

    def possible(self, pipeline: Plan, screening: Screening, cutoff_s: float) -> bool:
        """Return whether a pipeline may have room with a step below `cutoff_s`, by what is known of it."""
        known_s, least = self._least.get(pipeline, (-np.inf, np.zeros(2)))
        return cutoff_s > known_s or float(least_bytes(screening, least[None])[0]) <= screening.limit_bytes

    def note(self, pipeline: Plan, costs: CostedPlans, numbers: range, cutoff_s: float) -> None:
        """Take note of what all settings of a pipeline need."""
        needs = [costs.needs[number, cutoff_s] for number in numbers if (number, cutoff_s) in costs.needs]
        if len(needs) == len(numbers):
            self._least[pipeline] = cutoff_s, np.min([one.least_room for one in needs], axis=0)


def assign_stages(
    screening: Screening,
    framework: Framework,
    nodes: Nodes,
    explored: Explored,
    recomputes: Sequence[str],
    *,
    top: int,
    replays: Replays,
    rooms: Rooms,
    deadline: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> AssignedPipelines:
    """Return the pipelines that are faster with layers or recompute modes assigned to each stage.

    They are examined in the order of their bounds until MAX_SOLVED of them had room, or none is left near the list. A
    pipeline has to beat the best plan of its own degrees by MIN_GAIN, and the last of the `top` plans. Only the first
    may start after `deadline`, a reading of `time.monotonic`; pipelines that do not end in time are left out. `rooms`
    is added to: those that are known to have no room are left out by it.
    """
    if not (framework.lists_layers or framework.lists_recompute):
        return AssignedPipelines()
    columns = _fastest_pipelines(screening, framework, explored, recomputes)
    if not len(columns):
        return AssignedPipelines()

    grid = grids_of(concatenate([explored.columns, columns]))
    best = np.full(int(grid.max()) + 1, np.inf)
    np.minimum.at(best, grid[: len(explored)], explored.step_s)

    def limit_of(own_grid: int) -> float:
        """Return the seconds below which a pipeline of a grid is listed."""
        last = float(np.partition(best, top - 1)[top - 1]) if len(best) >= top else np.inf
        return min(last, float(best[own_grid]) * (1 - MIN_GAIN))

    pipelines = [columns.plan(row) for row in range(len(columns))]
    possible = [
        row
        for row, own_grid in enumerate(grid[len(explored) :])
        if rooms.possible(pipelines[row], screening, limit_of(own_grid))
    ]
    better, gap, solved, left_s = [], 0.0, 0, np.inf
    prepared = _prepared(screening, nodes, columns.take(np.array(possible, dtype=np.intp)), recomputes)
    for number, row in enumerate(possible):
        if solved == MAX_SOLVED:
            break
        if number and deadline is not None and time.monotonic() > deadline:
            left_s = explored.least_near_s
            break
        if progress is not None:
            progress(f"pipeline {number + 1} of {len(possible)} at most: layers and recomputation by stage")
        own_grid = grid[len(explored) + row]
        limit = limit_of(own_grid)
        try:
            costs, numbers = next(prepared)
            asked = (screening, framework, costs, numbers, recomputes)
            solve = partial(solve_stages, *asked, cutoff_s=limit, known={})
            room = partial(has_room, *asked, cutoff_s=limit)
            found, step_s = _fitting(screening, solve, room, replays)
        except Unproved:
            left_s = explored.least_near_s
            break
        rooms.note(pipelines[row], costs, numbers, limit)
        solved += found.has_room
        gap = max(gap, found.gap)
        if found.plan is not None and step_s < limit:
            better.append((found.plan, step_s))
            best[own_grid] = step_s
    return AssignedPipelines(plans=tuple(better), solved=solved, gap=gap, left_s=left_s)


def _prepared(
    screening: Screening, nodes: Nodes, columns: PlanColumns, recomputes: Sequence[str]
) -> Iterator[tuple[CostedPlans, range]]:
    """Yield the costs of each pipeline's blocks and which plans of them are its settings, for AT_ONCE at a time."""
    for first in range(0, len(columns), AT_ONCE):
        some = columns.take(slice(first, first + AT_ONCE))
        settings, starts = _best_settings(screening, nodes, some, recomputes)
        plans = [plan_of_row(settings, row, screening.scenario.cluster) for row in range(len(settings))]
        costs = cost_blocks(screening, plans, settings, recomputes)
        yield from ((costs, range(start, stop)) for start, stop in pairwise(starts))


def _fitting(
    screening: Screening, solve: Callable[..., StageSolution], room: Callable[..., bool], replays: Replays
) -> tuple[StageSolution, float]:
    """Return the best assignment found that fits by its replay, and its step in seconds.

    Options of ranks are judged by a bound of their memory. If the best assignment does not fit, the limit for the next
    is its bound divided by the factor by which its replay exceeds the memory, at most LESS_ROOM of the limit before:
    by how much is only asked where there is `room` for another one.
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
        if not room(limit_bytes=limit_bytes * LESS_ROOM):
            return replace(found, plan=None, step_s=np.inf, has_room=False), np.inf
        bound = float(screening.least_bytes(memory_of_plans(screening.scenario, [found.plan])).max())
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
