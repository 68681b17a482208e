"""A run compared with its prediction: figures, terms, and both timelines on one time axis."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import streamlit as st

from planner.runs import comparison
from planner.runs.run_report import RunReport, load_run
from simulator.program.trace import Span, Trace
from topology.errors import PlannerError
from topology.units import in_gib, in_seconds
from ui import panels
from ui.background import service
from ui.canvas.component import timeline, window_of
from ui.canvas.payload import Shown, payload
from ui.charts.row_types import Artifact, JobDocument
from ui.charts.timeline import LANES
from ui.charts.timeline import timeline as columns

KEY = "run_timeline"
PREDICTED, MEASURED = 0, 1  # the side (prediction or run) of a lane
_KEPT = re.compile(r"^run/(run\.json|records/rank\d+\.trace\.json)$")  # files written by planner apply


@st.cache_resource(max_entries=8, show_spinner="Reading the run")
def of_job(job: str, _artifacts: list[Artifact]) -> RunReport | None:
    """Return the report of a run that a job made, with the timelines that it wrote; None where it wrote no report."""
    del job
    with tempfile.TemporaryDirectory() as folder:
        for artifact in _artifacts:
            if _KEPT.match(artifact["name"]):
                path = Path(folder) / artifact["name"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(service.jobs().content(artifact))
        if not (Path(folder) / "run" / "run.json").is_file():
            return None
        return load_run(str(Path(folder) / "run"))


def show_run(found: RunReport, key: str) -> None:
    """Show a run and its prediction. `key` names it."""
    document = found.document
    rows = [row for row in comparison.quantities(document) if (row.predicted, row.measured) != (None, None)]
    quantities = [_quantity(row) for row in rows]
    panels.section(
        f"The run: {panels.plain(str(document.get('status', '')).replace('_', ' '))}",
        f"Predicted and measured, on {document['device']}.",
    )
    checked = document.get("verified")
    if isinstance(checked, dict):
        st.markdown(
            ":green[:material/check_circle:] Loss and gradients are those of one process."
            if checked.get("ok")
            else ":red[:material/error:] Loss or gradients differ from those of one process."
        )
    if isinstance(failed := document.get("failure"), dict):
        st.markdown(f":orange[:material/warning:] {panels.plain(failed.get('message', ''))}")
    if quantities:
        st.dataframe(quantities, hide_index=True, width="stretch", placeholder="-")
    _clocks(document.get("measured") or {})
    _overlaid(found, key)
    for note in found.notes:
        st.caption(panels.plain(note))


def _quantity(row: comparison.Quantity) -> dict[str, str | None]:
    return {
        "quantity": row.name,
        "predicted": _figure(row.predicted, row.unit),
        "80 % range": f"{_figure(row.low, row.unit)} to {_figure(row.high, row.unit)}"
        if row.low and row.high
        else None,
        "measured": _figure(row.measured, row.unit),
        "off by": f"{row.error:+.1%}" if row.error is not None else None,
    }


def _figure(value: float | None, unit: str) -> str | None:
    if value is None:
        return None
    if unit == "s":
        return in_seconds(value)
    return in_gib(value) if unit == "bytes" else f"{value:,.3g} {unit}"


def _clocks(measured: Mapping[str, Any]) -> None:
    clock = measured.get("sm_clock_hz")
    if clock:
        st.caption(f"GPU clocks while it ran: {clock / 1e6:,.0f} MHz.")


def _overlaid(found: RunReport, key: str) -> None:
    sides = {PREDICTED: found.simulated, MEASURED: found.slowest}
    present = {side: trace for side, trace in sides.items() if trace is not None}
    if not present:
        return
    title = "Prediction and measurement on one time axis" if len(present) == 2 else "The timeline"
    panels.section(title, "Of the rank that computes longest.")
    largest = max(found.terms(), key=lambda one: abs(one.difference_s), default=None)
    if largest is not None:
        st.markdown(
            f"The largest difference is **{panels.plain(largest.name)}**: predicted {in_seconds(largest.predicted_s)},"
            f" measured {in_seconds(largest.measured_s)}."
        )
    line = columns(both(present))
    drawn = payload(
        line,
        Shown(lanes=LANES, ranks=line.ranks, titles={PREDICTED: "predicted", MEASURED: "measured"}),
        (),
        window=window_of(KEY, line.length_s),
        about="Timelines of one rank: "
        + ", ".join(f"{word} {in_seconds(present[side].end_s)}" for side, word in enumerate(WORDS) if side in present),
        key=key,
        dark=panels.dark(),
    )
    timeline(drawn, key=KEY)


WORDS = ("predicted", "measured")


def both(sides: dict[int, Trace]) -> Trace:
    """Return one rank of each trace, the one that computes longest, as the ranks of one trace; both begin at 0."""
    spans: list[Span] = []
    for side, trace in sides.items():
        busiest = max(trace.ranks, key=lambda rank: (trace.busy_s(rank, "compute"), -rank), default=0)
        spans += [replace(span, rank=side) for span in trace.of(busiest)]
    return Trace(spans=tuple(sorted(spans, key=lambda span: span.start_s)))


def show_job(found: JobDocument) -> None:
    """Show the run that a job made."""
    try:
        report = of_job(found["job"], found["artifacts"])
    except PlannerError as error:
        panels.failure(error)
        return
    if report is not None:
        show_run(report, found["job"])
