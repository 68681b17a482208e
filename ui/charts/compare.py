"""The chart of the differences of two plans, term by term."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from planner.pictures.palette import GOOD, VERMILION
from ui.charts.look import Figure, finished, paper, table, tips
from ui.charts.row_types import TermRow

LABEL_PX = 62  # pixels of the words next to a bar


def differences(rows: Sequence[TermRow], *, unit: str, dark: bool) -> Figure:
    """Draw terms to the right of zero where the second plan has more, to the left where it has less.

    Rows: name, delta, text.
    """
    p = paper(dark)
    # Also on a phone there is room for the words next to the longest bar.
    most = max((abs(row["delta"]) for row in rows), default=1.0)
    reach = f"{most} * max(width, 130) / max(width - {2 * LABEL_PX}, 50)"
    base = alt.Chart(table(rows)).encode(
        y=alt.Y("name:N", sort=None, title=None, axis=alt.Axis(domain=False, ticks=False, labelLimit=240)),
        x=alt.X(
            "delta:Q",
            title=unit,
            scale=alt.Scale(domainMin=alt.ExprRef(f"-({reach})"), domainMax=alt.ExprRef(reach), nice=False),
        ),
        tooltip=tips({"name": "", "text": "difference"}),
    )
    more = alt.condition("datum.delta > 0", alt.value(VERMILION), alt.value(GOOD))
    bars = base.mark_bar(height=18, cornerRadius=2).encode(color=more)
    right = (
        base.transform_filter("datum.delta > 0")
        .mark_text(align="left", dx=5, fontSize=12, color=p.ink)
        .encode(text=alt.Text("text:N"))
    )
    left = (
        base.transform_filter("datum.delta <= 0")
        .mark_text(align="right", dx=-5, fontSize=12, color=p.ink)
        .encode(text=alt.Text("text:N"))
    )
    zero = alt.Chart(table([{"delta": 0}])).mark_rule(color=p.quiet).encode(x=alt.X("delta:Q"))
    return finished(alt.layer(zero, bars, right, left), dark, height=30 * max(1, len(rows)) + 40)
