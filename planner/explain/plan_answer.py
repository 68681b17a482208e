"""The answer about one plan: its problems under the rules, its estimate if it is legal, and changes that would free
memory.

`planner estimate`, `planner trace` and the explorer's what-if use this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.explain.traffic import traffic_of
from planner.io.figures import interval_text
from planner.io.output import SCHEMA_VERSION
from planner.question.cases import Case
from planner.question.prediction import Method, predict
from planner.search.deadline import deadline_of, left_s, over
from planner.search.fixes import Fix, find_fixes, held_text
from planner.search.mixed import is_mixed, parts_text, price_of
from simulator.calibration.published_mfu import exceeded
from simulator.config.estimate import Estimate, Fit
from simulator.legality.rule import Problem
from simulator.legality.rules import is_legal
from simulator.runtimes.environment import assumed_environment
from topology import codec
from topology.codec import JsonObject

FIXES_LEFT_OUT = "half of the time limit was over before all changes were tried that might make the plan fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """`estimate` and `method` are None if the plan is not legal. `fixes` make a plan fit that may not."""

    case: Case
    problems: tuple[Problem, ...]
    estimate: Estimate | None = None
    method: Method | None = None
    fixes: tuple[Fix, ...] = ()


def answer_plan(
    case: Case,
    *,
    with_fixes: bool = True,
    deadline: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> PlanAnswer:
    """Return the problems and the estimate of a case's plan, with the fixes found in the first half of the time until
    `deadline`.

    `progress` is called with the estimate as text before fixes are searched, which takes several times as long. Raises
    BadCluster if the GPU's rates are unknown.
    """
    question, plan = case.question, case.plan
    problems = question.problems(plan)
    if not is_legal(problems):
        return PlanAnswer(case=case, problems=problems)
    found = predict(question, plan)
    if is_mixed(question.cluster):
        said = (price_of(question, plan, found.estimate), parts_text(question.cluster))
        case = replace(case, assumed=(*case.assumed, *said))
    doubtful = with_fixes and found.estimate.memory.fit is not Fit.YES
    if doubtful:
        known = f"{interval_text(found.estimate.step_s)} a step, {held_text(found.estimate.memory)}"
        progress(f"{known}; looking for what would make it fit")
    left = left_s(deadline)
    half = None if left is None else deadline_of(left / 2)
    fixes = find_fixes(question, plan, found.estimate, half) if with_fixes else ()
    if doubtful and over(half):
        case = replace(case, assumed=(*case.assumed, FIXES_LEFT_OUT))
    return PlanAnswer(case=case, problems=problems, estimate=found.estimate, method=found.method, fixes=fixes)


def plan_document(found: PlanAnswer) -> JsonObject:
    """Return the JSON document of one case: legality, assumptions, estimate, and changes that make it fit."""
    case = found.case
    return {
        "schema_version": SCHEMA_VERSION,
        "id": case.id,
        "legal": found.estimate is not None,
        "problems": codec.to_builtins(found.problems),
        "assumed": list(case.assumed),
        "changed": list(case.changed),
        "framework": case.question.framework.name,
        "plan": codec.to_builtins(case.plan),
        "workload": codec.to_builtins(case.question.workload),
        "runtime": codec.to_builtins(case.question.runtime),
        "environment": {one.name: one.value for one in assumed_environment(case.plan)},
        "estimate": None if found.estimate is None else codec.to_builtins(found.estimate),
        "method": found.method,
        "above_published": None
        if found.estimate is None
        else codec.to_builtins(exceeded(found.estimate, case.question.cluster, case.question.runtime, case.plan.gpus)),
        "fit_probability": None if found.estimate is None else found.estimate.memory.fit_probability,
        "fixes": codec.to_builtins(found.fixes),
        "traffic": None
        if found.estimate is None
        else codec.to_builtins(traffic_of(replace(case.question, gpus=case.plan.gpus), case.plan, found.estimate)),
    }


def unreadable_document(name: str, message: str) -> JsonObject:
    """Return the JSON document of a case that cannot be read."""
    problem = {"rule": "input", "grade": "illegal", "message": message, "nearest": [], "nearest_of": ""}
    return {
        "schema_version": SCHEMA_VERSION,
        "id": name,
        "legal": False,
        "problems": [problem],
        "assumed": [],
        "estimate": None,
    }
