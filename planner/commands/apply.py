"""`planner apply`: run a plan for real, check its numbers, and lay what was measured beside what was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands import options

if TYPE_CHECKING:
    from planner.apply_question import Question

DEVICES = ("cuda", "cpu")
ROOM_BYTES = 64 * 2**20


def apply(
    plan: Annotated[
        Path | None, typer.Argument(help="Plan file of planner suggest --out; without one, a tiny built-in CPU run.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be started, and start nothing.")] = False,
    budget: Annotated[str, typer.Option("--budget", help="Time for everything, such as 60s or 2m.")] = "120s",
    device: Annotated[str | None, typer.Option("--device", help="cuda, or cpu to check numbers only.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=1000, help="Steps to measure, after warm-up.")] = 10,
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
    json: options.Json = False,
) -> None:
    """Run a plan on this machine and report measured against predicted.

    Machine and plan are compared before anything starts. Numbers are checked against one process before anything is
    timed. Every run is kept: planner runs lists them, planner report explains one. Exit code 1 when the plan is stale or
    the run failed, 4 when memory was full or the step is outside --tolerance, without it outside its predicted interval.
    """
    from planner import apply_process, output  # noqa: PLC0415 - keeps `--help` light
    from planner.commands.doctor import budget_s  # noqa: PLC0415 - as above
    from planner.comparison import compare  # noqa: PLC0415 - as above
    from topology.errors import UserError  # noqa: PLC0415 - as above

    seconds = budget_s(budget)
    if device is not None and device not in DEVICES:
        raise UserError(f"--device is {device!r}", remedy=f"one of {', '.join(DEVICES)}")
    if launcher != "local":
        from planner.commands.apply_job import write  # noqa: PLC0415 - as above

        write(
            plan,
            launcher=launcher,
            nodes=nodes,
            endpoint=endpoint,
            name=job_name,
            image=image,
            submit=submit,
            folder=_folder(out, force=force),
            budget_s=seconds,
            steps=steps,
            own_table=own_table,
            dry_run=dry_run,
            json=json,
        )
        return
    if nodes is not None or endpoint is not None or image is not None or submit:
        raise UserError("--nodes, --endpoint, --image and --submit are for jobs", remedy="--launcher slurm, say")
    question = _question(plan, device, allow_busy=allow_busy)
    if tolerance is not None and question.predicted is None:
        raise UserError(
            "--tolerance has nothing to hold the step against",
            why="only runs of a saved plan on the planned GPUs are predicted",
            remedy="leave --tolerance out, or give a plan and GPUs",
        )
    folder = _folder(out, force=force)
    request = question.request(steps=steps, budget_s=seconds, own_table=own_table)
    if dry_run:
        _show(question, request, folder, seconds, json=json)
        return
    apply_process.require_torch()
    _make(folder)
    for note in question.notes:
        output.warn(f"note: {note}")
    try:
        document = apply_process.run(request, folder, seconds, lambda phase: output.progress(f"{phase} ..."))
    except KeyboardInterrupt:
        output.end_progress()
        _interrupted(folder, json=json)
        raise
    output.end_progress()
    document["comparison"] = comparison = compare(document, tolerance)
    _keep(document, folder)
    _report(document, folder, json=json)
    code = int(document["exit_code"])
    if code == 0 and question.predicted is not None and not (comparison and comparison["within"]):
        code = 4
    if code:
        raise typer.Exit(code)


def _make(folder: Path) -> None:
    """Make the run's directory, and see that there is room in it before anything starts."""
    import shutil  # noqa: PLC0415 - keeps `--help` light

    from topology.errors import BadInput, PlannerError  # noqa: PLC0415 - as above

    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise BadInput(f"cannot write {folder}", why=error.strerror or str(error), remedy="--out elsewhere") from error
    if free < ROOM_BYTES:
        raise PlannerError(
            f"there are {free / 2**20:.0f} MiB free for {folder}",
            why=f"records and timelines of a run take up to {ROOM_BYTES / 2**20:.0f} MiB",
            remedy="free the disk, or --out elsewhere",
        )


