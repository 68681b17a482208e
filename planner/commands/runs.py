"""`planner runs`: every run that was applied, newest first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.commands import options


def runs(
    add: Annotated[
        list[Path] | None,
        typer.Option("--add", help="Keep this run's directory too: one of several nodes, or made elsewhere."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100_000, help="How many, newest first.")] = 20,
    json: options.Json = False,
) -> None:
    """List the runs that planner apply made, with measured against predicted. planner report ID explains one."""
    from dataclasses import asdict  # noqa: PLC0415 - keeps `--help` light

    from rich.table import Table  # noqa: PLC0415 - as above

    from planner import output, runs_store  # noqa: PLC0415 - as above
    from planner.report_text import shown  # noqa: PLC0415 - as above
    from planner.run_report import load_run  # noqa: PLC0415 - as above

    for folder in add or ():
        output.warn(f"kept {runs_store.keep(load_run(str(folder), simulate=False).document, folder.resolve())}")
    rows = runs_store.list_runs(limit=limit)
    if json:
        listed = [{**asdict(r), "step_error": r.step_error, "memory_error": r.memory_error} for r in rows]
        output.emit_json(
            {"schema_version": output.SCHEMA_VERSION, "store": str(runs_store.default_path()), "runs": listed}
        )
        return
    if not rows:
        print("no runs yet: planner apply makes one")
        return
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for head in ("id", "taken (UTC)", "status", "model", "plan", "device"):
        table.add_column(head, overflow="fold", no_wrap=head == "id")
    for head in ("step s", "error", "memory GiB", "error"):
        table.add_column(head, justify="right")
    for run in rows:
        words = (run.id[:8], run.taken_at[:16].replace("T", " "), run.status, run.model, run.plan, run.device)
        numbers = (
            shown(run.measured_step_s, "s"),
            _error(run.step_error),
            shown(run.measured_peak_bytes, "bytes"),
            _error(run.memory_error),
        )
        table.add_row(*(output.printable(word) for word in (*words, *numbers)))
    output.console().print(table)


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"
