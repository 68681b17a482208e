"""`planner apply`: run a plan, check its numbers, and compare the measurement with the prediction."""

from __future__ import annotations

import os
import shlex
from datetime import datetime
from pathlib import Path

import psutil
from click.exceptions import Exit

from planner.commands.apply_job import patience_s, write
from planner.commands.doctor import budget_s
from planner.io import output
from planner.io.output import SCHEMA_VERSION
from planner.io.plan_words import degrees_text
from planner.io.printable import printable
from planner.question.plan_file import load_plan
from planner.requests.runs import Apply
from planner.runs import apply_process, apply_report, runs_store, scheduled
from planner.runs.comparison import compare
from planner.runs.planned_run import PlannedRun, cpu_run, cuda_run, default_run
from simulator.config.plan import MESH_AXES, rank_grid
from topology import codec
from topology.codec import JsonObject
from topology.errors import BadInput, PlannerError, UserError
from topology.health.diagnose import diagnose
from topology.probe.from_machine import probe_machine
from topology.units import MIB

DEVICES = ("cuda", "cpu")
STEPS = 10
LEAST_FREE_BYTES = 64 * MIB


def apply(asked: Apply) -> None:
    """Print what `planner apply` answers."""
    seconds, wait_s = limits_s(asked)
    if asked.launcher != "local":
        code = _as_job(asked, seconds, wait_s)
    elif asked.learn is not None:
        raise UserError("--learn: for a serving plan", remedy="planner report RUN --learn PROFILE")
    else:
        code = _here(asked, seconds)
    if code:
        raise Exit(code)


def limits_s(asked: Apply) -> tuple[float, float]:
    """Return the time limit of a run, and for how long a job is followed, in seconds. Raises UserError for options that
    do not apply.
    """
    seconds, wait_s = budget_s(asked.budget), patience_s(asked.wait)
    if asked.device is not None and asked.device not in DEVICES:
        raise UserError(f"--device is {asked.device!r}", remedy=f"one of {', '.join(DEVICES)}")
    stated = any(one is not None for one in (asked.nodes, asked.endpoint, asked.image, asked.volume))
    if asked.launcher == "local" and (stated or asked.submit or wait_s):
        raise UserError(
            "--nodes, --endpoint, --image, --volume, --submit and --wait are for jobs", remedy="--launcher slurm, say"
        )
    return seconds, wait_s


def _as_job(asked: Apply, seconds: float, wait_s: float) -> int:
    """Write a launcher's job; submit and follow it if asked to; return the exit code."""
    out = asked.out
    again = wait_s > 0 and out is not None and scheduled.recorded(out) is not None
    folder = folder_of(out, force=asked.force or again)
    document = write(asked, folder=folder, budget_s=seconds, wait_s=wait_s, steps=asked.steps or STEPS)
    return 0 if document is None else _concluded(document, folder, asked.tolerance, json=asked.json)


def _here(asked: Apply, seconds: float) -> int:
    """Run a training plan on this machine, or show what would be run; return the exit code."""
    run = _planned(asked.plan, asked.device, allow_busy=asked.allow_busy)
    if asked.tolerance is not None and run.predicted is None:
        raise UserError(
            "--tolerance has nothing to hold the step against",
            why="only runs of a saved plan on the planned GPUs are predicted",
            remedy="leave --tolerance out, or give a plan and GPUs",
        )
    folder = folder_of(asked.out, force=asked.force)
    request = run.request(steps=asked.steps or STEPS, budget_s=seconds, own_table=asked.own_table)
    if asked.dry_run:
        _show(run, request, folder, seconds, json=asked.json)
        return 0
    return _run(run, request, folder, seconds, asked.tolerance, json=asked.json)


def _run(
    run: PlannedRun, request: JsonObject, folder: Path, seconds: float, tolerance: float | None, *, json: bool
) -> int:
    """Run the plan, save and report the result, and return the exit code."""
    apply_process.require_torch()
    output.require_room(folder, LEAST_FREE_BYTES, "records and timelines of a run")
    for note in run.notes:
        output.warn(f"note: {note}")
    try:
        document = apply_process.run(request, folder, seconds, lambda phase: output.progress(f"{phase} ..."))
    except KeyboardInterrupt:
        output.end_progress()
        _interrupted(folder, json=json)
        raise
    output.end_progress()
    return _concluded(document, folder, tolerance, json=json)


