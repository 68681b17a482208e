"""A tuning as one self-contained HTML file: the answer, every trial with its reason, and the posterior of the
finalists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from planner.pictures.palette import BLUE, GREEN
from planner.pictures.svg import MARGIN, Picture, legend, shortened
from planner.runs.report_text import html_table, page
from planner.tune.history import Believed, History, candidate_words
from planner.tune.loop import View
from planner.tune.text import chance_text
from topology.units import GIB

WIDTH, LABEL, ROW, TOP = 960.0, 330.0, 58.0, 92.0


def to_html(view: View, found: History, *, within: float) -> str:
    """Return the page."""
    title = "Tuning"
    best = view.best
    parts = [f"<h1>{title}</h1>"]
    if best is None:
        parts.append("<p>No plan could be measured.</p>")
    else:
        one = view.candidates.plans[best.row]
        predicted = one.estimate.step_s.value
        parts.append(
            f"<p>Best: <b>{escape(candidate_words(one))}</b>, {best.step_s:.4g} s a step, measured;"
            f" predicted {predicted:.4g} s ({predicted / best.step_s - 1:+.1%}) before any trial.</p>"
        )
    parts.append(f"<p>Stopped: {escape(view.reason or 'not yet')}, after {len(view.trials)} trials.</p>")
    if view.outlook.candidate is not None and best is not None:
        parts.append(
            f"<p>{escape(chance_text(view.outlook.probability))} that an untried plan is better by more than"
            f" {within:.1%};"
            f" the likeliest is {escape(candidate_words(view.candidates.plans[view.outlook.candidate]))}.</p>"
        )
    heads = (
        "trial",
        "plan",
        "status",
        "believed s (80% range)",
        "measured s",
        "memory GiB",
        "took s",
        "why, or why it failed",
    )
    parts += ["<h2>Trials</h2>", html_table(heads, _trial_rows(view))]
    parts += ["<h2>What was believed of the finalists</h2>", picture(found)]
    corrections = [
        (one.term, f"{one.factor:.2f}", f"{one.low:.2f} to {one.high:.2f}") for one in view.beliefs.corrections
    ]
    parts += [
        "<h2>What was learned of the terms of a step</h2>",
        "<p>By what their predicted seconds should be multiplied.</p>",
        html_table(("term", "factor", "80% range"), corrections),
    ]
    return page(title, parts)


def _trial_rows(view: View) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for number, trial in enumerate(view.trials, start=1):
        row = view.candidates.row(trial.key)
        value, low, high = trial.predicted_s
        rows.append(
            (
                str(number),
                candidate_words(view.candidates.plans[row]) if row is not None else trial.key,
                trial.status.value,
                f"{value:.4g} ({low:.3g} to {high:.3g})",
                "" if trial.step_s is None else f"{trial.step_s:.4g}",
                "" if trial.reserved_bytes is None else f"{trial.reserved_bytes / GIB:.1f}",
                f"{trial.seconds:.0f}",
                trial.cause or trial.why,
            )
        )
    return rows


def picture(found: History) -> str:
    """Return the posterior of the finalists as an SVG: a row per plan, a bar (80 % range) per number of trials."""
    plans = list(dict.fromkeys(one.plan for one in found.finalists))
    most = max((one.trials for one in found.finalists), default=0)
    about = "Seconds a step, on one logarithmic scale; from left to right after 0, 1, 2, ... trials. Bars hold 80 %."
    drawn = Picture(WIDTH, TOP + ROW * len(plans) + MARGIN, "Finalists, trial by trial", about)
    drawn.write(MARGIN, MARGIN + 30, about, kind="quiet")
    legend(drawn, MARGIN, MARGIN + 52, (("believed", BLUE), ("measured", GREEN)))
    if not plans:
        return drawn.text()
    low = math.log(min(one.low for one in _narrow(found.finalists)))
    high = math.log(max(one.high for one in _narrow(found.finalists)))
    wide = (WIDTH - LABEL - 2 * MARGIN - 90) / (most + 1)
    for place, plan in enumerate(plans):
        y = TOP + ROW * place
        drawn.write(MARGIN, y + ROW / 2 + 4, shortened(plan, LABEL - 12))
        mine = [one for one in found.finalists if one.plan == plan]
        for one in mine:
            x = MARGIN + LABEL + wide * one.trials
            ends = [_height(value, low, high) for value in (one.high, one.value, one.low)]
            fill = BLUE if one.measured_s is None else GREEN
            drawn.box(x, y + ends[0], min(14.0, wide - 2), max(2.0, ends[2] - ends[0]), fill, _words(one))
        last = mine[-1]
        drawn.write(WIDTH - MARGIN - 80, y + ROW / 2 + 4, f"{last.value:.4g} s", kind="quiet")
    return drawn.text()


def _narrow(every: Sequence[Believed]) -> list[Believed]:
    """Return the beliefs that the scale must include: those after the first trial, which sets it on unknown
    machines.
    """
    return [one for one in every if one.trials] or [*every]


def _height(value: float, low: float, high: float) -> float:
    part = (math.log(value) - low) / max(high - low, 1e-9)
    return 4 + (ROW - 8) * (1 - min(1.0, max(0.0, part)))


def _words(one: Believed) -> str:
    measured = "" if one.measured_s is None else f", measured {one.measured_s:.4g} s"
    return f"after {one.trials} trials: {one.value:.4g} s, {one.low:.4g} to {one.high:.4g}{measured}"
