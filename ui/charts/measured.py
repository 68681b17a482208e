"""Charts of measurements: errors of predictions and their ranges, and the beliefs of a tuning after each trial."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from planner.pictures.palette import BLUE, GOOD, GREEN, GREY, VERMILION
from planner.tune.history import Believed, History
from ui.charts.look import Figure, finished, paper, table
from ui.charts.row_types import ComparedRow

INTERVALS = {"inside the 80 % range": GOOD, "outside": VERMILION, "no range": GREY}


def against(rows: Sequence[ComparedRow], *, unit: str, dark: bool) -> Figure:
    """Draw predicted over measured on equal logarithmic axes.

    Rows: id, source, predicted, measured, error, interval.
    """
    p = paper(dark)
    values = [{**row, "text": f"{row['error']:+.1%}"} for row in rows]
    every = [v for row in rows for v in (row["predicted"], row["measured"])]
    domain = [min(every) * 0.8, max(every) * 1.25] if every else [0.1, 10]
    axis = alt.Scale(type="log", domain=domain, nice=False)
    points = (
        alt.Chart(table(values))
        .mark_point(filled=True, size=48, opacity=0.75)
        .encode(
            x=alt.X("measured:Q", title=f"measured, {unit}", scale=axis, axis=alt.Axis(tickCount=6, format="~g")),
            y=alt.Y("predicted:Q", title=f"predicted, {unit}", scale=axis, axis=alt.Axis(tickCount=6, format="~g")),
            color=alt.Color(
                "interval:N", title=None, scale=alt.Scale(domain=list(INTERVALS), range=list(INTERVALS.values()))
            ),
            tooltip=[
                "id:N",
                "source:N",
                alt.Tooltip("measured:Q", format=".4~r"),
                alt.Tooltip("predicted:Q", format=".4~r"),
                alt.Tooltip("text:N", title="error"),
            ],
        )
    )
    equal = (
        alt.Chart(table([{"x": domain[0], "y": domain[0]}, {"x": domain[1], "y": domain[1]}]))
        .mark_line(color=p.quiet, strokeDash=[4, 3], strokeWidth=1)
        .encode(x=alt.X("x:Q", scale=axis), y=alt.Y("y:Q", scale=axis))
    )
    return finished(alt.layer(equal, points), dark, height=400)


def errors(rows: Sequence[ComparedRow], *, dark: bool) -> Figure:
    """Draw signed errors, one row of ticks per source, with the median. Rows: source, error, id, interval."""
    p = paper(dark)
    values = [
        {**row, "percent": max(-60.0, min(60.0, 100 * row["error"])), "text": f"{row['error']:+.1%}"} for row in rows
    ]
    sources = list(dict.fromkeys(row["source"] for row in rows))
    y = alt.Y("source:N", sort=sources, title=None, axis=alt.Axis(labelLimit=330, domain=False, ticks=False))
    x = alt.X("percent:Q", title="predicted less measured, %", scale=alt.Scale(domain=[-60, 60], nice=False))
    base = alt.Chart(table(values)).encode(x=x, y=y)
    ticks = base.mark_tick(thickness=1.6, size=18, opacity=0.7).encode(
        color=alt.Color(
            "interval:N",
            title=None,
            scale=alt.Scale(domain=list(INTERVALS), range=list(INTERVALS.values())),
            legend=None,
        ),
        tooltip=["id:N", alt.Tooltip("text:N", title="error")],
    )
    middle = base.mark_point(shape="diamond", size=90, filled=True, color=p.ink).encode(x=alt.X("median(percent):Q"))
    zero = alt.Chart(table([{"percent": 0}])).mark_rule(color=p.quiet, strokeDash=[4, 3]).encode(x=alt.X("percent:Q"))
    return finished(alt.layer(zero, ticks, middle), dark, height=34 * max(1, len(sources)) + 40)


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
