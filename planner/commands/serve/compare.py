"""`planner compare` of two saved serving plans."""

from __future__ import annotations

from planner.commands.serve.estimate import answer_of
from planner.io import output
from planner.serving import ServingFlags, compare_answers, comparison_document, print_compared


def compare_serving(first: str, second: str, *, json: bool) -> None:
    """Print two deployments side by side, each under its own question."""
    found = compare_answers(answer_of(ServingFlags(), first), answer_of(ServingFlags(), second))
    if json:
        output.emit_json(comparison_document(found, (first, second)))
    else:
        print_compared(found, (first, second))
