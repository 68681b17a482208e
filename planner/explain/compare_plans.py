"""Compare two plans, term by term: their times, their settings, and their questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.explain.tables import cluster_line
from planner.explain.traffic import Traffic, traffic_of
from planner.explain.waterfall import Difference, difference
from planner.io.output import SCHEMA_VERSION
from planner.io.plan_words import changed_fields, differing
from planner.question.cases import Case
from planner.question.prediction import predict
from simulator.config.estimate import Estimate
from topology import codec
from topology.cluster import Cluster
from topology.codec import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`terms` add up to the difference of the two steps. `settings` and `question` list the differences."""

    cases: tuple[Case, Case]
    estimates: tuple[Estimate, Estimate]
    terms: tuple[Difference, ...]
    settings: tuple[str, ...]
    question: tuple[str, ...]
    traffic: tuple[Traffic | None, Traffic | None]


def compare_plans(first: Case, second: Case) -> Comparison:
    """Return two plans side by side, each under its own question."""
    one, other = (predict(case.question, case.plan).estimate for case in (first, second))
    questions = first.question, second.question
    return Comparison(
        cases=(first, second),
        estimates=(one, other),
        terms=tuple(difference(one, other)),
        settings=tuple(f"{what} {old} -> {new}" for what, old, new in changed_fields(first.plan, second.plan)),
        question=tuple(
            f"{name} {line}"
            for name in ("model", "cluster", "workload", "runtime")
            for line in _differing(*(getattr(question, name) for question in questions))
        ),
        traffic=(traffic_of(questions[0], first.plan, one), traffic_of(questions[1], second.plan, other)),
    )


def _differing(one: Any, other: Any) -> list[str]:
    """Return the differences of two parts of a question; for clusters with different GPUs, both on one line."""
    if isinstance(one, Cluster) and {kind.name for kind in one.gpu_kinds} != {kind.name for kind in other.gpu_kinds}:
        return [f"{cluster_line(one)} -> {cluster_line(other)}"]
    return [f"{where.replace('_', ' ')} {a} -> {b}" for where, a, b in differing(one, other)]


def comparison_document(found: Comparison, files: Sequence[str]) -> JsonObject:
    """Return the JSON document of a comparison of two `files`."""
    one, other = found.estimates
    sides = [
        {
            "file": file,
            "plan": codec.to_builtins(case.plan),
            "step_s": estimate.step_s.value,
            "fits": estimate.memory.fits,
            "fit": estimate.memory.fit,
            "traffic": codec.to_builtins(sent),
            "fit_probability": estimate.memory.fit_probability,
        }
        for file, case, estimate, sent in zip(files, found.cases, found.estimates, found.traffic, strict=True)
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "first": sides[0],
        "second": sides[1],
        "step_s": other.step_s.value - one.step_s.value,
        "reserved_bytes": other.memory.reserved_bytes - one.memory.reserved_bytes,
        "terms": [{**codec.to_builtins(term), "delta": term.delta} for term in found.terms],
        "settings": list(found.settings),
        "question": list(found.question),
    }
