"""The chart of where the time of a token, or of the first one, goes."""

from __future__ import annotations

from collections.abc import Mapping

import altair as alt

from planner.pictures.palette import BLUE
from planner.serving.reports.plan_text import words
from topology.units import two_digits
from ui.charts.look import Figure, finished, paper

LABEL_PX = 90  # of the words next to a bar


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
    base = alt.Chart(alt.Data(values=values)).encode(
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
    text = base.mark_text(align="left", dx=6, fontSize=12, color=p.ink).encode(text="text:N")
    return finished(alt.layer(bars, text).properties(height=28 * max(1, len(values)) + 30), dark)
