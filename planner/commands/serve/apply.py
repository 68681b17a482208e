"""`planner apply` of a serving plan: the deployment run by the executor, and compared with what was predicted."""

from __future__ import annotations

from pathlib import Path

from click.exceptions import Exit

from planner.commands.apply import LEAST_FREE_BYTES, folder_of, limits_s
from planner.io import child, output
from planner.io.output import SCHEMA_VERSION
from planner.io.printable import printable
from planner.requests.runs import Apply
from planner.runs import apply_process
from planner.serving import (
    TASK,
    AskedRun,
    add_to_profile,
    all_steps,
    asked_run,
    load_rows,
    load_serving,
    print_run,
    step_rows,
)
from simulator.serving.engine import engine_of
from topology import codec
from topology.codec import JsonObject
from topology.errors import PlannerError, UserError

MODULE = "executor.serving.run"


def apply(asked: Apply) -> None:
    """Run a saved deployment; raise Exit with 1 where the run failed, 4 where a load is outside its predicted
    interval.
    """
    seconds, _ = limits_s(asked)
    said = {
        "--launcher": asked.launcher != "local",
        "--steps": asked.steps is not None,
        "--own-table": asked.own_table,
        "--tolerance": asked.tolerance is not None,
        "--allow-busy": asked.allow_busy,
    }
    if wrong := ", ".join(name for name, there in said.items() if there):
        raise UserError(f"{wrong}: not for a serving plan", remedy=f"leave out {wrong}")
    folder = folder_of(asked.out, force=asked.force)
    if not asked.dry_run:
        apply_process.require_torch()
        output.require_room(folder, LEAST_FREE_BYTES, "records and timelines of a run")
    if code := _run(asked, folder, seconds):
        raise Exit(code)


def _run(asked: Apply, folder: Path, budget_s: float) -> int:
    """Run the deployment, or show what would run, and return the exit code.

    `asked.learn` is a profile to which the measurements, steps included, are added.
    """
    device, learn = asked.device or "cuda", asked.learn
    if learn is not None and device == "cpu":
        raise UserError("--learn needs GPUs", why="a profile is of one kind of GPU", remedy="leave out --device cpu")
    content = load_serving(str(asked.plan))
    run = asked_run(
        content.question,
        content.deployment.pool,
        steps=() if learn is None else all_steps(),
        prefill=content.deployment.prefill,
    )
    for note in run.notes:
        output.warn(f"note: {note}")
    request = run.request(device=device)
    arguments = [f"--request={folder / 'request.json'}", f"--out={folder}", f"--budget={budget_s:g}"]
    if asked.dry_run:
        command = child.module_command(MODULE, arguments)
        if asked.json:
            output.emit_json(
                {
                    "schema_version": SCHEMA_VERSION,
                    "task": TASK,
                    "dry_run": True,
                    "command": command,
                    "request": request,
                }
            )
        else:
            print(printable(f"would serve {content.question.model.name} on {request['tp']} {device} ranks"))
            print(printable(f"command   {' '.join(command)}"))
        return 0
    document = run_request(request, folder, budget_s)
    if learn is not None:
        output.warn(f"{learn}: {add_to_profile(document, learn)} samples of the run")
    if asked.json:
        output.emit_json({**document, "comparison": comparison(document), "directory": str(folder)})
    else:
        print_run(document)
        print(printable(f"saved {folder / 'serve.json'}"))
    if document["status"] != "finished":
        return 1
    return 0 if device == "cpu" or within(run, document) else 4


def run_request(request: JsonObject, folder: Path, budget_s: float) -> JsonObject:
    """Have the executor serve a request in `folder`; return its report. Raises PlannerError where there is none."""
    codec.make_folder(folder)
    codec.write_text(folder / "request.json", codec.to_json(request) + "\n")
    report = folder / "serve.json"
    report.unlink(missing_ok=True)
    arguments = [f"--request={folder / 'request.json'}", f"--out={folder}", f"--budget={budget_s:g}"]
    with (folder / "executor.txt").open("wb") as log:
        child.run_module(MODULE, arguments, budget_s=budget_s, output=log)
    if not report.is_file():
        said = codec.read_text(folder / "executor.txt").strip().removeprefix("error: ")
        raise PlannerError("the run left no report", why=said[-500:] or "it ended early", remedy=f"see {folder}")
    document = codec.read_json(report)
    if not isinstance(document, dict):
        raise PlannerError(f"{report} is not a report")
    return document


def comparison(document: JsonObject) -> JsonObject:
    """Return predicted and measured figures with their relative error."""
    return {
        "steps": [codec.to_builtins(row) | {"error": row.error} for row in step_rows(document)],
        "loads": {
            name: [codec.to_builtins(row) | {"error": row.error} for row in rows]
            for name, rows in load_rows(document).items()
        },
    }


def within(run: AskedRun, document: JsonObject) -> bool:
    """Return whether the mean time per token of every load is inside the engine's range."""
    spread = engine_of(run.deployment.engine).spread_tpot
    means = [row for rows in load_rows(document).values() for row in rows if row.what == "a token mean"]
    return all(1 / (1 + spread) <= row.measured / row.predicted <= 1 + spread for row in means)
