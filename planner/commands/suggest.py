"""`planner suggest`: the best plans for a model on a cluster, and why the others lost."""

from __future__ import annotations

import sys

from planner.answers import suggest as answers
from planner.io import output
from planner.requests.training import Suggest
from planner.search.result import SearchResult
from topology.errors import UserError


def suggest(asked: Suggest) -> None:
    """Print what `planner suggest` answers, whatever came of saving a plan where `--out` asks for it."""
    try:
        found = answers.suggest(asked, output.progress, None if asked.json else _print_early)
    finally:
        output.end_progress()
    out, pick = asked.out, asked.pick or 1
    if out is not None and pick > len(found.plans):
        raise UserError(f"--pick {pick}: {len(found.plans)} plans are listed", remedy="--all lists variants too")
    unsaved = None if out is None else output.attempt(lambda: found.save(out, pick=pick, force=asked.force))
    if asked.json:
        output.emit_json(found.to_dict())
    else:
        _print(found, None if unsaved is not None or out is None else str(out))
    if unsaved is not None:
        raise unsaved


def _print_early(found: SearchResult) -> None:
    if sys.stderr.isatty():
        from planner.explain.answer_text import answer_sentence  # noqa: PLC0415

        output.early_answer(f"Before simulation: {answer_sentence(found.plans[0])}")


def _print(found: answers.Suggested, out: str | None) -> None:
    # JSON needs neither sentences nor a terminal.
    from planner.explain.answer_text import print_search  # noqa: PLC0415
    from planner.explain.run_text import print_run  # noqa: PLC0415

    print_search(found.result, out=out)
    if found.run:
        print_run(found.run)
