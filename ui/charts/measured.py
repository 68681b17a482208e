"""Charts of predicted against measured values: errors, and whether the measured value is inside the range."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from planner.pictures.palette import GOOD, GREY, VERMILION
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
