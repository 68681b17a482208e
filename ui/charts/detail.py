"""Charts of one plan, its model, and another plan: memory by stage and category, the waterfall of the step, parameters,
differences of two plans term by term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from planner.io.figures import gib_text, seconds_text
from planner.pictures.palette import BAD, BLUE, GOOD, GREY, MEMORY, VERMILION
from topology.units import GIB
from ui.charts.look import Figure, finished, ink_on, paper, scale, table, tips, words
from ui.charts.row_types import PartRow, SavingRow, TermRow

LEAST_SHOWN_BYTES = 0.005 * GIB


def memory(stages: Sequence[Mapping[str, float]], capacity: float, *, dark: bool, names: Sequence[str] = ()) -> Figure:
    """Draw bytes by category, one bar per pipeline stage up to what the allocator reserves, and the capacity.

    `stages` has one entry per stage (`planner.pictures.memory.stage_parts`); `capacity` is that of one GPU, in bytes.
    `names` labels the bars where they are not stages.
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
        if nbytes > LEAST_SHOWN_BYTES
    ]
    parts_shown = _in_order(values, "category", [words(n) for n in MEMORY])
    held = (sum(nbytes for nbytes in parts.values() if nbytes > LEAST_SHOWN_BYTES) for parts in stages)
    widest = max([capacity, *held]) / GIB
    x = alt.X("gib:Q", title="GiB on one GPU", scale=alt.Scale(domain=[0, widest * 1.04], nice=False), stack="zero")
    y = alt.Y(
        "stage:N",
        title=None,
        sort=alt.EncodingSortField("number", op="min"),
        axis=alt.Axis(domain=False, ticks=False, labelLimit=190),
    )
    bars = (
        alt.Chart(table(values))
        .mark_bar(stroke=p.page, strokeWidth=1)
        .encode(
            x=x,
            y=y,
            color=alt.Color(
                "category:N",
                title=None,
                scale=scale("memory", parts_shown),
                sort=parts_shown,
                legend=alt.Legend(
                    columns=alt.ExprRef("width < 230 ? 1 : 2"),  # next to long names, a phone has no room for two
                    orient="bottom",
                    offset=14,  # clear of the capacity's label
                ),
            ),
            order=alt.Order("order:Q"),
            tooltip=tips({"stage": "", "category": "", "text": "size"}),
        )
    )
    capacity_rule = alt.Chart(table([{"gib": capacity / GIB, "text": f"{gib_text(capacity)} GiB available"}]))
    rule = capacity_rule.mark_rule(color=BAD, strokeDash=[5, 4], strokeWidth=1.5).encode(x=alt.X("gib:Q"))
    label = capacity_rule.mark_text(align="right", dx=-5, color=p.quiet, fontSize=11, baseline="top").encode(
        x=alt.X("gib:Q"), y=alt.value(-14), text=alt.Text("text:N")
    )
    row = 34 if len(stages) <= 16 else 13
    return finished(alt.layer(bars, rule, label), dark, height=row * len(stages) + 150)


SAVING_PX = 118  # pixels of the words before a bar


def savings(rows: Sequence[SavingRow], capacity_gib: float, *, dark: bool) -> Figure:
    """Draw the memory that changes of one setting free: a bar from the plan's present memory down to that after the
    change, in GiB, blue if the step takes no more time; and the memory of a GPU.
    """
    p = paper(dark)
    most = max([capacity_gib, *(row["from_gib"] for row in rows)]) * 1.04
    # Also on a phone there is room for the words before the longest bar.
    share = f"{SAVING_PX} / max(width, {2 * SAVING_PX})"
    least = min((row["to_gib"] for row in rows), default=0.0)
    begin = alt.ExprRef(f"min(0, ({least} - {most} * {share}) / (1 - {share}))")
    scale = alt.Scale(domainMin=begin, domainMax=most, nice=False, zero=False)
    axis = alt.Axis(labelExpr="datum.value < 0 ? '' : datum.label")
    base = alt.Chart(table(rows)).encode(
        y=alt.Y("change:N", sort=None, title=None, axis=alt.Axis(labelLimit=240, domain=False, ticks=False)),
        tooltip=tips({"change": "change", "text": "frees"}),
    )
    bars = base.mark_bar(height=18, cornerRadius=2).encode(
        x=alt.X("to_gib:Q", title="GiB that the allocator reserves", scale=scale, axis=axis),
        x2=alt.X2("from_gib:Q"),
        color=alt.condition(alt.datum.quicker, alt.value(GOOD), alt.value(GREY)),
    )
    text = base.mark_text(align="right", dx=-6, fontSize=12, color=p.ink).encode(
        x=alt.X("to_gib:Q"), text=alt.Text("text:N")
    )
    rule = alt.Chart(table([{"gib": capacity_gib}]))
    rule = rule.mark_rule(color=BAD, strokeDash=[5, 4], strokeWidth=1.5).encode(x=alt.X("gib:Q"))
    return finished(alt.layer(bars, text, rule), dark, height=28 * len(rows) + 50)


def waterfall(rows: Sequence[Mapping[str, Any]], *, last_s: float, dark: bool) -> Figure:
    """Draw how a step's time builds up from the model's FLOPs at peak. Rows, in order: name, seconds, share, meaning,
    colour; the last has `total` and starts at zero again. `last_s` is the place value of the last significant digit.
    """
    p = paper(dark)
    values = []
    at = 0.0
    for row in rows:
        key = words(row["name"])
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
    base = alt.Chart(table(values)).encode(y=y, tooltip=tips({"name": "", "text": "takes", "meaning": "what it is"}))
    bars = base.mark_bar(height=20, cornerRadius=2).encode(
        x=x, x2=alt.X2("to:Q"), color=alt.Color("colour:N", scale=None)
    )
    # Where a narrow page has room: behind short bars, before those that end far right, inside the longest.
    behind = base.mark_text(align="left", dx=6, fontSize=12, color=p.ink).encode(
        x=alt.X("to:Q"), text=alt.Text("text:N")
    )
    before = base.mark_text(align="right", dx=-6, fontSize=12, color=p.ink).encode(
        x=alt.X("from:Q"), text=alt.Text("text:N")
    )
    inside = base.mark_text(align="right", dx=-6, fontSize=12).encode(
        x=alt.X("to:Q"), text=alt.Text("text:N"), color=alt.Color("on:N", scale=None)
    )
    far = top / 2
    texts = (
        behind.transform_filter(alt.datum.to <= far),
        before.transform_filter((alt.datum.to > far) & (alt.datum["from"] > far / 2)),
        inside.transform_filter((alt.datum.to > far) & (alt.datum["from"] <= far / 2)),
    )
    return finished(alt.layer(bars, *texts), dark, height=30 * len(values) + 30)


def _term_text(value_s: float, share: float, last_s: float) -> str:
    if abs(value_s) < last_s / 2:
        return f"under {seconds_text(last_s, last_s)}"
    return f"{seconds_text(value_s, last_s)}, {share:.0%}"


def _in_order(values: Sequence[Mapping[str, Any]], key: str, order: Sequence[str]) -> list[str]:
    seen = dict.fromkeys(str(value[key]) for value in values)
    return [*(n for n in order if n in seen), *(n for n in seen if n not in order)]


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
