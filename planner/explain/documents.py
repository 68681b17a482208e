"""Answers as JSON documents: a search's, an explanation's, a comparison's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planner.explain.explain import Explanation
from planner.explain.traffic import traffic_of
from planner.io.output import SCHEMA_VERSION
from planner.question.question import Question
from planner.search.result import RankedPlan, SearchResult
from topology import codec


def search_document(result: SearchResult) -> dict[str, Any]:
    """Return the question, what was assumed, the search, plans best first, and rejections."""
    return {
        "schema_version": SCHEMA_VERSION,
        "question": _question(result.question, result.plans[0].plan.gpus),
        "assumed": list(result.assumed),
        "search": codec.to_builtins(result.search),
        "plans": [{**codec.to_builtins(one), "traffic": _traffic(result.question, one)} for one in result.plans],
        "rejected": result.rejected,
        "may_fit": codec.to_builtins(result.may_fit),
        "likely": codec.to_builtins(result.likely),
        "by_gpus": codec.to_builtins(result.by_gpus),
    }


def _traffic(question: Question, listed: RankedPlan) -> Any:
    """Return the bytes of a listed plan by axis and by link."""
    return codec.to_builtins(traffic_of(replace(question, gpus=listed.plan.gpus), listed.plan, listed.estimate))


def explanation_document(found: Explanation, question: Question, changed: Sequence[str] = ()) -> dict[str, Any]:
    """Return the question and everything that was found out about a plan."""
    return {
        "schema_version": SCHEMA_VERSION,
        "question": _question(question, found.plan.gpus),
        "changed": list(changed),
        **codec.to_builtins(found),
    }


def _question(question: Question, gpus: int) -> dict[str, Any]:
    return {
        "model": question.model.name,
        "cluster": question.cluster.name,
        "gpus": gpus,
        "framework": question.framework.name,
        "workload": codec.to_builtins(question.workload),
        "runtime": codec.to_builtins(question.runtime),
    }
