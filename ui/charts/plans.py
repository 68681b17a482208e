"""Charts of several plans: time against memory with the Pareto front, rejected candidates, step over link rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt

from planner.io.figures import gib_text
from planner.pictures.palette import BAD, GOOD, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from topology.units import GIB
from ui.charts.look import Figure, finished, paper, picked, table, tips
from ui.charts.row_types import PlanRow, RatePoint

PLAN = {"chips": "plan", "policy": "settings"}  # fields that tell a plan, with their titles


def front(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Return the rows that no other beats in both step time and memory, by time."""
    best: list[PlanRow] = []
    for row in sorted(rows, key=lambda row: (row["step_s"], row["peak_gib"])):
        if not best or row["peak_gib"] < best[-1]["peak_gib"]:
            best.append(row)
    return best


def scatter(rows: Sequence[PlanRow], *, limit_gib: float, chosen: str | None, dark: bool) -> Figure:
    """Draw step time against memory, with the Pareto front, the GPU's capacity and a ring around the chosen plan."""
    p = paper(dark)
    on_front = {row["plan"] for row in front(rows)}
    values = [{**row, "place": "on the front" if row["plan"] in on_front else "beaten in both"} for row in rows]
    times = [row["step_s"] for row in rows] or [1.0]
    memory_gib = [row["peak_gib"] for row in rows]
    x = alt.X(
        "step_s:Q",
        title="step time, s",
        scale=alt.Scale(domain=[min(times) * 0.985, max(times) * 1.015], nice=False, zero=False),
        axis=alt.Axis(labelBound=True),  # no label is cut off at the edge
    )
    y = alt.Y(
        "peak_gib:Q",
        title="memory on the worst rank, GiB",
        scale=alt.Scale(
            domain=[max(0.0, min([*memory_gib, limit_gib]) - 0.1 * limit_gib), 1.05 * max([*memory_gib, limit_gib])],
            nice=False,
            zero=False,
        ),
    )
    shown = {"memory": "", "fits": "", "tokens": "tokens/s per GPU", "mfu": "MFU"}
    tooltip = tips({"rank:O": "#", **PLAN, "step": "step", "range": "80 % range", **shown})
    base = alt.Chart(table(values)).encode(x=x, y=y)
    line = (
        alt.Chart(table(front(rows)))
        .mark_line(interpolate="step-after", color=GOOD, strokeWidth=1.5, opacity=0.6)
        .encode(x=x, y=y)
    )
    points = base.mark_point(filled=True, size=110, opacity=0.95, stroke=p.page, strokeWidth=1).encode(
        color=alt.Color(
            "place:N", title=None, scale=alt.Scale(domain=["on the front", "beaten in both"], range=[GOOD, GREY])
        ),
        tooltip=tooltip,
    )
    named = alt.FieldOneOfPredicate(field="place", oneOf=["on the front"])
    numbers = base.mark_text(dy=17, fontSize=11, color=p.quiet).encode(text=alt.Text("rank:Q")).transform_filter(named)
    points = points.add_params(picked())
    ring = base.mark_point(size=320, strokeWidth=2.5, color=ORANGE).transform_filter(alt.datum.plan == (chosen or ""))
    there_is = f"{gib_text(limit_gib * GIB)} GiB available to a rank"
    capacity_rule = alt.Chart(table([{"limit": limit_gib, "text": there_is}]))
    limit = capacity_rule.mark_rule(color=BAD, strokeDash=[5, 4], strokeWidth=1.4).encode(y=alt.Y("limit:Q"))
    label = capacity_rule.mark_text(align="right", dx=-6, dy=-7, color=p.quiet, fontSize=11).encode(
        y=alt.Y("limit:Q"), x=alt.value("width"), text=alt.Text("text:N")
    )
    return finished(alt.layer(line, limit, label, points, numbers, ring), dark, height=380)


