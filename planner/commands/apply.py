"""`planner apply`: run a plan for real, check its numbers, and lay what was measured beside what was predicted."""

from __future__ import annotations

import os
import shlex
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from planner.commands import serve
from planner.commands.apply_job import patience_s, write
from planner.commands.doctor import budget_s
from planner.commands.flags import options
from planner.explain.tables import degrees_text
from planner.io import output
from planner.io.output import SCHEMA_VERSION
from planner.io.printable import printable
from planner.question.plan_file import load_plan
from planner.runs import apply_process, apply_report, runs_store, scheduled
from planner.runs.comparison import compare
from planner.runs.planned_run import PlannedRun, cpu_run, cuda_run, default_run
from simulator.config.plan import MESH_AXES, rank_grid
from topology import codec
from topology.errors import BadInput, PlannerError, UserError
from topology.health.diagnose import diagnose
from topology.probe.from_machine import probe_machine

DEVICES = ("cuda", "cpu")
STEPS = 10
LEAST_FREE_BYTES = 64 * 2**20


def apply(
    plan: Annotated[
        Path | None, typer.Argument(help="Plan file of planner suggest --out; without one, a tiny built-in CPU run.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be started, and start nothing.")] = False,
    budget: Annotated[str, typer.Option("--budget", help="Time for everything, such as 60s or 2m.")] = "120s",
    device: Annotated[str | None, typer.Option("--device", help="cuda, or cpu to check numbers only.")] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, max=1000, help=f"Steps to measure, after warm-up; default {STEPS}.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Directory for the run; default: a new one here.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Use --out though it is not empty.")] = False,
    allow_busy: Annotated[bool, typer.Option("--allow-busy", help="Run though others use the GPUs.")] = False,
    own_table: Annotated[bool, typer.Option("--own-table", help="Run the simulator's pipeline table.")] = False,
    tolerance: options.Tolerance = None,
    launcher: Annotated[
        str, typer.Option("--launcher", help="local, or write a job for torchrun, slurm or trainjob.")
    ] = "local",
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes of a job; default: as planned.")] = None,
    endpoint: Annotated[str | None, typer.Option("--endpoint", help="HOST:PORT where torchrun's agents meet.")] = None,
    job_name: Annotated[str, typer.Option("--job-name", help="Name of a job.")] = "meshwright",
    image: Annotated[str | None, typer.Option("--image", help="Container image of a trainjob.")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Hand the job to sbatch or kubectl.")] = False,
    wait: Annotated[
        str, typer.Option("--wait", help="Follow a submitted job for so long, such as 12h, and report its run.")
    ] = "0h",
    learn: Annotated[
        Path | None, typer.Option("--learn", help="Of a serving plan: time steps, too, and add all to this profile.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Run a plan on this machine and report measured against predicted.

    A serving plan is served by the executor: its requests arrive, and what clients saw stands beside the prediction.

    Machine and plan are compared before anything starts. Numbers are checked against one process before anything is
    timed. Every run is kept: planner runs lists them, planner report explains one. Exit code 1 when the plan is stale or
    the run failed, 4 when memory was full or the step is outside --tolerance, without it outside its predicted interval.

    With --wait, the run of a scheduler is followed and reported like one here; Ctrl-C cancels it. Asked again with the
    same --out, a job that was submitted is followed, and not submitted again.
    """
    given = locals()  # first of all, so that it holds the arguments and nothing else
    seconds, wait_s = budget_s(budget), patience_s(wait)
    if device is not None and device not in DEVICES:
        raise UserError(f"--device is {device!r}", remedy=f"one of {', '.join(DEVICES)}")
    if launcher != "local":
        code = _as_job(given, seconds, wait_s)
    elif nodes is not None or endpoint is not None or image is not None or submit or wait_s:
        raise UserError(
            "--nodes, --endpoint, --image, --submit and --wait are for jobs", remedy="--launcher slurm, say"
        )
    elif serve.is_serving_plan(plan):
        _refuse_training(steps=steps, own_table=own_table, tolerance=tolerance, allow_busy=allow_busy)
        _serve(plan, device, _folder(out, force=force), seconds, learn=learn, dry_run=dry_run, json=json)
        return
    elif learn is not None:
        raise UserError("--learn: for a serving plan", remedy="planner report RUN --learn PROFILE")
    else:
        code = _here(given, seconds)
    if code:
        raise typer.Exit(code)


def _as_job(given: dict[str, Any], seconds: float, wait_s: float) -> int:
    """Write a launcher's job, and submit and follow it where that is asked; return the exit code."""
    out = given["out"]
    again = wait_s > 0 and out is not None and scheduled.recorded(out) is not None
    folder = _folder(out, force=given["force"] or again)
    document = write(
        given["plan"],
        **{name: given[name] for name in ("launcher", "nodes", "endpoint", "image", "submit", "own_table", "dry_run")},
        name=given["job_name"],
        wait_s=wait_s,
        folder=folder,
        budget_s=seconds,
        steps=given["steps"] or STEPS,
        json=given["json"],
    )
    return 0 if document is None else _concluded(document, folder, given["tolerance"], json=given["json"])


def _here(given: dict[str, Any], seconds: float) -> int:
    """Run a training plan on this machine, or show what would be run; return the exit code."""
    run = _planned(given["plan"], given["device"], allow_busy=given["allow_busy"])
    if given["tolerance"] is not None and run.predicted is None:
        raise UserError(
            "--tolerance has nothing to hold the step against",
            why="only runs of a saved plan on the planned GPUs are predicted",
            remedy="leave --tolerance out, or give a plan and GPUs",
        )
    folder = _folder(given["out"], force=given["force"])
    request = run.request(steps=given["steps"] or STEPS, budget_s=seconds, own_table=given["own_table"])
    if given["dry_run"]:
        _show(run, request, folder, seconds, json=given["json"])
        return 0
    return _run(run, request, folder, seconds, given["tolerance"], json=given["json"])


def _refuse_training(*, steps: int | None, own_table: bool, tolerance: float | None, allow_busy: bool) -> None:
    """Raise UserError for options that only a training plan has."""
    said = {
        "--steps": steps is not None,
        "--own-table": own_table,
        "--tolerance": tolerance is not None,
        "--allow-busy": allow_busy,
    }
    given = [name for name, there in said.items() if there]
    if given:
        raise UserError(f"{', '.join(given)}: not for a serving plan", remedy=f"leave out {', '.join(given)}")


def _serve(
    plan: Path | None,
    device: str | None,
    folder: Path,
    seconds: float,
    *,
    learn: Path | None,
    dry_run: bool,
    json: bool,
) -> None:
    """Run a serving plan; raise Exit with its code."""
    if plan is None:
        return
    if not dry_run:
        apply_process.require_torch()
        output.require_room(folder, LEAST_FREE_BYTES, "records and timelines of a run")
    code = serve.apply_serving_plan(
        plan, device=device or "cuda", folder=folder, budget_s=seconds, learn=learn, dry_run=dry_run, json=json
    )
    if code:
        raise typer.Exit(code)


def _run(
    run: PlannedRun, request: dict[str, Any], folder: Path, seconds: float, tolerance: float | None, *, json: bool
) -> int:
    """Run the plan, keep and report what came of it, and return the exit code."""
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


def _concluded(document: dict[str, Any], folder: Path, tolerance: float | None, *, json: bool) -> int:
    """Keep and report a run that has been made, and return the exit code."""
    document["comparison"] = comparison = compare(document, tolerance)
    _keep(document, folder)
    _report(document, folder, json=json)
    code = int(document["exit_code"])
    if code == 0 and document.get("predicted") is not None and not (comparison and comparison["within"]):
        return 4
    return code


def _keep(document: dict[str, Any], folder: Path) -> None:
    """Write the report, and copy it to the store of runs; neither may cost a run that has been made."""
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


def _folder(out: Path | None, *, force: bool) -> Path:
    """Return the run's directory. Raises BadInput when it has something in it already."""
    if out is None:
        stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        out = Path(f"meshwright-run-{stamp}")
    if out.exists() and not out.is_dir():
        raise BadInput(f"{out} is a file", remedy="name a directory: --out run")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise BadInput(f"{out} is not empty", why="a run is not overwritten by accident", remedy="--force")
    return out.resolve()


def _show(run: PlannedRun, request: dict[str, Any], folder: Path, seconds: float, *, json: bool) -> None:
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


def _report(document: dict[str, Any], folder: Path, *, json: bool) -> None:
    if json:
        output.emit_json({**document, "directory": str(folder)})
        return
    for line in apply_report.lines(document, document["comparison"]):
        print(printable(line))
    print(printable(f"saved {folder / 'run.json'}"))
    if document.get("predicted"):
        print(printable(f"next: planner report {document['id']}"))


def _interrupted(folder: Path, *, json: bool) -> None:
    """Show what there is of a run that was interrupted."""
    report = folder / "run.json"
    if report.is_file():
        document = codec.read_json(report)
        document["comparison"] = None
        _keep(document, folder)
        _report(document, folder, json=json)
