"""`planner estimate`: what one plan costs, from a case file, a saved plan, or flags."""

from __future__ import annotations

from collections.abc import Iterable

from click.exceptions import Exit

from planner.answers import estimate as answers
from planner.answers.estimate import Estimated, Unreadable
from planner.explain.plan_answer import PlanAnswer
from planner.io import output
from planner.io.printable import printable
from planner.requests.training import Estimate


def estimate(asked: Estimate) -> None:
    """Print what `planner estimate` answers."""
    try:
        found, out = answers.estimate(asked, output.progress), asked.out
    finally:
        output.end_progress()
    if not isinstance(found, Estimated):
        _print_list(found, json=asked.json)
        return
    unsaved = None
    if out is not None and found.legal:
        unsaved = output.attempt(lambda: found.save(out, force=asked.force))
    if asked.json:
        output.emit_json(found.to_dict())
    else:
        _print(found.found)
    if unsaved is not None:
        raise unsaved
    if not found.legal:
        if out is not None:
            output.warn(f"{out} is not written: the plan is not legal")
        raise Exit(3)
    if out is not None and not asked.json:
        print(printable(f"saved {out}"))


def _print_list(found: Iterable[Estimated | Unreadable], *, json: bool) -> None:
    """Print the answers to the cases of a list. Raises Exit(3) if none is legal."""
    answered: list[Estimated | Unreadable] = []
    for one in found:
        if not json and isinstance(one, Estimated):
            if answered:
                print()
            _print(one.found)
        answered.append(one)
    if json:
        output.emit_json([one.to_dict() for one in answered])
    if answered and not any(one.legal for one in answered):
        raise Exit(3)


def _print(found: PlanAnswer) -> None:
    # JSON needs no module for text or terminals.
    from planner.explain.answer_text import print_estimate  # noqa: PLC0415

    print_estimate(found)