def _keep(document: dict[str, Any], folder: Path) -> None:
    """Write the report, and copy it to the store of runs; neither may cost a run that has been made."""
    from planner import output, runs_store  # noqa: PLC0415 - keeps `--help` light
    from topology import codec  # noqa: PLC0415 - as above
    from topology.errors import PlannerError  # noqa: PLC0415 - as above

    document["id"] = runs_store.run_id(document)
    try:
        codec.write_text(folder / "run.json", codec.to_json(document) + "\n")
        runs_store.keep(document, folder)
    except PlannerError as error:
        output.warn(f"warning: {error}")


def _question(plan: Path | None, device: str | None, *, allow_busy: bool) -> Question:
    import os  # noqa: PLC0415 - keeps `--help` light

    from planner.apply_question import cpu_question, cuda_question, default_question  # noqa: PLC0415 - as above
    from planner.plan_file import load_plan  # noqa: PLC0415 - as above
    from topology.errors import UserError  # noqa: PLC0415 - as above

    if plan is None:
        if device == "cuda":
            raise UserError("--device cuda needs a plan", remedy="planner suggest ... --out plan.json, then apply that")
        return default_question(os.cpu_count() or 1)
    content = load_plan(plan)
    if device == "cpu":
        return cpu_question(content, _free_bytes())
    from topology.health import diagnose  # noqa: PLC0415 - keeps `--help` light
    from topology.probe_machine import probe_machine  # noqa: PLC0415 - as above

    here = probe_machine()
    return cuda_question(content, here, diagnose(here), allow_busy=allow_busy)


def _free_bytes() -> int | None:
    """Return the memory that new processes can have, or None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _folder(out: Path | None, *, force: bool) -> Path:
    """Return the run's directory. Raises BadInput when it has something in it already."""
    from datetime import datetime  # noqa: PLC0415 - keeps `--help` light

    from topology.errors import BadInput  # noqa: PLC0415 - as above

    if out is None:
        stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        out = Path(f"meshwright-run-{stamp}")
    if out.exists() and not out.is_dir():
        raise BadInput(f"{out} is a file", remedy="name a directory: --out run")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise BadInput(f"{out} is not empty", why="a run is not overwritten by accident", remedy="--force")
    return out.resolve()


def _show(question: Question, request: dict[str, Any], folder: Path, seconds: float, *, json: bool) -> None:
    import shlex  # noqa: PLC0415 - keeps `--help` light

    from planner import apply_process, output  # noqa: PLC0415 - as above
    from planner.output import SCHEMA_VERSION, printable  # noqa: PLC0415 - as above
    from planner.tables import arithmetic  # noqa: PLC0415 - as above
    from simulator.plan import MESH_AXES, rank_grid  # noqa: PLC0415 - as above

    plan, path = question.plan, folder / "request.json"
    started = apply_process.command(path, folder, seconds)
    ranks = apply_process.ranks_command(plan.gpus, path, folder)
    grid = rank_grid(plan)
    places = [
        {
            "rank": rank,
            "device": f"cuda:{question.gpus[rank]}" if question.gpus else question.device,
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
                "notes": list(question.notes),
                "request": request,
            }
        )
        return
    print(printable(f"would run {question.model.name}, {arithmetic(plan)}, on {plan.gpus} {question.device} ranks"))
    for note in question.notes:
        print(printable(f"note      {note}"))
    print(printable(f"command   {shlex.join(started)}"))
    print(printable(f"  starts  {shlex.join(ranks)}"))
    for place in places:
        at = ", ".join(f"{axis} {place[axis]}" for axis in MESH_AXES if int(getattr(plan, axis)) > 1)
        print(f"rank {place['rank']:<4} {place['device']:<8} {at}")


def _report(document: dict[str, Any], folder: Path, *, json: bool) -> None:
    from planner import apply_report, output  # noqa: PLC0415 - keeps `--help` light

    if json:
        output.emit_json({**document, "directory": str(folder)})
        return
    for line in apply_report.lines(document, document["comparison"]):
        print(output.printable(line))
    print(output.printable(f"saved {folder / 'run.json'}"))
    if document.get("predicted"):
        print(output.printable(f"next: planner report {document['id']}"))


def _interrupted(folder: Path, *, json: bool) -> None:
    """Show what there is of a run that was interrupted."""
    from topology import codec  # noqa: PLC0415 - keeps `--help` light

    report = folder / "run.json"
    if report.is_file():
        document = codec.read_json(report)
        document["comparison"] = None
        _keep(document, folder)
        _report(document, folder, json=json)
