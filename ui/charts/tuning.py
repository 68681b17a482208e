"""Charts of a tuning: beliefs about the finalists after each trial, and the probability that a better plan is left."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from planner.pictures.palette import BLUE, GREEN
from planner.tune.history import Believed, History
from ui.charts.look import Figure, finished, paper, table


def posterior(found: History, *, dark: bool) -> dict[str, Figure]:
    """Draw a chart for each plan, with its number and name: the middle and the 80 % range of its step over the number
    of trials, and a point once it was measured. All have the same scales.
    """
    ends = [end for one in found.finalists for end in (one.low, one.high, one.measured_s) if end]
    scale = alt.Scale(type="log", zero=False, nice=False, domain=[min(ends), max(ends)] if ends else [0.1, 1])
    plans = dict.fromkeys(one.plan for one in found.finalists)
    return {
        f"{number}. {plan}": _believed([one for one in found.finalists if one.plan == plan], scale, dark=dark)
        for number, plan in enumerate(plans, start=1)
    }


def _believed(steps: Sequence[Believed], scale: alt.Scale, *, dark: bool) -> Figure:
    values = [
        {"trials": one.trials, "value": one.value, "low": one.low, "high": one.high, "measured": one.measured_s}
        for one in steps
    ]
    base = alt.Chart(table(values)).encode(
        x=alt.X("trials:Q", title="trials", axis=alt.Axis(tickMinStep=1, format="d"))
    )
    tooltip = [
        alt.Tooltip("trials:Q"),
        alt.Tooltip("value:Q", title="believed, s", format=".4~r"),
        alt.Tooltip("low:Q", title="80% from, s", format=".4~r"),
        alt.Tooltip("high:Q", title="80% to, s", format=".4~r"),
    ]
    band = base.mark_area(opacity=0.25, color=BLUE).encode(
        y=alt.Y("low:Q", scale=scale, title="s a step"), y2=alt.Y2("high:Q"), tooltip=tooltip
    )
    middle = base.mark_line(color=BLUE, strokeWidth=2).encode(y=alt.Y("value:Q", scale=scale), tooltip=tooltip)
    measured = (
        base.transform_filter("datum.measured != null")
        .mark_point(filled=True, size=42, color=GREEN, opacity=1)
        .encode(
            y=alt.Y("measured:Q", scale=scale), tooltip=[alt.Tooltip("measured:Q", title="measured, s", format=".4~r")]
        )
    )
    return finished(alt.layer(band, middle, measured), dark, height=170)


def better_left(chances: Sequence[float], *, dark: bool) -> Figure:
    """Draw the probability that a better plan is left over the number of trials, and where a tuning stops."""
    values = [{"trials": trials, "chance": 100 * chance} for trials, chance in enumerate(chances)]
    line = (
        alt.Chart(table(values))
        .mark_line(point=True, color=BLUE)
        .encode(
            x=alt.X("trials:Q", title="trials", axis=alt.Axis(tickMinStep=1, format="d")),
            y=alt.Y("chance:Q", title="a better plan is left, %", scale=alt.Scale(domain=[0, 100])),
            tooltip=[alt.Tooltip("trials:Q"), alt.Tooltip("chance:Q", format=".1f")],
        )
    )
    stop = (
        alt.Chart(table([{"chance": 5}]))
        .mark_rule(color=paper(dark).quiet, strokeDash=[4, 3])
        .encode(y=alt.Y("chance:Q"))
    )
    return finished(alt.layer(line, stop), dark, height=220)
