"""Answers as JSON rows: placements, collectives with their bytes, or why a case has no answer."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from planner.sharding.collectives import Collective
from planner.sharding.layout import Layout, tokens_of
from planner.sharding.problem import Problem, problem_of
from planner.sharding.steps import Answer, Move, answer
from topology.errors import Infeasible, PlannerError, UserError

if TYPE_CHECKING:
    from topology.cluster import Cluster
    from topology.profile import Profile


def answered(
    data: Mapping[str, Any], number: int, cluster: Cluster | None = None, profile: Profile | None = None
) -> dict[str, Any]:
    """Return the row of one case; `rejected` is None, or says why it has no answer. On a cluster, with its time there."""
    name = data.get("id")
    name = name[:200] if isinstance(name, str) else f"case {number}"
    try:
        problem = problem_of(data)
        found = answer(problem)
        time = {} if cluster is None else {"time_s": _time(problem, found, cluster, profile)}
    except (UserError, Infeasible) as error:
        return _rejected(name, error)
    return {
        "id": name,
        "placements": _shown({n: list(tokens_of(at, problem.mesh)) for n, at in found.choice.layouts.items()}),
        "named": _shown({n: _named(problem, n, at) for n, at in found.choice.layouts.items()}),
        "collectives": [_collective(one, why) for one, why in _reasons(problem, found)],
        "ring_send_bytes_per_rank": _number(sum((c.ring_send_bytes for c in found.collectives), Fraction(0))),
        "rejected": None,
        **time,
    }


def _time(problem: Problem, found: Answer, cluster: Cluster, profile: Profile | None) -> dict[str, Any]:
    from planner.sharding.lowering import timed  # noqa: PLC0415 - numpy and SimPy, only where a machine is named

    time = timed(problem, found, cluster, profile)
    return {
        "value": time.seconds,
        "compute": time.compute_s,
        "exposed_communication": time.exposed_communication_s,
        "source": "datasheet" if profile is None else "fitted",
    }


def _rejected(name: str, error: PlannerError) -> dict[str, Any]:
    return {
        "id": name,
        "placements": {},
        "named": {},
        "collectives": [],
        "ring_send_bytes_per_rank": None,
        "rejected": "; ".join(part for part in (error.what, error.why, error.remedy) if part),
    }


def _shown(found: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what stands between the two halves of an operator taken apart."""
    return {name: value for name, value in found.items() if "." not in name}


def _named(problem: Problem, name: str, layout: Layout) -> dict[str, Any]:
    """Return the layout by the names of dims: {dim: [mesh axes and whole blocks, major first]}, and what is pending."""
    axes = problem.tensors[name].axes
    cuts = {axes[d] if d < len(axes) else str(d): list(items) for d, items in enumerate(layout.dims) if items}
    return {"axes": cuts, "partial": dict(layout.pending)}


def _reasons(problem: Problem, found: Answer) -> list[tuple[Collective, str]]:
    """Return every collective with the reason that it is there."""
    rows = []
    for step in found.program:
        if isinstance(step, Move):
            source, target = (" ".join(tokens_of(at, problem.mesh)) for at in (step.source, step.target))
            then = f", as {step.needed_by.removesuffix('.product')} needs it" if step.needed_by else ""
            rows += [
                (one, f"{one.tensor.replace('.product', '')} from {source} to {target}{then}") for one in step.runs
            ]
        else:
            name = problem.operators[step.operator].result.name
            rows += [(one, f"{one.note}, for {name}") for one in step.runs]
    return rows


def _collective(one: Collective, why: str) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "mesh_dim": one.mesh_dim,
        "group_size": one.group,
        "dtype": one.dtype,
        "local_in": list(one.local_in),
        "local_out": list(one.local_out),
        "bytes_in": one.bytes_in,
        "bytes_out": one.bytes_out,
        "ring_send_bytes_per_rank": _number(one.ring_send_bytes),
        "reduction": one.reducer or None,
        "why": why,
    }


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
