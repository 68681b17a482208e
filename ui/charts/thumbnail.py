"""A small picture of a simulated step: the activity of each lane over time, with a link to the whole timeline."""

from __future__ import annotations

import altair as alt

from planner.io.figures import seconds_text
from ui.charts.look import Figure, finished, table, tips
from ui.charts.timeline import COLOURS, KINDS, Timeline, bars

MOST_BARS = 600
LANES = ("compute", "communication")
MOST_RANKS = 4
LANE_PX = 18


def shown_ranks(line: Timeline) -> tuple[int, ...]:
    """Return the ranks that are drawn: the first, the last, and some between them."""
    ranks, most = line.ranks, min(MOST_RANKS, len(line.ranks))
    return tuple(ranks[round(i * (len(ranks) - 1) / max(1, most - 1))] for i in range(most))


def thumbnail(line: Timeline, *, last_s: float, dark: bool) -> Figure:
    """Draw the lanes of some ranks. `last_s` is the place value of the last significant digit of a step."""
    ranks = shown_ranks(line)
    found = bars(line, window=(0.0, line.length_s), lanes=set(LANES), ranks=set(ranks), most=MOST_BARS)
    rows = [
        {
            "lane": f"rank {bar.rank} {bar.lane}",
            "from": bar.start_s,
            "to": bar.end_s,
            "kind": bar.kind,
            "words": f"{bar.name}, {seconds_text(bar.busy_s, min(last_s, bar.busy_s / 10 or last_s))}",
        }
        for bar in found
    ]
    lanes = [f"rank {rank} {lane}" for rank in ranks for lane in LANES]
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    colours = alt.Scale(domain=kinds, range=[COLOURS[kind] for kind in kinds])
    drawn = (
        alt.Chart(table(rows))
        .mark_bar(height=LANE_PX - 4)
        .encode(
            x=alt.X("from:Q", title="seconds of a step", scale=alt.Scale(domain=[0, line.length_s], nice=False)),
            x2=alt.X2("to:Q"),
            y=alt.Y("lane:N", sort=lanes, title=None, axis=alt.Axis(domain=False, ticks=False, labelLimit=190)),
            color=alt.Color("kind:N", title=None, scale=colours, legend=alt.Legend(columns=2)),
            tooltip=tips({"lane": "", "kind": "", "words": "what"}),
        )
    )
    return finished(drawn, dark, height=alt.Step(LANE_PX))
