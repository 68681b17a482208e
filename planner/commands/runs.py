"""`planner runs`: every run that was applied, newest first."""

from __future__ import annotations

from dataclasses import asdict

from planner.io import output
from planner.io.grids import console, grid
from planner.io.printable import printable
from planner.requests.runs import Runs
from planner.runs import runs_store
from planner.runs.report_text import quantity_text
from planner.runs.run_report import load_run


def runs(asked: Runs) -> None:
    """Print what `planner runs` answers."""
    for folder in asked.add or ():
        document = load_run(str(folder), simulate=False).document
        output.warn(f"kept {runs_store.save_run(document, folder.resolve(), tell=output.warn)}")
    for name in asked.remove or ():
        output.warn(f"removed {runs_store.remove(name)}")
    with output.redacted(asked.redact):
        _list(asked.limit, json=asked.json)


def _list(limit: int, *, json: bool) -> None:
    rows, damaged = runs_store.list_runs(limit=limit), runs_store.damaged_runs()
    if json:
        listed = [{**asdict(r), "step_error": r.step_error, "memory_error": r.memory_error} for r in rows]
        document = {
            "store": str(runs_store.default_path()),
            "runs": listed,
            "damaged": [asdict(run) for run in damaged],
        }
        output.emit_json({"schema_version": output.SCHEMA_VERSION, **document})
        return
    for run in damaged:
        output.warn(f"run {run.id} is damaged ({run.why}): planner runs --remove '{run.id}' takes it off the list")
    if not rows:
        print("no runs yet: planner apply makes one")
        return
    words = ("id", "taken (UTC)", "status", "model", "plan", "device")
    table = grid((*words, "step s", "error", "memory GiB", "error"), text=words)
    table.columns[0].no_wrap = True
    for row in rows:
        words = (row.id[:8], row.taken_at[:16].replace("T", " "), row.status, row.model, row.plan, row.device)
        numbers = (
            quantity_text(row.measured_step_s, "s"),
            _error(row.step_error),
            quantity_text(row.measured_peak_bytes, "bytes"),
            _error(row.memory_error),
        )
        table.add_row(*(printable(word) for word in (*words, *numbers)))
    console().print(table)


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"
