"""Curves over the steps of runs, from the records of their first ranks; and charts of hypothetical questions: steps on
a changed machine, and time and cost over the number of GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import msgspec

from planner.pictures.palette import AXES, BAD, BLUE, GOOD, GREY
from topology.codec import JsonObject
from topology.units import GIB
from ui.charts.look import Figure, finished, paper, table, tips
from ui.charts.row_types import RunRow, SizeRow, StepPoint


def before_and_after(rows: Sequence[Mapping[str, Any]], *, dark: bool) -> Figure:
    """Draw each plan's step on the machine as it is (hollow) and as changed (filled, red where it does not fit).

    Rows are those of `ui.other_machines.changed_machine`, with `label`, `before` and `after` in words.
    """
    base = alt.Chart(table(rows)).encode(
        y=alt.Y("label:N", sort=None, title=None, axis=alt.Axis(domain=False, ticks=False, labelLimit=190)),
        tooltip=tips({"label": "plan", "before": "step as it is", "after": "step then", "held": "memory then"}),
    )
    x = alt.X("before_s:Q", title="step time, s", scale=alt.Scale(zero=False))
    line = base.mark_rule(color=GREY, strokeWidth=2).encode(x=x, x2=alt.X2("after_s:Q"))
    now = base.mark_point(size=80, strokeWidth=2, color=GREY).encode(x=x)
    then = base.mark_point(size=90, filled=True, opacity=1).encode(
        x=alt.X("after_s:Q"),
        color=alt.Color(
            "state:N",
            title=None,
            scale=alt.Scale(domain=["as changed", "does not fit then"], range=[GOOD, BAD]),
            legend=alt.Legend(orient="bottom"),
        ),
    )
    return finished(alt.layer(line, now, then), dark, height=30 * len(rows) + 70)


def over_gpus(rows: Sequence[Mapping[str, Any]], value: str, title: str, *, dark: bool) -> Figure:
    """Draw a quantity of the best plan over the number of GPUs. Rows have gpus, the quantity, and its words as
    `text`.
    """
    p = paper(dark)
    numbers = [row["gpus"] for row in rows]
    base = alt.Chart(table(rows)).encode(
        x=alt.X(
            "gpus:Q",
            title="GPUs",
            scale=alt.Scale(type="log", base=2, nice=False, padding=24),
            axis=alt.Axis(values=numbers, format="d"),
        ),
        y=alt.Y(f"{value}:Q", title=title, scale=alt.Scale(zero=True)),
        tooltip=tips({"gpus:Q": "GPUs", "plan": "", "text": title}),
    )
    line = base.mark_line(color=GOOD, strokeWidth=2)
    points = base.mark_point(color=GOOD, filled=True, size=80, opacity=1)
    names = base.encode(text=alt.Text("text:N"))
    outline = names.mark_text(dy=-12, fontSize=11, stroke=p.page, strokeWidth=4)
    text = names.mark_text(dy=-12, fontSize=11, color=p.ink)
    return finished(alt.layer(line, points, outline, text), dark, height=230)


def cost_over_days(rows: Sequence[RunRow], unit: str, *, dark: bool) -> Figure:
    """Draw what a whole run costs over the days that it takes, a point for each number of GPUs, with 80 % ranges."""
    p = paper(dark)
    base = alt.Chart(table(rows)).encode(tooltip=tips({"label": "on", "days_text": "days", "cost_text": unit}))
    x = alt.X(
        "days:Q",
        title="days (logarithmic)",
        scale=alt.Scale(type="log", nice=False, padding=26),
        axis=alt.Axis(values=[row["days"] for row in rows], format=".2~r", grid=False),
    )
    y = alt.Y("cost:Q", title=unit, scale=alt.Scale(zero=True), axis=alt.Axis(format=",~r"))
    ranges: dict[str, Any] = {"strokeWidth": 6, "opacity": 0.35, "color": GOOD, "strokeCap": "round"}
    across = base.mark_rule(**ranges).encode(x=alt.X("days_low:Q"), x2=alt.X2("days_high:Q"), y=y)
    upwards = base.mark_rule(**ranges).encode(x=x, y=alt.Y("cost_low:Q"), y2=alt.Y2("cost_high:Q"))
    line = base.mark_line(color=GOOD, strokeWidth=2).encode(x=x, y=y)
    points = base.mark_point(filled=True, size=80, opacity=1).encode(
        x=x, y=y, color=alt.condition(alt.datum.here, alt.value(BAD), alt.value(GOOD))
    )
    names = base.encode(x=x, y=alt.Y("cost_high:Q"), text=alt.Text("label:N"))
    outline = names.mark_text(dy=-9, fontSize=11, stroke=p.page, strokeWidth=4)
    text = names.mark_text(dy=-9, fontSize=11, color=p.ink)
    return finished(alt.layer(across, upwards, line, points, outline, text), dark, height=300)


def size_map(rows: Sequence[SizeRow], *, dark: bool) -> Figure:
    """Draw a plan over lengths and micro batches: the step in words, a deeper colour for more tokens/s a GPU, an empty
    frame for what does not surely fit, and a thick frame for the plan as it is.
    """
    p = paper(dark)
    rates = [row["tokens_per_s"] for row in rows if row["tokens_per_s"] is not None]
    sizes = {"length": "tokens a sequence", "micro_batch": "sequences a micro batch"}
    base = alt.Chart(table(rows)).encode(
        x=alt.X("micro_batch:N", sort=None, title=sizes["micro_batch"], axis=alt.Axis(labelAngle=0, orient="top")),
        y=alt.Y("length:N", sort=None, title=sizes["length"]),
        tooltip=tips({**sizes, "upper": "step", "rate": "per GPU", "lower": "memory", "state": "state"}),
    )
    fits = alt.datum.tokens_per_s > 0
    filled = base.transform_filter(fits).mark_rect(cornerRadius=3, stroke=p.page, strokeWidth=3, color=BLUE)
    depth = alt.Scale(domain=[0, max(rates, default=1.0)], range=[0.0, 0.55])
    filled = filled.encode(opacity=alt.Opacity("tokens_per_s:Q", scale=depth, legend=None))
    hollow = base.transform_filter(~fits).mark_rect(cornerRadius=3, fillOpacity=0, stroke=BAD, strokeOpacity=0.45)
    here = base.transform_filter(alt.datum.here).mark_rect(cornerRadius=3, fillOpacity=0, stroke=p.ink, strokeWidth=2.5)
    upper = base.mark_text(dy=-7, fontSize=12, color=p.ink).encode(text=alt.Text("upper:N"))
    lower = base.mark_text(dy=8, fontSize=11, color=p.quiet).encode(text=alt.Text("lower:N"))
    lengths = len({row["length"] for row in rows})
    return finished(alt.layer(filled, hollow, here, upper, lower), dark, height=44 * lengths + 60)


# What is drawn of a step: its name, and its title with a unit.
QUANTITIES = {"loss": "loss", "step": "step time, s", "clock": "SM clock, MHz", "memory": "peak memory, GiB"}
LABEL_PX = 320  # pixels of a legend's words: what a phone has room for
LINE_PX = 18  # pixels of a line of the legend, which takes its room from the chart


def points_of(records: str, run: str) -> list[StepPoint]:
    """Return the recorded quantities of each timed step. The last line may be incomplete; lines that are not records
    are left out.
    """
    whole = records[: records.rfind("\n") + 1].splitlines()
    steps = [found for line in whole if (found := _record(line)).get("kind") == "step"]
    return [
        {"run": run, "step": number, "quantity": name, "value": value}
        for number, record in enumerate(steps, 1)
        for name, value in _values(record).items()
    ]


def _record(line: str) -> JsonObject:
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _values(record: Mapping[str, Any]) -> dict[str, float]:
    clock = record.get("sm_clock_hz")
    memory = record.get("peak_allocated_bytes") or record.get("peak_resident_bytes")  # of a process on CPUs
    known = {
        "loss": record.get("loss"),
        "step": record.get("seconds"),
        "clock": clock / 1e6 if isinstance(clock, int | float) else None,
        "memory": memory / GIB if isinstance(memory, int | float) else None,
    }
    return {name: float(value) for name, value in known.items() if isinstance(value, int | float)}


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
