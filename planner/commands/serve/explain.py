"""`planner explain --task serve`: where a deployment's time goes, why others lost, where another would win."""

from __future__ import annotations

from typing import Any

from click.exceptions import Exit

from planner.answers.serve.estimate import serving_flags
from planner.io import output
from planner.question.flags import flags_of_question, gpu_counts
from planner.requests.flag import values_of
from planner.requests.training import Explain
from planner.search.flips import knobs_of
from planner.serving import explain_serving, load_serving, serving_question, with_serving_flags
from planner.serving.reports.documents import explanation_document
from planner.serving.reports.plan_text import print_explained


def explain(asked: Explain) -> None:
    """Print the explanation of a saved plan, or of the best one of the question that flags ask."""
    others = {
        "framework": asked.framework,
        "id": asked.case_id,
        "memory": asked.memory,
        "observed_peak": asked.observed_peak,
        "svg": asked.svg,
        "time_limit": asked.time_limit,
    }
    name: dict[str, Any] = {"name": asked.framework} if asked.file else {}
    counts = gpu_counts(asked.gpus)
    stated = flags_of_question(asked, cluster=asked.cluster, gpu=asked.gpu, gpus=counts, **name)
    serving = values_of(asked.load, asked.engine)
    flags = serving_flags(stated, serving, others, profile=asked.profile, strict=asked.strict)
    plan = asked.file
    if plan is None:
        question, chosen = serving_question(flags), None
    else:
        question, chosen, _ = with_serving_flags(load_serving(plan), flags)
    links = {knob.quantity: (knob.now(question.cluster), knob.scale) for knob in knobs_of(question.cluster)}
    try:
        found = explain_serving(
            question, chosen, links=links, top=asked.top, sweep=asked.flips, progress=output.progress
        )
    finally:
        output.end_progress()
    if asked.json:
        output.emit_json(explanation_document("" if plan is None else str(plan), found))
    else:
        print_explained(found)
    if found.answer.problems:
        raise Exit(3)
