"""The chart of a model's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from planner.pictures.palette import BLUE
from ui.charts.look import Figure, finished, paper, table
from ui.charts.row_types import PartRow


def parameters(rows: Sequence[PartRow], *, dark: bool) -> Figure:
    """Draw parameters by part, each bar labelled with its count and share."""
    p = paper(dark)
    total = sum(row["parameters"] for row in rows) or 1
    values = [
        {**row, "text": f"{_count(row['parameters'])}  {row['parameters'] / total:.1%}", "b": row["parameters"] / 1e9}
        for row in rows
    ]
    top = max((row["parameters"] / 1e9 for row in rows), default=1.0)
    base = alt.Chart(table(values)).encode(
        y=alt.Y("part:N", sort=None, title=None, axis=alt.Axis(domain=False, ticks=False, labelLimit=200)),
        x=alt.X("b:Q", title="billion parameters", scale=alt.Scale(domain=[0, top * 1.2], nice=False)),
    )
    bars = base.mark_bar(color=BLUE, height=22, cornerRadiusEnd=3)
    text = base.mark_text(align="left", dx=6, fontSize=12, color=p.ink).encode(text=alt.Text("text:N"))
    return finished(alt.layer(bars, text), dark, height=36 * max(1, len(values)) + 30)


def _count(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"
