"""`planner apply --launcher`: the run as a job of a scheduler, written, submitted and followed."""

from __future__ import annotations

from pathlib import Path

from planner.io import output
from planner.io.inputs import parse_seconds
from planner.io.printable import printable
from planner.question.plan_file import load_plan
from planner.requests.runs import Apply
from planner.runs import scheduled
from planner.runs.planned_run import PlannedRun, cpu_run, default_job, job_run
from planner.runs.schedulers import launchers
from planner.runs.schedulers.launchers import JobFile, LauncherJob
from topology import codec
from topology.codec import JsonObject
from topology.errors import BadInput, UserError

MOST_HOURS = 24 * 14
NODES_WITHOUT_PLAN = 2  # two at least, so that they have to find each other


def write(asked: Apply, *, folder: Path, budget_s: float, wait_s: float, steps: int) -> JsonObject | None:
    """Write the request and the job's file into `folder`; with `dry_run` show them instead.

    With `submit` and `wait_s`, return the run's report once it has ended.
    """
    launcher, submit, dry_run = asked.launcher, asked.submit, asked.dry_run
    if launcher not in launchers.LAUNCHERS:
        raise UserError(f"--launcher is {launcher!r}", remedy=f"one of {', '.join(launchers.LAUNCHERS)}")
    launchers.require_settings(launcher, image=asked.image, volume=asked.volume, endpoint=asked.endpoint)
    run, nodes = _run(asked)
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


def _run(asked: Apply) -> tuple[PlannedRun, int]:
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
