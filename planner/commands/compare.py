"""`planner compare`: two plans, term by term."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.commands.flags import options
from planner.explain.compare_plans import compare_plans, comparison_document
from planner.explain.explain_text import print_comparison
from planner.io import output
from planner.io.inputs import measurements, warn_of_doubts
from planner.question.cases import case_of_file


def compare(
    first: Annotated[str, typer.Argument(help="Plan file of suggest --out, or a case.")],
    second: Annotated[str, typer.Argument(help="Another, of the same question or a different one.")],
    profile: options.Profile = None,
    strict: options.Strict = False,
    json: options.Json = False,
) -> None:
    """Compare two plans term by term: seconds of the step, bytes of the worst rank, and what the plans set differently.

    Terms add up to the difference of the two steps. Where the plans are for different questions that is said.
    """
    measured = measurements(profile, strict=strict)
    found = compare_plans(*(case_of_file(name, measured=measured) for name in (first, second)))
    warn_of_doubts(measured)
    if json:
        output.emit_json(comparison_document(found, (first, second)))
    else:
        print_comparison(found)
