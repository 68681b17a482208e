"""How far can it be trusted: runs against their predictions."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from typing import Any

import streamlit as st

from planner.runs_store import RunSummary, default_path
from topology.errors import PlannerError
from ui import data, panels, state
from ui.charts import measured as charts
from ui.charts.look import GIB, seconds

SOURCES = {
    "korthikanti22.json": "Megatron-LM, A100 (Korthikanti 2022)",
    "korthikanti22_mem.json": "Megatron-LM memory, A100 (Korthikanti 2022)",
    "llama3_paper.json": "Llama 3 paper, 8k to 16k H100",
    "llm_foundry.json": "llm-foundry FSDP, A100 and H100",
    "megatron_sc21.json": "Megatron-LM, A100 (SC21)",
    "simumax_b200.json": "Megatron-LM, B200 (SimuMax)",
    "torchtitan.json": "torchtitan, H100",
    "torchtitan_h200x4.json": "torchtitan, 4 x H200",
    "vtrain_multi.json": "Megatron-DeepSpeed, A100 (vTrain, many nodes)",
    "vtrain_single.json": "Megatron-DeepSpeed, A100 (vTrain, one node)",
}


def show(question: state.Question) -> None:
    del question
    panels.heading("Measured", "Runs against what was predicted for them before.")
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
            f" what it measured in `{panels.plain(default_path())}`. Then it stands here beside its prediction.",
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
    st.dataframe([run_row(run) for run in kept], hide_index=True, width="stretch", column_config=_RUNS)


_RUNS = {
    "step": st.column_config.NumberColumn("step error", format="percent"),
    "memory": st.column_config.NumberColumn("memory error", format="percent"),
}


def run_row(run: RunSummary) -> dict[str, Any]:
    """Return a kept run as a row; what was not measured stays empty."""

    def gib(nbytes: float | None) -> str:
        return f"{nbytes / GIB:.1f} GiB" if nbytes else ""

    return {
        "when": run.taken_at[:16].replace("T", " "),
        "model": run.model,
        "plan": run.plan,
        "device": f"{run.gpus} x {run.device}",
        "ended": run.status if run.complete else f"{run.status}, incomplete",
        "predicted step": seconds(run.predicted_step_s) if run.predicted_step_s else "",
        "measured step": seconds(run.measured_step_s) if run.measured_step_s else "",
        "step": run.step_error,
        "predicted memory": gib(run.predicted_peak_bytes),
        "measured memory": gib(run.measured_peak_bytes),
        "memory": run.memory_error,
    }


def _published() -> None:
    panels.section("Runs that others published", "Predicted by planner validate from datasheets alone; nothing was calibrated on these machines.")
    path = state.example("validation/cases.json")
    if path is None:
        panels.empty(
            "The tables are not part of the installed package",
            "They are in the repository under `examples/validation/`; `planner validate cases.json` makes them again.",
            icon=":material/table_chart:",
        )
        return
    rows = compared(path)
    what = st.segmented_control(
        "Show", ["step time", "memory"], default="step time", required=True, key="show", bind="query-params"
    )
    shown = [row for row in rows if row["what"] == what]
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
    left, right = st.columns(2, gap="large")
    unit = "s a step" if what == "step time" else "GiB"
    with left:
        panels.section("Predicted against measured", "On the dashed line they are equal.")
        panels.chart(charts.against(shown, unit=unit, dark=panels.dark()), key="against", alt="Predicted over measured")
    with right:
        panels.section("Error by source", "A tick a run, the diamond is the median; beyond 60 % at the edge.")
        panels.chart(charts.errors(shown, dark=panels.dark()), key="errors", alt="Signed errors by source")


def compared(path: Path) -> list[dict[str, Any]]:
    """Return predicted and measured step times (s) and memory (GiB) of a validation file, one row each."""
    found = []
    for row in data.validation_rows(str(path), path.stat().st_mtime):
        source = SOURCES.get(row.get("file", ""), row.get("file", "this file"))
        predicted, error, within = row["predicted"], row["error"], row["within"]
        step, peak = predicted["step_s"], predicted["peak_memory_bytes"] / GIB
        for what, value in (("step time", step), ("memory", peak)):
            key = "step" if what == "step time" else "memory"
            if error[key] is None or error[key] <= -1:
                continue
            inside = within[key]
            found.append(
                {
                    "id": row["id"],
                    "source": source,
                    "what": what,
                    "predicted": value,
                    "measured": value / (1 + error[key]),
                    "error": error[key],
                    "held": "no range" if inside is None else "inside the 80 % range" if inside else "outside",
                }
            )
    return found


show(data.question())