def _concluded(document: JsonObject, folder: Path, tolerance: float | None, *, json: bool) -> int:
    """Save and report a finished run, and return the exit code."""
    document["comparison"] = comparison = compare(document, tolerance)
    _keep(document, folder)
    _report(document, folder, json=json)
    code = int(document["exit_code"])
    if code == 0 and document.get("predicted") is not None and not (comparison and comparison["within"]):
        return 4
    return code


def _keep(document: JsonObject, folder: Path) -> None:
    """Write the report, and copy it to the store of runs; a failure of either is only a warning, since the run
    has been made.
    """
    document["id"] = runs_store.run_id(document)
    try:
        codec.write_text(folder / "run.json", codec.to_json(document) + "\n")
        runs_store.save_run(document, folder, tell=output.warn)
    except PlannerError as error:
        output.warn(f"warning: {error}")


def _planned(plan: Path | None, device: str | None, *, allow_busy: bool) -> PlannedRun:
    if plan is None:
        if device == "cuda":
            raise UserError("--device cuda needs a plan", remedy="planner suggest ... --out plan.json, then apply that")
        return default_run(os.cpu_count() or 1)
    content = load_plan(plan)
    if device == "cpu":
        return cpu_run(content, psutil.virtual_memory().available)

    here = probe_machine()
    return cuda_run(content, here, diagnose(here), allow_busy=allow_busy)


def folder_of(out: Path | None, *, force: bool) -> Path:
    """Return the run's directory. Raises BadInput when it is not empty."""
    if out is None:
        stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        out = Path(f"meshwright-run-{stamp}")
    if out.exists() and not out.is_dir():
        raise BadInput(f"{out} is a file", remedy="name a directory: --out run")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise BadInput(f"{out} is not empty", why="a run is not overwritten by accident", remedy="--force")
    return out.resolve()


def _show(run: PlannedRun, request: JsonObject, folder: Path, seconds: float, *, json: bool) -> None:
    plan, path = run.plan, folder / "request.json"
    started = apply_process.command(path, folder, seconds)
    ranks = apply_process.ranks_command(plan.gpus, path, folder)
    grid = rank_grid(plan)
    places = [
        {
            "rank": rank,
            "device": f"cuda:{run.gpus[rank]}" if run.gpus else run.device,
            **{axis: int(at) for axis, at in zip(MESH_AXES, place, strict=True)},
        }
        for rank in range(plan.gpus)
        for place in zip(*(grid == rank).nonzero(), strict=True)
    ]
    if json:
        mesh = {"axes": {axis: int(getattr(plan, axis)) for axis in MESH_AXES}, "ranks": grid.tolist()}
        output.emit_json(
            {
                "schema_version": SCHEMA_VERSION,
                "dry_run": True,
                "command": started,
                "ranks_command": ranks,
                "directory": str(folder),
                "mesh": mesh,
                "placement": places,
                "notes": list(run.notes),
                "request": request,
            }
        )
        return
    print(printable(f"would run {run.model.name}, {degrees_text(plan)}, on {plan.gpus} {run.device} ranks"))
    for note in run.notes:
        print(printable(f"note      {note}"))
    print(printable(f"command   {shlex.join(started)}"))
    print(printable(f"  starts  {shlex.join(ranks)}"))
    for place in places:
        at = ", ".join(f"{axis} {place[axis]}" for axis in MESH_AXES if int(getattr(plan, axis)) > 1)
        print(f"rank {place['rank']:<4} {place['device']:<8} {at}")


def _report(document: JsonObject, folder: Path, *, json: bool) -> None:
    if json:
        output.emit_json({**document, "directory": str(folder)})
        return
    for line in apply_report.lines(document, document["comparison"]):
        print(printable(line))
    print(printable(f"saved {folder / 'run.json'}"))
    if document.get("predicted"):
        print(printable(f"next: planner report {document['id']}"))


def _interrupted(folder: Path, *, json: bool) -> None:
    """Print what an interrupted run has left."""
    report = folder / "run.json"
    if report.is_file():
        document = codec.read_json(report)
        document["comparison"] = None
        _keep(document, folder)
        _report(document, folder, json=json)
