"""Part of pages: the curves of runs over their steps, while they run and afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import streamlit as st

from planner.requests.known import SO_FAR
from ui import panels
from ui.background import service
from ui.charts.curves import QUANTITIES, curve, points_of
from ui.charts.row_types import JobDocument, StepPoint
from ui.rows import run_names

if TYPE_CHECKING:
    from planner.runs.runs_store import RunSummary


def show(points: Sequence[StepPoint], key: str) -> None:
    """Draw the quantities that are known, two side by side. `key` names the runs."""
    known = [name for name in QUANTITIES if any(point["quantity"] == name for point in points)]
    for first in range(0, len(known), 2):
        for name, column in zip(known[first : first + 2], st.columns(2, gap="large"), strict=False):
            of_it = [point for point in points if point["quantity"] == name]
            last = of_it[-1]
            about = f"{QUANTITIES[name]} over steps; {last['value']:.4g} at step {last['step']} of {last['run']}"
            with column:
                panels.chart(curve(of_it, QUANTITIES[name], dark=panels.dark()), key=f"{key}_{name}", alt=about)


def ended(found: JobDocument) -> None:
    """Draw the steps that a run has taken which has ended."""
    kept = next((one for one in found["artifacts"] if one["name"] == SO_FAR["apply"]), None)
    points = points_of(service.jobs().content(kept).decode("utf-8", errors="replace"), "this run") if kept else []
    if points:
        panels.section("Its steps", "As the first rank recorded them.")
        show(points, found["job"])


def so_far(job: str) -> None:
    """Draw the steps that a run has taken."""
    points = points_of(service.jobs().so_far(job).decode("utf-8", errors="replace"), "this run")
    if not points:
        st.caption("No step has been timed yet: its curves will stand here.")
        return
    show(points, "live")


def saved(runs: Sequence[RunSummary]) -> None:
    """Draw the steps of runs that are kept on this machine, on common axes."""
    points: list[StepPoint] = []
    for run, name in zip(runs, run_names(runs), strict=True):
        file = Path(run.directory) / Path(SO_FAR["apply"]).relative_to("run")
        with suppress(OSError):
            points += points_of(file.read_text(encoding="utf-8", errors="replace"), name)
    if runs and not points:
        st.caption("The records of these runs are not kept any more, or no step was timed.")
    show(points, " ".join(["saved", *(run.id for run in runs)]))
