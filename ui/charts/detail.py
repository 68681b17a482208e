"""Charts of one plan: memory by stage and category, the waterfall of the step, timelines, memory over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from planner.io.figures import gib_text, seconds_text
from planner.pictures.palette import BAD, GREY, MEMORY, SPANS, TIME
from ui.charts.look import GIB, finished, ink_on, paper, scale, seconds, words
from ui.charts.timeline import LANES, Bar


def memory(
    stages: Sequence[Mapping[str, float]], capacity: float, *, dark: bool, names: Sequence[str] = ()
) -> alt.LayerChart:
    """Draw bytes by category, one bar per pipeline stage up to what the allocator reserves, and the capacity.

    `stages` has one entry per stage (`planner.pictures.memory.stage_parts`); `capacity` is that of one GPU, in bytes.
    The bars of anything else than stages have `names`.
    """
    labels = names or ([f"stage {i}" for i in range(len(stages))] if len(stages) > 1 else ["every rank"])
    p = paper(dark)
    values = [
        {
            "stage": labels[stage],
            "number": stage,
            "category": words(name),
            "order": order,
            "gib": nbytes / GIB,
            "text": f"{gib_text(nbytes)} GiB",
        }
        for stage, parts in enumerate(stages)
        for order, (name, nbytes) in enumerate(parts.items())
        if nbytes > 0.005 * GIB
    ]
    parts_shown = _in_order(values, "category", [words(n) for n in MEMORY])
    widest = max([capacity / GIB, *(sum(v["gib"] for v in values if v["number"] == s) for s in range(len(stages)))])
    x = alt.X("gib:Q", title="GiB on one GPU", scale=alt.Scale(domain=[0, widest * 1.04], nice=False), stack="zero")
    y = alt.Y(
        "stage:N", title=None, sort=alt.SortField("number"), axis=alt.Axis(domain=False, ticks=False, labelLimit=190)
    )
    bars = (
        alt.Chart(alt.Data(values=values))
        .mark_bar(stroke=p.page, strokeWidth=1)
        .encode(
            x=x,
            y=y,
            color=alt.Color(
                "category:N",
                title=None,
                scale=scale("memory", parts_shown),
                sort=parts_shown,
                legend=alt.Legend(columns=2, orient="bottom"),  # clear of the capacity's label, on a phone too
            ),
            order="order:Q",
            tooltip=["stage:N", "category:N", alt.Tooltip("text:N", title="size")],
        )
    )
    capacity_rule = alt.Chart(alt.Data(values=[{"gib": capacity / GIB, "text": f"{gib_text(capacity)} GiB available"}]))
    rule = capacity_rule.mark_rule(color=BAD, strokeDash=[5, 4], strokeWidth=1.5).encode(x="gib:Q")
    label = capacity_rule.mark_text(align="right", dx=-5, color=p.quiet, fontSize=11, baseline="top").encode(
        x="gib:Q", y=alt.value(-14), text="text:N"
    )
    row = 34 if len(stages) <= 16 else 13
    return finished(alt.layer(bars, rule, label).properties(height=row * len(stages) + 150), dark)


def waterfall(rows: Sequence[Mapping[str, Any]], *, last_s: float, dark: bool) -> alt.LayerChart:
    """Draw how a step's time builds up from the model's FLOPs at peak. Rows, in order: name, seconds, share, meaning,
    colour; the last has `total` and starts at zero again. `last_s` is the place of the last digit that is known.
    """
    p = paper(dark)
    values = []
    at = 0.0
    for row in rows:
        key = str(row["name"])
        values.append(
            {
                "name": key,
                "from": at if not row.get("total") else 0.0,
                "to": at + row["seconds"] if not row.get("total") else row["seconds"],
                "text": _term_text(row["seconds"], row["share"], last_s),
                "meaning": row["meaning"],
                "colour": (colour := str(p.quiet if row.get("total") else row["colour"])),
                "on": ink_on(colour),
            }
        )
        at += 0.0 if row.get("total") else row["seconds"]
    top = max((v["to"] for v in values), default=1.0)
    y = alt.Y("name:N", sort=None, title=None, axis=alt.Axis(labelLimit=240, domain=False, ticks=False, labelPadding=8))
    x = alt.X("from:Q", title="seconds of a step", scale=alt.Scale(domain=[0, top * 1.04], nice=False))
    base = alt.Chart(alt.Data(values=values)).encode(
        y=y, tooltip=["name:N", alt.Tooltip("text:N", title="takes"), alt.Tooltip("meaning:N", title="what it is")]
    )
    bars = base.mark_bar(height=20, cornerRadius=2).encode(x=x, x2="to:Q", color=alt.Color("colour:N", scale=None))
    # Where there is room on a narrow page: behind short bars, before those that end far right, inside the longest.
    behind = base.mark_text(align="left", dx=6, fontSize=12, color=p.ink).encode(x="to:Q", text="text:N")
    before = base.mark_text(align="right", dx=-6, fontSize=12, color=p.ink).encode(x="from:Q", text="text:N")
    inside = base.mark_text(align="right", dx=-6, fontSize=12).encode(
        x="to:Q", text="text:N", color=alt.Color("on:N", scale=None)
    )
    far = top / 2
    texts = (
        behind.transform_filter(alt.datum.to <= far),
        before.transform_filter((alt.datum.to > far) & (alt.datum["from"] > far / 2)),
        inside.transform_filter((alt.datum.to > far) & (alt.datum["from"] <= far / 2)),
    )
    return finished(alt.layer(bars, *texts).properties(height=30 * len(values) + 30), dark)


def _term_text(value_s: float, share: float, last_s: float) -> str:
    if abs(value_s) < last_s / 2:
        return f"under {seconds_text(last_s, last_s)}"
    return f"{seconds_text(value_s, last_s)}  {share:.0%}"


def _lighter(colour: str) -> str:
    """Return a colour halfway to white, which tells the forward from the backward pass."""
    return "#" + "".join(f"{(int(colour[i : i + 2], 16) + 255) // 2:02X}" for i in (1, 3, 5))


_COLOURS = {
    "forward": _lighter(SPANS["compute"]),
    "backward": SPANS["compute"],
    "recompute": TIME["recompute"],
    "copies": SPANS["copy"],
    "optimizer": TIME["optimizer"],
    "communication": SPANS["communication"],
    "wait": GREY,
    "host": SPANS["host"],
}
_STRENGTH = {"wait": 0.5}
FEW_BARS = 400  # with more, an edge would cover them


def lane_px(lanes: int) -> int:
    """Return the height of one lane in pixels: a label fits beside each of up to 60, and all fit about two screens."""
    return max(8, min(34, 1080 // max(1, lanes)))


def timeline(bars: Sequence[Bar], *, window: tuple[float, float], dark: bool) -> alt.Chart:
    """Draw bars on one row per lane and rank, over a window in seconds; scrolling zooms and dragging moves."""
    p = paper(dark)
    lanes = sorted({(bar.rank, bar.lane) for bar in bars}, key=lambda lane: (lane[0], LANES.index(lane[1])))
    one_lane = len({lane for _, lane in lanes}) == 1
    label = {(r, lane): f"rank {r}" if one_lane else f"rank {r} {lane}" for r, lane in lanes}
    unit, size = ("ms", 1e-3) if window[1] - window[0] < 2 else ("s", 1.0)
    values = [
        {
            "row": label[bar.rank, bar.lane],
            "from": bar.start_s / size,
            "to": bar.end_s / size,
            "kind": bar.kind,
            "colour": _COLOURS[bar.kind],
            "strength": _STRENGTH.get(bar.kind, 1.0) * (0.45 + 0.55 * bar.busy_s / max(bar.end_s - bar.start_s, 1e-12)),
            "name": bar.name,
            "busy": seconds(bar.busy_s),
        }
        for bar in bars
    ]
    kinds = [kind for kind in _COLOURS if any(bar.kind == kind for bar in bars)]
    chart = (
        alt.Chart(alt.Data(values=values))
        .mark_bar(stroke=p.page, strokeWidth=0.4 if len(bars) <= FEW_BARS else 0.0)
        .encode(
            x=alt.X(
                "from:Q",
                title=f"{unit} from the start of the step",
                scale=alt.Scale(domain=[window[0] / size, window[1] / size], nice=False),
            ),
            x2="to:Q",
            y=alt.Y(
                "row:N",
                sort=[label[lane] for lane in lanes],
                title=None,
                axis=alt.Axis(domain=False, ticks=False, labelOverlap=True, labelLimit=180),
                scale=alt.Scale(paddingInner=0.18),
            ),
            color=alt.Color(
                "kind:N",
                title=None,
                scale=alt.Scale(domain=kinds, range=[_COLOURS[kind] for kind in kinds]),
                legend=alt.Legend(columns=0),
            ),
            opacity=alt.Opacity("strength:Q", scale=None, legend=None),
            tooltip=[
                alt.Tooltip("name:N"),
                alt.Tooltip("kind:N"),
                alt.Tooltip("busy:N"),
                alt.Tooltip("from:Q", format=".4~f", title=f"from, {unit}"),
                alt.Tooltip("row:N", title="where"),
            ],
        )
        .properties(height=alt.Step(lane_px(len(lanes))))
    )
    return finished(chart.interactive(bind_y=False), dark)


def memory_over_time(points: Sequence[tuple[float, float]], capacity: float, *, dark: bool) -> alt.LayerChart:
    """Draw the allocated bytes of one rank over the step, and the capacity."""
    unit, size = ("ms", 1e-3) if points and points[-1][0] < 2 else ("s", 1.0)
    values = [{"at": time / size, "gib": nbytes / GIB} for time, nbytes in points]
    top = max([capacity / GIB, *(v["gib"] for v in values)]) * 1.05
    y = alt.Y("gib:Q", title="allocated, GiB", scale=alt.Scale(domain=[0, top], nice=False))
    area = (
        alt.Chart(alt.Data(values=values))
        .mark_area(interpolate="step-after", color=SPANS["compute"], opacity=0.25, line={"color": SPANS["compute"]})
        .encode(x=alt.X("at:Q", title=f"{unit} from the start of the step", scale=alt.Scale(nice=False)), y=y)
    )
    limit = (
        alt.Chart(alt.Data(values=[{"gib": capacity / GIB}]))
        .mark_rule(color=BAD, strokeDash=[5, 4], strokeWidth=1.4)
        .encode(y="gib:Q")
    )
    return finished(alt.layer(area, limit).properties(height=190), dark)


def _in_order(values: Sequence[Mapping[str, Any]], key: str, order: Sequence[str]) -> list[str]:
    seen = dict.fromkeys(value[key] for value in values)
    return [*(n for n in order if n in seen), *(n for n in seen if n not in order)]
