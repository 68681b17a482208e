"""`planner apply`: run a plan, check its numbers, and compare the measurement with the prediction."""

from __future__ import annotations

import os
import shlex
from datetime import datetime
from pathlib import Path

import psutil
from click.exceptions import Exit

from planner.commands.doctor import budget_s
from planner.io import output
from planner.io.inputs import parse_seconds
from planner.io.output import SCHEMA_VERSION
from planner.io.plan_words import degrees_text
from planner.io.printable import printable
from planner.question.plan_file import load_plan
from planner.requests.runs import Apply
from planner.runs import apply_process, apply_report, runs_store, scheduled
from planner.runs.comparison import compare
from planner.runs.planned_run import PlannedRun, cpu_run, cuda_run, default_job, default_run, job_run
from planner.runs.schedulers import launchers
from planner.runs.schedulers.launchers import JobFile, LauncherJob
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
    document = _submitted(asked, folder=folder, budget_s=seconds, wait_s=wait_s, steps=asked.steps or STEPS)
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


# With `--launcher`: the run as a job of a scheduler, written, submitted and followed.

MOST_HOURS = 24 * 14
NODES_WITHOUT_PLAN = 2  # two at least, so that they have to find each other


def _submitted(asked: Apply, *, folder: Path, budget_s: float, wait_s: float, steps: int) -> JsonObject | None:
    """Write the request and the job's file into `folder`; with `dry_run` show them instead.

    With `submit` and `wait_s`, return the run's report once it has ended.
    """
    launcher, submit, dry_run = asked.launcher, asked.submit, asked.dry_run
    if launcher not in launchers.LAUNCHERS:
        raise UserError(f"--launcher is {launcher!r}", remedy=f"one of {', '.join(launchers.LAUNCHERS)}")
    launchers.require_settings(launcher, image=asked.image, volume=asked.volume, endpoint=asked.endpoint)
    run, nodes = _job_run(asked)
    job = LauncherJob(
        name=asked.job_name,
        directory=folder,
        ranks=run.plan.gpus,
        nodes=nodes,
        budget_s=budget_s,
        endpoint=asked.endpoint,
        image=asked.image,
        volume=asked.volume,
        on_cpus=run.device == "cpu",
    )
    written = launchers.write_job(launcher, job)
    if submit and not written.submit:
        raise UserError(f"--launcher {launcher} has nobody to submit to", remedy="; ".join(written.advice))
    if wait_s and (not submit or dry_run):
        raise UserError("--wait is for a job that is submitted", remedy="--submit")
    request = run.request(steps=steps, budget_s=budget_s, own_table=asked.own_table)
    if wait_s:
        return _followed(job, written, launcher, request, wait_s)
    if not dry_run:
        _write(job, written, request)
    answer = scheduled.submit(written, launcher, name=job.name).said if submit and not dry_run else None
    if asked.json:
        output.emit_json(
            {
                "schema_version": output.SCHEMA_VERSION,
                "dry_run": dry_run,
                "launcher": launcher,
                "nodes": job.nodes,
                "ranks_per_node": job.ranks_per_node,
                "file": str(written.path),
                "text": written.text,
                "submit": list(written.submit),
                "submitted": answer,
                "advice": list(written.advice),
                "request": request,
            }
        )
        return None
    if dry_run:
        print(printable(written.text))
    else:
        print(printable(f"wrote {written.path}"))
    for line in (answer,) if answer else written.advice:
        print(printable(line))
    return None


def _job_run(asked: Apply) -> tuple[PlannedRun, int]:
    """Return the run and its number of nodes; without a plan, the built-in run on CPUs. Raises UserError."""
    if asked.plan is None:
        if asked.device == "cuda":
            raise UserError("--device cuda needs a plan", remedy="planner suggest ... --out plan.json, then apply that")
        nodes = asked.nodes or NODES_WITHOUT_PLAN
        return default_job(nodes), nodes
    content = load_plan(asked.plan)
    nodes = asked.nodes or -(-content.plan.gpus // content.cluster.gpus_per_node)
    return cpu_run(content, None) if asked.device == "cpu" else job_run(content), nodes


def patience_s(text: str) -> float:
    """Return the seconds of `90s`, `30m`, `12h`. Raises UserError for anything else, or more than two weeks."""
    most, why = MOST_HOURS * 3600.0, f"it is 0h to {MOST_HOURS}h"
    return parse_seconds(text, "--wait", range_s=(0.0, most), units="smh", why=why, example="12h")


def _write(job: LauncherJob, written: JobFile, request: JsonObject) -> None:
    codec.write_text(job.directory / "request.json", codec.to_json(request) + "\n")
    codec.write_text(written.path, written.text)


def _followed(job: LauncherJob, written: JobFile, launcher: str, request: JsonObject, wait_s: float) -> JsonObject:
    """Submit the job, unless it was submitted before, and return the report of its run once there is one. Raises
    PlannerError.
    """
    submission = scheduled.recorded(job.directory)
    if submission is None:
        _write(job, written, request)
        submission = scheduled.submit(written, launcher, name=job.name)
    elif codec.to_json(codec.read_json(job.directory / "request.json")) != codec.to_json(request):
        raise BadInput(f"{job.directory} holds another run", why="it was submitted before", remedy="--out elsewhere")
    try:
        return scheduled.follow(job, submission, wait_s, tell=output.progress)
    except KeyboardInterrupt:
        scheduled.cancel(job.directory)
        raise
    finally:
        output.end_progress()
