"""`planner suggest`: the best plans for a model on a cluster, and why the others lost."""

from __future__ import annotations

import sys

from planner.answers import suggest as answers
from planner.io import output
from planner.question.plan_file import refuse_overwrite
from planner.requests.training import Suggest
from planner.search.result import PRELIMINARY, SearchResult
from topology import codec
from topology.errors import UserError


def suggest(asked: Suggest) -> None:
    """Print what `planner suggest` answers, even if saving a plan to `--out` fails."""
    if asked.svg is not None:
        refuse_overwrite(asked.svg, force=asked.force)
    try:
        early = _print_early if sys.stderr.isatty() and not asked.json else None
        found = answers.suggest(asked, output.progress, early)
    finally:
        output.end_progress()
    out, pick = asked.out, asked.pick or 1
    if out is not None and pick > len(found.plans):
        raise UserError(f"--pick {pick}: {len(found.plans)} plans are listed", remedy="--all lists variants too")
    unsaved = None if out is None else output.attempt(lambda: found.save(out, pick=pick, force=asked.force))
    if asked.svg is not None:
        _draw_run(found, asked)
    if asked.json:
        output.emit_json(found.to_dict())
    else:
        _print(found, None if unsaved is not None or out is None else str(out))
    if unsaved is not None:
        raise unsaved


def _draw_run(found: answers.Suggested, asked: Suggest) -> None:
    """Write the picture of a whole run's cost against its days. Raises UserError where no run was asked for."""
    from planner.explain.run_text import tokens_name  # noqa: PLC0415
    from planner.pictures.run_curve import run_curve  # noqa: PLC0415

    if found.run is None or asked.svg is None:
        raise UserError("--svg draws a whole run", why="no tokens were given", remedy="--tokens 2T --gpus 64,128,256")
    runs, model = found.run.curve or (found.run.run,), found.result.question.model.name
    title = f"{model} on {tokens_name(found.run.goal.tokens)} tokens: cost against days"
    text = run_curve(runs, found.run.run.gpus, title=title, unit="in the currency of --gpu-price")
    codec.write_text(asked.svg, text)
    output.warn(f"saved {asked.svg}")


def _print_early(found: SearchResult) -> None:
    if found.search.status == PRELIMINARY:
        from planner.explain.answer_text import answer_sentence  # noqa: PLC0415

        output.early_answer(f"Before simulation: {answer_sentence(found.plans[0])}")


def _print(found: answers.Suggested, out: str | None) -> None:
    # JSON needs neither sentences nor a terminal.
    from planner.explain.answer_text import print_search  # noqa: PLC0415
    from planner.explain.run_text import print_run  # noqa: PLC0415

    print_search(found.result, out=out)
    if found.run:
        print_run(found.run)
