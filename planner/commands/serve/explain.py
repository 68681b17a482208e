"""`planner explain --task serve`: where a deployment's time goes, why others lost, where another would win."""

from __future__ import annotations

from pathlib import Path

import typer

from planner.io import output
from planner.search.flips import KNOBS
from planner.serving import (
    Links,
    ServingFlags,
    explain_serving,
    explanation_document,
    load_serving,
    print_explained,
    serving_question,
    with_serving_flags,
)
from topology.cluster import Cluster


def explain_serving_plan(flags: ServingFlags, *, plan: str | Path | None, top: int, sweep: bool, json: bool) -> None:
    """Print the explanation of a saved plan, or of the best one of the question that flags ask."""
    if plan is None:
        question, chosen = serving_question(flags), None
    else:
        question, chosen, _ = with_serving_flags(load_serving(plan), flags)
    try:
        found = explain_serving(
            question, chosen, links=_links(question.cluster), top=top, sweep=sweep, progress=output.progress
        )
    finally:
        output.end_progress()
    if json:
        output.emit_json(explanation_document("" if plan is None else str(plan), found))
    else:
        print_explained(found)
    if found.answer.problems:
        raise typer.Exit(3)


def _links(cluster: Cluster) -> Links:
    """Return the rates of links that can be varied, by name, and how."""
    known = {knob.quantity: (knob.now(cluster), knob.scale) for knob in KNOBS}
    return {
        name: (now, scale)
        for name, (now, scale) in known.items()
        if now > 0 and not (name.startswith("network") and cluster.node_count == 1)
    }
