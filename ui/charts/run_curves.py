"""Curves of runs over their steps: one small chart a quantity, one line a run."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from planner.pictures.palette import AXES
from ui.charts.look import Figure, finished, table
from ui.charts.row_types import StepPoint

LABEL_PX = 320  # pixels of a legend's words: what a phone has room for
LINE_PX = 18  # pixels of a line of the legend, which takes its room from the chart


def curve(points: Sequence[StepPoint], title: str, *, dark: bool) -> Figure:
    """Draw a quantity over steps. The lines have a legend where there are several runs."""
    runs = list(dict.fromkeys(point["run"] for point in points))
    hues = list(dict.fromkeys(AXES.values()))
    colours = alt.Scale(domain=runs, range=[hues[i % len(hues)] for i in range(len(runs))])
    legend = alt.Legend(columns=1, labelLimit=LABEL_PX) if len(runs) > 1 else None
    base = alt.Chart(table(points)).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(format="d", tickMinStep=1), scale=alt.Scale(nice=False)),
        y=alt.Y("value:Q", title=title, scale=alt.Scale(zero=False)),
        color=alt.Color("run:N", title=None, scale=colours, legend=legend),
        tooltip=[alt.Tooltip("run:N"), alt.Tooltip("step:Q"), alt.Tooltip("value:Q", title=title, format=".4~r")],
    )
    drawn = alt.layer(base.mark_line(strokeWidth=2), base.mark_point(filled=True, size=30, opacity=1))
    return finished(drawn, dark, height=160 + (LINE_PX * len(runs) if legend else 0))