def ranges(rows: Sequence[PlanRow], *, chosen: Sequence[str], dark: bool) -> Figure:
    """Draw each plan's step as a mark on the bar of its range; plans that may not fit are hollow, the chosen ringed."""
    p = paper(dark)
    values = [{**row, "sure to fit": "surely fits" if row["sure"] else "may not fit"} for row in rows]
    low, high = min(row["low_s"] for row in rows), max(row["high_s"] for row in rows)
    margin = 0.04 * (high - low) or 0.04 * high
    base = alt.Chart(table(values)).encode(
        y=alt.Y("label:N", sort=None, title=None, axis=alt.Axis(domain=False, ticks=False, labelLimit=190)),
        tooltip=tips({**PLAN, "step": "", "range": "80 % range", "fits": ""}),
    )
    x = alt.X(
        "low_s:Q",
        title="step time, s",
        scale=alt.Scale(domain=[max(0.0, low - margin), high + margin], nice=False, zero=False),
    )
    bars = base.mark_bar(height=9, cornerRadius=4, color=GOOD, opacity=0.5 if dark else 0.35).encode(
        x=x, x2=alt.X2("high_s:Q")
    )
    mark = SKY if dark else GOOD
    marks = base.mark_point(size=90, strokeWidth=2, color=mark, filled=False).encode(
        x=alt.X("step_s:Q"),
        fill=alt.condition("datum.sure", alt.value(mark), alt.value(p.page)),
        shape=alt.Shape(
            "sure to fit:N",
            title=None,
            scale=alt.Scale(domain=["surely fits", "may not fit"], range=["circle", "diamond"]),
        ),
    )
    ring = (
        base.mark_point(size=260, strokeWidth=2.5, color=ORANGE)
        .encode(x=alt.X("step_s:Q"))
        .transform_filter(alt.FieldOneOfPredicate(field="plan", oneOf=list(chosen)))
    )
    return finished(alt.layer(bars, ring, marks.add_params(picked())), dark, height=alt.Step(30))


def counts(rows: Mapping[str, int], *, dark: bool) -> Figure:
    """Draw how many candidates each rule rejected, the most first, on a logarithmic axis."""
    p = paper(dark)
    values = [{"rule": rule, "count": count, "text": f"{count:,}"} for rule, count in rows.items() if count]
    top = max((*rows.values(), 1))
    ticks = [10**power for power in range(len(str(top)) + 1) if 10**power <= top * 2]
    base = alt.Chart(table(values)).encode(
        y=alt.Y("rule:N", sort=None, title=None, axis=None),
        tooltip=tips({"rule": "reason", "text": "candidates"}),
    )
    x = alt.X(
        "count:Q",
        scale=alt.Scale(type="log", domain=[0.7, top * 3], nice=False),
        title="candidates (logarithmic)",
        axis=alt.Axis(values=ticks, format=","),
    )
    # Reasons stand above their bars: next to them, they would leave a phone no room for bars.
    why = base.mark_text(align="left", baseline="bottom", dy=-2, color=p.ink, fontSize=12).encode(
        x=alt.value(0), text=alt.Text("rule:N")
    )
    bars = base.mark_bar(color=PURPLE, height=12, yOffset=7, cornerRadiusEnd=3).encode(x=x, x2=alt.datum(0.7))
    text = base.mark_text(align="left", dx=5, dy=7, color=p.quiet, fontSize=12).encode(x=x, text=alt.Text("text:N"))
    return finished(alt.layer(why, bars, text), dark, height=alt.Step(38))


COLOURS = (GOOD, VERMILION, GREEN, PURPLE)


def sensitivity(
    rows: Sequence[RatePoint], *, quantity: str, now: float, flip: tuple[float, str] | None, dark: bool
) -> Figure:
    """Draw step time over a link rate (bytes/s), one line per plan, with the present rate and the flip point: where it
    is, and its words.
    """
    p = paper(dark)
    names = list(dict.fromkeys(row["plan"] for row in rows))
    values = [{**row, "gb": row["rate"] / 1e9} for row in rows]
    x = alt.X("gb:Q", title=f"{quantity}, GB/s one way", scale=alt.Scale(type="log", nice=False))
    lines = (
        alt.Chart(table(values))
        .mark_line(strokeWidth=2.5)
        .encode(
            x=x,
            y=alt.Y("step_s:Q", title="step time, s", scale=alt.Scale(zero=False)),
            color=alt.Color(
                "plan:N",
                title=None,
                scale=alt.Scale(domain=names, range=[COLOURS[i % len(COLOURS)] for i in range(len(names))]),
                legend=alt.Legend(
                    labelLimit=420, orient="top", direction="vertical", symbolType="stroke", symbolStrokeWidth=4
                ),
            ),
            tooltip=[
                "plan:N",
                alt.Tooltip("gb:Q", format=".3~r", title="GB/s"),
                alt.Tooltip("step_s:Q", format=".4~r", title="step, s"),
            ],
        )
    )
    marks = [{"gb": now / 1e9, "text": f"now {now / 1e9:.3g}"}]
    marks += [{"gb": flip[0] / 1e9, "text": flip[1]}] if flip else []
    rules = alt.Chart(table(marks)).mark_rule(color=p.quiet, strokeDash=[4, 3]).encode(x=x)
    label = (
        alt.Chart(table(marks))
        .mark_text(align="left", dx=5, fontSize=11, color=p.quiet, baseline="top")
        .encode(x=x, y=alt.value(4), text=alt.Text("text:N"))
    )
    return finished(alt.layer(rules, lines, label), dark, height=300)
