"""Choose how the exchanges of a plan are carried out, unless stated: in the way that makes the simulated program
fastest.

For every result that is moved, or whose operands are, the ways are: as a whole, around a ring, in chunks, or an
all-reduce in two (`problem.schedule`). Layouts do not change. Equivalent results, as in repeated layers, get the same
way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from planner.sharding.plans.lowering import simulate_time
from planner.sharding.plans.plan import ShardingPlan, TensorMove, apply_to_moves
from planner.sharding.problem.deadline import NO_DEADLINE, Deadline
from planner.sharding.problem.problem import Machine, ShardingProblem
from planner.sharding.problem.schedule import Schedule
from planner.sharding.solver.equivalence import find_equivalent
from topology.errors import BadInput

WAYS = (
    Schedule(kind="ring"),
    *(Schedule(kind="chunked", pieces=pieces) for pieces in (2, 4, 8)),
    Schedule(kind="scatter_gather"),
)
WHOLE = "whole"
GAIN = 0.002  # least relative gain for more messages
MAX_TRIALS = 64
_LONGEST = 2_000  # most steps of a plan that is simulated repeatedly
MOST_RANKS = 1 << 15  # most ranks of a mesh whose program is simulated, since each has its events


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The problem with its schedules and the plan that follows them; `tried` has seconds by result and way."""

    problem: ShardingProblem
    plan: ShardingPlan
    tried: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def choose_schedules(
    problem: ShardingProblem, plan: ShardingPlan, machine: Machine, *, deadline: Deadline = NO_DEADLINE
) -> Scheduled:
    """Return the plan with the schedules, for results without a stated one, whose program is fastest on `machine`.

    Nothing new is tried after `deadline`.
    """
    moved = dict.fromkeys(name for step in plan.steps if isinstance(step, TensorMove) for name in _scheduled_by(step))
    best = Scheduled(problem, plan)
    if (
        problem.stages is not None
        or problem.routed
        or problem.schedule
        or not moved
        or len(plan.steps) > _LONGEST
        or problem.mesh.ranks > MOST_RANKS
    ):
        return best
    least = _seconds(best, machine)
    tried: dict[str, dict[str, float]] = {}
    trials = 0
    equivalence = find_equivalent(problem.graph, {**problem.input_layouts, **problem.pins}, fold=True)
    for members in equivalence.members():
        names = [name for number in members if (name := problem.operators[number].result.name) in moved]
        times = {WHOLE: least}
        start = best
        for way in WAYS if names else ():
            if trials == MAX_TRIALS or deadline.over:
                break
            trials += 1
            found = _with(start, plan, dict.fromkeys(names, way))
            if found is not None:
                times[text_of(way)] = taken = _seconds(found, machine)
                if taken < least * (1 - GAIN):
                    best, least = found, taken
        tried |= dict.fromkeys(names, times)
    return replace(best, tried=tried)


def text_of(schedule: Schedule) -> str:
    """Return a schedule as a case states it."""
    return f"{schedule.kind}:{schedule.pieces}" if schedule.kind == "chunked" else schedule.kind


def _scheduled_by(move: TensorMove) -> Iterator[str]:
    """Yield the result whose schedule a move follows."""
    if move.collectives:
        yield move.consumer or move.tensor


def _with(before: Scheduled, plan: ShardingPlan, more: Mapping[str, Schedule]) -> Scheduled | None:
    """Return the plan with more schedules; None if one of them is impossible."""
    schedules = {**before.problem.schedule, **more}
    steps: list[object] = []
    waiting: list[TensorMove] = []
    try:
        for step in plan.steps:
            if isinstance(step, TensorMove) and step.consumer in schedules:
                waiting.append(step)  # moved together until their operator runs
                continue
            steps += apply_to_moves(waiting, schedules[waiting[0].consumer]) if waiting else []
            waiting = []
            own = schedules.get(step.tensor) if isinstance(step, TensorMove) and not step.consumer else None
            if isinstance(step, TensorMove) and own is not None and own.kind != "ring":
                steps += apply_to_moves([step], own)
            else:
                steps.append(step)
    except BadInput:
        return None
    problem = replace(before.problem, schedule=schedules)
    found = replace(plan, steps=tuple(steps))  # type: ignore[arg-type]
    return None if found.steps == before.plan.steps else Scheduled(problem, found)


def _seconds(one: Scheduled, machine: Machine) -> float:
    return simulate_time(one.problem, one.plan, machine.cluster, machine.calibration).seconds
