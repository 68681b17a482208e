"""`planner compare`: two plans, term by term."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.commands import serve
from planner.commands.flags import options
from planner.commands.flags.serving_flags import Task
from planner.explain.compare_plans import compare_plans, comparison_document
from planner.explain.explain_text import print_comparison
from planner.io import output
from planner.io.inputs import measurements, warn_of_doubts
from planner.question.cases import case_of_file
from topology.errors import UserError


def compare(
    first: Annotated[str, typer.Argument(help="Plan file of suggest --out, or a case.")],
    second: Annotated[str, typer.Argument(help="Another, of the same question or a different one.")],
    task: Annotated[
        Task | None, typer.Option("--task", help="train or serve; default: as the files are.", show_default=False)
    ] = None,
    profile: options.Profile = None,
    strict: options.Strict = False,
    json: options.Json = False,
) -> None:
    """Compare two plans term by term: seconds of the step, bytes of the worst rank, and what the plans set differently.

    Of two serving plans, the time of a token and of the first one. Terms add up to the difference of the two steps. Where the plans are for different questions that is said.
    """
    serving = [serve.is_serving_plan(name) for name in (first, second)]
    if any(serving) or task is Task.SERVE:
        if not all(serving) or task is Task.TRAIN:
            raise UserError(
                "two plans of one task are compared",
                why=f"{first if not serving[0] else second} is "
                + ("not a serving plan" if not all(serving) else "a serving plan"),
                remedy="make both with planner suggest --task serve --out plan.json",
            )
        if profile is not None or strict:
            raise UserError("--profile and --strict are options of training", remedy="leave them out")
        serve.compare_serving(first, second, json=json)
        return
    measured = measurements(profile, strict=strict)
    found = compare_plans(*(case_of_file(name, measured=measured) for name in (first, second)))
    warn_of_doubts(measured)
    if json:
        output.emit_json(comparison_document(found, (first, second)))
    else:
        print_comparison(found)
