"""Charts of serving: where the time of a token goes, and the rate of a user against the throughput of a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from planner.pictures.palette import BLUE
from planner.pictures.pareto import colours
from planner.serving.reports.plan_text import words
from topology.units import two_digits
from ui.charts.look import Figure, finished, paper, picked, table, tips

LABEL_PX = 90  # pixels of the words next to a bar


def parts(seconds: Mapping[str, float], *, dark: bool) -> Figure:
    """Draw parts of a time as bars, the longest first, each with its milliseconds and share."""
    p = paper(dark)
    whole = sum(seconds.values()) or 1.0
    values = [
        {"part": words(name), "ms": 1e3 * value, "text": f"{two_digits(1e3 * value)} ms, {value / whole:.0%}"}
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])
        if value >= 0.005 * whole
    ]
    top = 1e3 * max(seconds.values()) if values else 1.0
    base = alt.Chart(table(values)).encode(
        y=alt.Y("part:N", sort=None, title=None, axis=alt.Axis(domain=False, ticks=False, labelLimit=260)),
        x=alt.X(
            "ms:Q",
            title="ms",
            scale=alt.Scale(
                domainMin=0, domainMax=alt.ExprRef(f"{top} * max(width, 130) / max(width - {LABEL_PX}, 40)"), nice=False
            ),
        ),
    )
    bars = base.mark_bar(color=BLUE, height=18, cornerRadiusEnd=3)
    text = base.mark_text(align="left", dx=6, fontSize=12, color=p.ink).encode(text=alt.Text("text:N"))
    return finished(alt.layer(bars, text), dark, height=28 * max(1, len(values)) + 30)


def pareto(rows: Sequence[Mapping[str, Any]], y_title: str, chosen: str, *, log: bool, dark: bool) -> Figure:
    """Draw points with a line per engine through its points that no other of its points beats, and a ring around the
    chosen one.

    Rows have `plan` (a name), `engine`, `user` and `value` (numbers), `first` (whether it is on the line), and `words`.
    """
    p = paper(dark)
    values = [dict(row) for row in rows]
    engines = list(dict.fromkeys(row["engine"] for row in values))
    colour = alt.Color("engine:N", title=None, scale=alt.Scale(domain=engines, range=list(colours(engines).values())))
    y = alt.Y("value:Q", title=y_title, scale=alt.Scale(type="log" if log else "linear", nice=True, padding=8))
    base = alt.Chart(table(values)).encode(x=alt.X("user:Q", title="tokens/s a user"), y=y)
    line = (
        alt.Chart(table([row for row in values if row["first"]]))
        .mark_line(strokeWidth=2, opacity=0.7)
        .encode(x=alt.X("user:Q"), y=y, color=colour, order=alt.Order("user:Q"))
    )
    points = base.mark_point(filled=True, opacity=0.9, stroke=p.page, strokeWidth=1).encode(
        color=colour,
        size=alt.condition("datum.first", alt.value(90), alt.value(24)),
        tooltip=tips({"words": "deployment"}),
    )
    ring = base.mark_point(size=260, strokeWidth=2, color=p.ink).transform_filter(
        alt.FieldOneOfPredicate(field="plan", oneOf=[chosen])
    )
    return finished(alt.layer(line, points.add_params(picked()), ring), dark, height=330)
