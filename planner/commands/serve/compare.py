"""`planner compare` of two saved serving plans."""

from __future__ import annotations

from planner.answers.serve.estimate import answer_of
from planner.io import output
from planner.requests.serving import Task, is_serving_plan
from planner.requests.training import Compare
from planner.serving import ServingFlags, compare_answers
from planner.serving.reports.documents import comparison_document
from planner.serving.reports.plan_text import print_compared
from topology.errors import UserError


def compare(asked: Compare) -> None:
    """Print two deployments side by side, each under its own question. Raises UserError if one is no deployment."""
    first, second = asked.first, asked.second
    serving = [is_serving_plan(name) for name in (first, second)]
    if not all(serving) or asked.task is Task.TRAIN:
        raise UserError(
            "two plans of one task are compared",
            why=f"{first if not serving[0] else second} is "
            + ("not a serving plan" if not all(serving) else "a serving plan"),
            remedy="make both with planner suggest --task serve --out plan.json",
        )
    if asked.profile is not None or asked.strict:
        raise UserError("--profile and --strict are options of training", remedy="leave them out")
    found = compare_answers(answer_of(ServingFlags(), first), answer_of(ServingFlags(), second))
    if asked.json:
        output.emit_json(comparison_document(found, (first, second)))
    else:
        print_compared(found, (first, second))
