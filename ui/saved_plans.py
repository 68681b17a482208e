"""Plans that pages list below those of the answer: faster ones that may fit, and those that a person saved.

Saved plans are files on this machine, one folder per question.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import platformdirs
import streamlit as st

from planner.explain.answer_text import LEAST_GAIN
from planner.question.prediction import Prediction, predict
from planner.search.result import RankedPlan, SearchResult
from simulator.config.estimate import chance
from simulator.config.plan import Plan
from topology import codec
from topology.errors import BadInput, PlannerError
from ui.question.state import Inputs

MOST = 20  # for one question
OWN = "saved by you"


def folder(question: Inputs) -> Path:
    """Return where the plans saved for a question are."""
    return platformdirs.user_data_path("meshwright", appauthor=False) / "plans" / question.key


def save(question: Inputs, plan: Plan) -> None:
    """Save a plan. Raises BadInput where there are too many, OSError where it cannot be written."""
    if len(plans(question)) >= MOST:
        raise BadInput(f"{MOST} plans are saved for this question", remedy="remove one first")
    codec.write_text(folder(question) / f"{codec.fingerprint(plan)}.json", codec.to_json(plan) + "\n")


def remove(question: Inputs, plan: Plan) -> None:
    """Remove a saved plan."""
    (folder(question) / f"{codec.fingerprint(plan)}.json").unlink(missing_ok=True)


def plans(question: Inputs) -> tuple[Plan, ...]:
    """Return the plans saved for a question, oldest first; a file that is not a plan is passed over."""
    found = []
    for path in sorted(folder(question).glob("*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name)):
        try:
            found.append(codec.convert(codec.read_json(path), Plan, where=path.name))
        except PlannerError:
            continue
    return tuple(found[:MOST])


def with_likely(result: SearchResult) -> SearchResult:
    """Return the result with the faster plans that may fit below those that surely do."""
    below = tuple(
        RankedPlan(
            rank=rank,
            plan=one.plan,
            estimate=one.estimate,
            method=one.method,
            tie=rank,
            fit_probability=one.fit_probability,
            lost_because=f"{one.faster:.0%} less time, but {chance(one.fit_probability)} likely to fit",
            problems=result.question.problems(one.plan),
        )
        for rank, one in enumerate(result.likely, len(result.plans) + 1)
        if one.faster >= LEAST_GAIN
    )
    return replace(result, plans=(*result.plans, *below))


def with_saved(question: Inputs, result: SearchResult) -> SearchResult:
    """Return the result with the saved plans below those that were found, predicted like them."""
    listed = {codec.fingerprint(ranked.plan) for ranked in result.plans}
    own: list[RankedPlan] = []
    for plan in plans(question):
        key = codec.fingerprint(plan)
        if key in listed or not result.question.legal(plan):
            continue
        found = _predicted(f"{question.key} {key}", result, plan)
        rank = len(result.plans) + len(own) + 1
        own.append(
            RankedPlan(
                rank=rank,
                plan=plan,
                estimate=found.estimate,
                method=found.method,
                tie=rank,
                fit_probability=found.estimate.memory.fit_probability,
                lost_because=OWN,
                problems=result.question.problems(plan),
            )
        )
    return replace(result, plans=(*result.plans, *own)) if own else result


@st.cache_resource(max_entries=64, show_spinner="Predicting a saved plan")
def _predicted(key: str, _result: SearchResult, _plan: Plan) -> Prediction:
    del key
    return predict(_result.question, _plan)
