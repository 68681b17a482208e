"""The answer of a search as a JSON document."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from planner.explain.traffic import traffic_of
from planner.io.output import SCHEMA_VERSION
from planner.question.question import Question
from planner.search.result import RankedPlan, SearchResult
from simulator.calibration.published_mfu import exceeded
from topology import codec
from topology.codec import JsonObject
from topology.cores import on_cores

TRAFFIC_S = 0.01  # least seconds that counting the bytes of a plan takes, for most plans


def search_document(result: SearchResult) -> JsonObject:
    """Return the question, what was assumed, the search, plans best first, and rejections."""
    pieces = [partial(_traffic, result, one) for one in result.plans]
    traffic = on_cores(pieces, seconds=0.0 if result.cut_short else TRAFFIC_S * len(pieces))
    return {
        "schema_version": SCHEMA_VERSION,
        "question": question_document(result.question, result.plans[0].plan.gpus),
        "assumed": list(result.assumed),
        "search": codec.to_builtins(result.search),
        "plans": [
            {**codec.to_builtins(one), "above_published": _above_published(result.question, one), "traffic": sent}
            for one, sent in zip(result.plans, traffic, strict=True)
        ],
        "rejected": result.rejected,
        "may_fit": codec.to_builtins(result.may_fit),
        "likely": codec.to_builtins(result.likely),
        "other_batch": codec.to_builtins(result.other_batch),
        "by_gpus": codec.to_builtins(result.by_gpus),
    }


def _traffic(result: SearchResult, listed: RankedPlan) -> Any:
    """Return the bytes of a listed plan by axis and by link; None if the time limit ended before."""
    if result.cut_short:
        return None
    question = result.question
    return codec.to_builtins(traffic_of(replace(question, gpus=listed.plan.gpus), listed.plan, listed.estimate))


def _above_published(question: Question, listed: RankedPlan) -> Any:
    return codec.to_builtins(exceeded(listed.estimate, question.cluster, question.runtime, listed.plan.gpus))


def question_document(question: Question, gpus: int) -> JsonObject:
    """Return the question, for this number of GPUs."""
    return {
        "model": question.model.name,
        "cluster": question.cluster.name,
        "gpus": gpus,
        "framework": question.framework.name,
        "workload": codec.to_builtins(question.workload),
        "runtime": codec.to_builtins(question.runtime),
    }
