"""How far can it be trusted: runs against their predictions."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median

import streamlit as st

from planner.runs_store import default_path
from topology.errors import PlannerError
from ui import data, panels, rows, state
from ui.charts import measured as charts


def show(question: state.Question) -> None:
    del question
    st.caption("Runs against what was predicted for them before.")
    _own()
    _published()


def _own() -> None:
    panels.section("Your runs", "Every planner apply on this machine, newest first.")
    try:
        kept = data.runs()
    except PlannerError as error:
        panels.failure(error)
        return
    if not kept:
        panels.empty(
            "No run was kept yet",
            "`planner apply plan.json` runs a plan on this machine's GPUs, checks its numbers against one process, and keeps"
            f" what it measured in {panels.code(_home(default_path()))}. Then it stands here beside its prediction.",
            icon=":material/play_circle:",
        )
        return
    errors = [run.step_error for run in kept if run.step_error is not None]
    if errors:
        panels.figures(
            [
                ("Runs", str(len(kept)), ""),
                ("Step, mean absolute", f"{mean(map(abs, errors)):.1%}", "predicted against measured"),
                ("Step, median", f"{median(errors):+.1%}", "signed: below zero is predicted too fast"),
            ]
        )
    told = panels.in_percent([rows.run_row(run) for run in kept], "step", "memory")
    st.dataframe(told, hide_index=True, width="stretch", placeholder="-", column_config=_RUNS)


_RUNS = {
    "step": st.column_config.NumberColumn("step error, %", format="%+.1f"),
    "memory": st.column_config.NumberColumn("memory error, %", format="%+.1f"),
}


def _home(path: Path) -> str:
    """Return a path as people write it: their own folder is `~`."""
    return str(path).replace(str(Path.home()), "~", 1)


def _published() -> None:
    panels.section(
        "Runs that others published",
        "Predicted by planner validate from datasheets alone; nothing was calibrated on these machines.",
    )
    path = state.example("validation/cases.json")
    if path is None:
        panels.empty(
            "The tables are not part of the installed package",
            "They are in the repository under `examples/validation/`; `planner validate cases.json` makes them again.",
            icon=":material/table_chart:",
        )
        return
    every = rows.compared_rows(data.validation_rows(str(path), path.stat().st_mtime))
    what = st.segmented_control(
        "Show", ["step time", "memory"], default="step time", required=True, key="show", bind="query-params"
    )
    shown = [row for row in every if row["what"] == what]
    if not shown:
        panels.empty("Nothing to compare", "No row of the file states this quantity.")
        return
    held = [row for row in shown if row["held"] != "no range"]
    inside = sum(row["held"].startswith("inside") for row in held) / max(1, len(held))
    errors = [row["error"] for row in shown]
    panels.figures(
        [
            ("Rows", f"{len(shown)}", "that state this quantity"),
            ("Mean absolute error", f"{mean(map(abs, errors)):.1%}", "predicted / measured - 1"),
            ("Median error", f"{median(errors):+.1%}", "signed"),
            ("Inside the 80 % range", f"{inside:.0%}", "should be about 80 %"),
        ]
    )
    left, right = st.columns([4, 5], gap="large")
    unit = "s a step" if what == "step time" else "GiB"
    with left:
        panels.section("Predicted against measured", "On the dashed line they are equal.")
        panels.chart(charts.against(shown, unit=unit, dark=panels.dark()), key="against", alt="Predicted over measured")
    with right:
        panels.section("Error by source", "A tick a run, the diamond is the median; beyond 60 % at the edge.")
        panels.chart(charts.errors(shown, dark=panels.dark()), key="errors", alt="Signed errors by source")


show(data.question())
