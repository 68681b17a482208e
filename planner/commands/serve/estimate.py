"""`planner estimate --task serve`: what clients of one deployment would see, and whether it is legal."""

from __future__ import annotations

from click.exceptions import Exit

from planner.answers.serve import estimate as answers
from planner.io import output
from planner.requests.training import Estimate
from planner.serving.reports.plan_text import print_answer


def estimate(asked: Estimate) -> None:
    """Print the answer; raise Exit(3) where the deployment is not legal."""
    answered = answers.estimate(asked)
    found = answered.found
    if asked.json:
        output.emit_json(answered.to_dict())
    else:
        print_answer(found)
    if found.problems:
        raise Exit(3)
    if asked.out is not None:
        answered.save(asked.out, force=asked.force)
