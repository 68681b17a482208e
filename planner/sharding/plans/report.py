"""The answer to a case as a JSON row: placements and collectives with their bytes, or the reason for rejection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from time import monotonic
from typing import Any

from planner.sharding.layouts.collectives import Collective
from planner.sharding.layouts.layout import Layout, placements_of
from planner.sharding.operators.operator import PRODUCT
from planner.sharding.plans.lowering import simulate_time
from planner.sharding.plans.plan import ShardingPlan, TensorMove, plan_sharding
from planner.sharding.plans.schedules import MOST_RANKS, Scheduled, choose_schedules, text_of
from planner.sharding.problem.deadline import NO_DEADLINE, Deadline
from planner.sharding.problem.problem import Machine, MemoryLimit, ShardingProblem, parse_problem
from planner.sharding.problem.schedule import Schedule
from planner.sharding.solver.pricing import PICOSECONDS
from simulator.calibration.calibration import Calibration
from topology.cluster import Cluster
from topology.codec import JsonObject
from topology.errors import BadInput, Infeasible, PlannerError, UserError


@dataclass(frozen=True, slots=True)
class Planned:
    """A problem and its plan."""

    problem: ShardingProblem
    plan: ShardingPlan


def planned_case(
    data: Mapping[str, Any],
    number: int,
    cluster: Cluster | None = None,
    calibration: Calibration | None = None,
    *,
    limits: Limits | None = None,
) -> tuple[JsonObject, Planned | None]:
    """Return the row of one case and its plan, or a row with the reason why there is none.

    With a cluster, a plan's cost is its time there, unless the case asks for the fewest bytes.
    """
    name = data.get("id")
    name = name[:200] if isinstance(name, str) else f"case {number}"
    limits, started = limits or Limits(), monotonic()
    try:
        parsed = parse_problem(data)
        # the work after the choice takes about as long as that before
        choosing = replace(limits, deadline=limits.deadline.earlier(monotonic() - started))
        problem = on_machine(parsed, cluster, calibration, choosing)
        plan = plan_sharding(problem)
        if cluster is None or problem.stages is not None:
            return plan_row(name, problem, plan), Planned(problem, plan)
        done = choose_schedules(problem, plan, Machine(cluster, calibration), deadline=choosing.deadline)
        row = plan_row(name, done.problem, done.plan)
        row["schedules"] = _schedules(done)
        if problem.mesh.ranks > MOST_RANKS:
            row["not_simulated"] = f"programs on more than {MOST_RANKS:,} ranks are not simulated"
        else:
            row["time_s"] = _simulated_time(done.problem, done.plan, cluster, calibration)
    except (UserError, Infeasible) as error:
        return rejection(name, error), None
    return row, Planned(problem, plan)


def _schedules(done: Scheduled) -> list[JsonObject]:
    """Return, for every result whose exchanges can be carried out in several ways, the chosen way and the time
    of each.
    """
    return [
        {
            "result": name.removesuffix(PRODUCT),
            "way": text_of(done.problem.schedule.get(name, Schedule())),
            "program_s": dict(times),
        }
        for name, times in done.tried.items()
        if len(times) > 1
    ]


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadline for the best answer so far, and the bytes that a rank may hold at the beginning of the backward pass."""

    deadline: Deadline = NO_DEADLINE
    memory_bytes: float | None = None


def on_machine(
    problem: ShardingProblem, cluster: Cluster | None, calibration: Calibration | None, limits: Limits
) -> ShardingProblem:
    """Return the problem with time on `cluster` as its cost, unless it asks for the fewest bytes. Raises BadInput."""
    if cluster is None or problem.stages is not None or problem.policy == "min_ring_bytes":
        if problem.policy == "min_time":
            raise BadInput("the policy min_time without a machine", remedy="name it with --cluster")
        return problem
    memory = None if limits.memory_bytes is None else MemoryLimit(limit_bytes=limits.memory_bytes)
    return replace(problem, machine=Machine(cluster, calibration), memory=memory, deadline=limits.deadline)


def plan_row(name: str, problem: ShardingProblem, plan: ShardingPlan) -> JsonObject:
    """Return the row of a plan, without its time."""
    return {
        "id": name,
        "mesh_axes": _mesh_axes(problem),
        "placements": _without_intermediates({n: _placements(problem, at) for n, at in plan.choice.layouts.items()}),
        "named": _without_intermediates({n: _named_layout(problem, n, at) for n, at in plan.choice.layouts.items()}),
        "collectives": [
            _collective_row(collective, reason) for collective, reason in _collectives_with_reasons(problem, plan)
        ],
        "ring_send_bytes_per_rank": _number(plan.ring_send_bytes),
        "rejected": None,
        "cost": _cost(problem, plan),
        "warnings": list(problem.graph.warnings),
    }


