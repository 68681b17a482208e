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
        time = (
            {} if cluster is None or problem.stages is not None else {"time_s": _time(problem, found, cluster, profile)}
        )
    except (UserError, Infeasible) as error:
        return _rejected(name, error)
    return {
        "id": name,
        "mesh_axes": _axes(problem),
        "placements": _shown({n: _tokens(problem, at) for n, at in found.choice.layouts.items()}),
        "named": _shown({n: _named(problem, n, at) for n, at in found.choice.layouts.items()}),
        "collectives": [_collective(one, why) for one, why in _reasons(problem, found)],
        "ring_send_bytes_per_rank": _number(found.ring_send_bytes),
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
        "mesh_axes": [],
        "placements": {},
        "named": {},
        "collectives": [],
        "ring_send_bytes_per_rank": None,
        "rejected": "; ".join(part for part in (error.what, error.why, error.remedy) if part),
    }


def _tokens(problem: Problem, layout: Layout) -> list[str]:
    """Return placements on the mesh as it was given: copies over the axis of stages."""
    tokens = list(tokens_of(layout, problem.mesh))
    if problem.stages is not None:
        tokens.insert(problem.stages.position, "R")
    return tokens


def _axes(problem: Problem) -> list[str]:
    """Return the names that placements are given for, in order; finer than the given mesh where that is split."""
    names = list(problem.mesh.names)
    if problem.stages is not None:
        names.insert(problem.stages.position, problem.stages.axis)
    return names


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
            source, target = (" ".join(_tokens(problem, at)) for at in (step.source, step.target))
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
        **({"per_rank": [_row(one, *row) for row in one.rows]} if one.rows else {}),
    }


def _row(one: Collective, rows_in: int, rows_out: int, sent: int) -> dict[str, int]:
    """Return the bytes of one rank of a group whose ranks differ."""
    return {
        "bytes_in": rows_in * one.row_bytes,
        "bytes_out": rows_out * one.row_bytes,
        "ring_send_bytes_per_rank": sent * one.row_bytes,
    }


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
