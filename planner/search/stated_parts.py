"""Why no plan has the parts that the user fixed: the rules that the nearest such plan breaks, and legal values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any

import numpy as np

from planner.io.figures import gpus_text
from planner.question.question import Question
from planner.search.plan_space.candidates import Bounds, Nodes, enumerate_nodes
from planner.search.plan_space.stated import Values, values_text
from simulator.config.plan import PLAN_FIELDS, Plan, default_schedule
from simulator.config.plan_schema import Kind
from simulator.legality.rule import Grade, Problem, divisors
from simulator.pipeline.schedules.registry import SCHEDULES
from topology.errors import Infeasible

COMBINATIONS = 256  # combinations of stated values that are tried as an example
SHOWN = 10  # legal values named


def contradiction(
    question: Question, bounds: Bounds, found: Nodes, others: Callable[[], Sequence[str]]
) -> Infeasible | None:
    """Return the error for stated parts that no legal plan has; None if no part was stated.

    If no other value of one part helps, `others` gives changes of the question with which there is a plan.
    """
    stated = bounds.stated
    if not stated:
        return None
    plan, broken = _nearest(question, stated)
    limits = ", ".join(found.pruned) or "no rule of one plan"
    reasons = [problem.message for problem in broken]
    if plan.pp == 1 and plan.schedule:
        reasons.append(f"schedule {plan.schedule} orders the stages of a pipeline, and pp is 1")
    why = "; ".join(reasons) or f"left out by the search: {limits}"
    ways = [
        f"{PLAN_FIELDS[name].flag} {values}" for name in stated if (values := _legal_values(question, bounds, name))
    ]
    remedy = f"with the rest as said: {', or '.join(ways)}" if ways else "; or ".join(others())
    said = " ".join(f"{PLAN_FIELDS[name].flag} {values_text(value)}" for name, value in stated.items())
    return Infeasible(
        f"no legal plan for {question.model.name} on {gpus_text(question.count)} in {question.framework.title} has"
        f" {said}",
        why=why,
        remedy=remedy or "leave more than one of these free: no other value of a single one is legal",
    )


def _legal_values(question: Question, bounds: Bounds, name: str) -> str:
    """Return the values of one part with which there is a plan, all other parts as stated; empty if there are none."""
    free = {name: question.framework.offloads if name == "offload" else None}
    nodes = enumerate_nodes(question, bounds=bounds.fixing(**free))
    if not len(nodes):
        return ""
    if name == "recompute":
        values = [word for word, legal in nodes.choices["recompute"] if legal.any()]
    else:
        values = [value for value in np.unique(getattr(nodes.columns, name)).tolist() if value != ""]
    shown = [str(value) for value in values[:SHOWN]]
    return ", ".join([*shown, "..."] if len(values) > SHOWN else shown)


def _nearest(question: Question, stated: Mapping[str, Values]) -> tuple[Plan, list[Problem]]:
    """Return the plan of the stated values, with the simplest values otherwise, that breaks the fewest rules, and those
    rules.
    """
    options = [_values(question, name, value) for name, value in stated.items()]
    tried = []
    for values in islice(product(*options), COMBINATIONS):
        plan = _plainest(question, dict(zip(stated, values, strict=True)))
        tried.append((plan, [p for p in question.problems(plan) if p.grade is Grade.ILLEGAL]))
    return min(tried, key=lambda pair: len(pair[1]))


def _values(question: Question, name: str, value: Any) -> list[Any]:
    """Return the stated values of one part to try as examples: those that divide the GPUs, else the smallest."""
    if PLAN_FIELDS[name].kind is not Kind.COUNT:
        return list(value)
    low = [first for first, _ in value]
    fitting = [n for first, last in value for n in range(first, min(last, first + 64) + 1) if question.count % n == 0]
    return list(dict.fromkeys([*fitting[:8], *low[:2]]))


def _plainest(question: Question, said: dict[str, Any]) -> Plan:
    """Return the plan with one value for each stated part, with data parallelism over the remaining GPUs."""
    framework = question.framework
    values = dict(said)
    kind = SCHEDULES.get(values.get("schedule", ""))
    if kind and "virtual_stages" not in values:
        values["virtual_stages"] = kind.least_stages
    if "pp" not in values and ("schedule" in values or values.get("virtual_stages", 1) > 1):
        values["pp"] = next((n for n in divisors(question.count) if n > 1), 1)
    if kind is None and "schedule" not in values and values.get("pp", 1) > 1:
        values["schedule"] = _schedule(framework.schedules, values.get("virtual_stages", 1))
    values.setdefault("recompute", framework.recomputes[0])
    plan = Plan(**values, sequence_parallel=framework.sequence_parallel and values.get("tp", 1) > 1)
    free = [axis for axis in (framework.fills, "dp_shard", "dp_replicate") if axis not in values]
    if free and question.count % plan.gpus == 0:
        plan = plan.with_(**{free[0]: question.count // plan.gpus})
    if not framework.zero_stages or plan.dp_shard > 1:
        return plan
    stages = {"parameters": (3,), "optimizer": framework.optimizer_offload_stages}.get(plan.offload, ())
    return replace(plan, zero_stage=max(stages, default=0))


def _schedule(offered: tuple[str, ...], stages: int) -> str | None:
    """Return the default schedule for this number of stages per rank, else another one of the framework."""
    default = default_schedule(stages)
    return default if default in offered or not offered else offered[0]