def _cost(problem: ShardingProblem, plan: ShardingPlan) -> JsonObject:
    """Return the solver's cost: seconds of work and communication one after another, or ring bytes of a rank."""
    choice = plan.choice
    if problem.machine is not None:
        return {"unit": "s", "value": choice.cost / PICOSECONDS, "bound": choice.bound / PICOSECONDS, "gap": choice.gap}
    ranks = problem.mesh.ranks
    return {"unit": "ring bytes", "value": choice.cost / ranks, "bound": choice.bound / ranks, "gap": choice.gap}


def _simulated_time(
    problem: ShardingProblem, plan: ShardingPlan, cluster: Cluster, calibration: Calibration | None
) -> JsonObject:
    time = simulate_time(problem, plan, cluster, calibration)
    return {
        "value": time.seconds,
        "compute": time.compute_s,
        "exposed_communication": time.exposed_communication_s,
        "source": "datasheet" if calibration is None else "fitted",
    }


def rejection(name: str, error: PlannerError) -> JsonObject:
    """Return the row of a case without an answer."""
    return {
        "id": name,
        "mesh_axes": [],
        "placements": {},
        "named": {},
        "collectives": [],
        "ring_send_bytes_per_rank": None,
        "rejected": "; ".join(part for part in (error.what, error.why, error.remedy) if part),
    }


def _placements(problem: ShardingProblem, layout: Layout) -> list[str]:
    """Return placements on the original mesh: replicated over the axis of pipeline stages."""
    tokens = list(placements_of(layout, problem.mesh))
    if problem.stages is not None:
        tokens.insert(problem.stages.position, "R")
    return tokens


def _mesh_axes(problem: ShardingProblem) -> list[str]:
    """Return the mesh axes of the placements, in order; these are the parts of an axis that the mesh splits."""
    names = list(problem.mesh.names)
    if problem.stages is not None:
        names.insert(problem.stages.position, problem.stages.axis)
    return names


def _without_intermediates(plan: Mapping[str, Any]) -> JsonObject:
    """Leave out the tensors between a product and its bias, which the case does not name."""
    return {name: value for name, value in plan.items() if not name.endswith(PRODUCT)}


def _named_layout(problem: ShardingProblem, name: str, layout: Layout) -> JsonObject:
    """Return the layout by axis names: {axis: [mesh axes and block counts, major first]}, and what is pending."""
    axes = problem.tensors[name].axes
    specs = {axes[d] if d < len(axes) else str(d): list(spec) for d, spec in enumerate(layout.dims) if spec}
    return {"axes": specs, "partial": dict(layout.pending)}


def _collectives_with_reasons(problem: ShardingProblem, plan: ShardingPlan) -> list[tuple[Collective, str]]:
    """Return every collective and the reason for it."""
    rows = []
    for step in plan.steps:
        if isinstance(step, TensorMove):
            source, target = (" ".join(_placements(problem, at)) for at in (step.source, step.target))
            then = f", as {step.consumer.removesuffix('.product')} needs it" if step.consumer else ""
            rows += [
                (collective, f"{collective.tensor.removesuffix(PRODUCT)} from {source} to {target}{then}")
                for collective in step.collectives
            ]
        else:
            name = problem.operators[step.operator].result.name
            rows += [(collective, f"{collective.note}, for {name}") for collective in step.collectives]
    return rows


def _collective_row(collective: Collective, reason: str) -> JsonObject:
    return {
        "kind": collective.kind,
        "mesh_dim": collective.mesh_dim,
        "group_size": collective.group,
        "dtype": collective.dtype,
        "local_in": list(collective.local_in),
        "local_out": list(collective.local_out),
        "bytes_in": collective.bytes_in,
        "bytes_out": collective.bytes_out,
        "ring_send_bytes_per_rank": _number(collective.ring_send_bytes),
        "reduction": collective.reducer or None,
        "why": reason,
        **({"per_rank": [_rank_row(collective, *row) for row in collective.rows]} if collective.rows else {}),
    }


def _rank_row(collective: Collective, rows_in: int, rows_out: int, sent: int) -> dict[str, int]:
    """Return the bytes of one rank, if ranks differ."""
    return {
        "bytes_in": rows_in * collective.row_bytes,
        "bytes_out": rows_out * collective.row_bytes,
        "ring_send_bytes_per_rank": sent * collective.row_bytes,
    }


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
