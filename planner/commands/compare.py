"""`planner compare`: two plans, term by term."""

from __future__ import annotations

from planner.explain.compare_plans import compare_plans, comparison_document
from planner.explain.explain_text import print_comparison
from planner.io import output
from planner.io.inputs import measurements, warn_of_doubts
from planner.question.cases import case_of_file
from planner.requests.training import Compare


def compare(asked: Compare) -> None:
    """Print what `planner compare` answers."""
    measured = measurements(asked.profile, strict=asked.strict)
    found = compare_plans(*(case_of_file(name, measured=measured) for name in (asked.first, asked.second)))
    warn_of_doubts(measured)
    if asked.json:
        output.emit_json(comparison_document(found, (asked.first, asked.second)))
    else:
        print_comparison(found)
