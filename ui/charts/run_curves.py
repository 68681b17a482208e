"""Curves of runs over their steps, from the records that their first ranks write while they run
(`executor.run.rank_records`): one small chart a quantity, one line a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import msgspec

from planner.pictures.palette import AXES
from topology.codec import JsonObject
from topology.units import GIB
from ui.charts.look import Figure, finished, table
from ui.charts.row_types import StepPoint

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
