"""Run a plan with the executor as a child process, and read its report."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from planner.io import child
from topology import codec
from topology.codec import JsonObject
from topology.errors import BadPlan, PlannerError, UserError
from topology.units import MIB

MODULE = "executor.run.apply"
REPORT_S = 30.0  # seconds to report what the ranks of a killed executor have recorded
FULL_BYTES = MIB  # bytes; less than a report and its log need


def arguments(request: Path, out: Path, budget_s: float) -> list[str]:
    """Return the arguments of the executor's module."""
    return [f"--request={request}", f"--out={out}", f"--budget={budget_s:g}"]


def command(request: Path, out: Path, budget_s: float) -> list[str]:
    """Return the argument list of the child process."""
    return child.module_command(MODULE, arguments(request, out, budget_s))


def ranks_command(ranks: int, request: Path, out: Path) -> list[str]:
    """Return the torchrun command line that the executor runs, as a user would type it."""
    return [
        "torchrun",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
        "-m",
        "executor.run.worker",
        f"--request={request}",
        f"--out={out / 'records'}",
    ]


def require_torch() -> None:
    """Raise PlannerError (exit 1) if the executor cannot run."""
    if importlib.util.find_spec("torch") is None:
        raise PlannerError(
            "torch is not installed, so no plan can be run",
            why="the executor runs plans with torch.distributed",
            remedy='pip install "meshwright[exec]"; --dry-run works without',
        )


def run(request: JsonObject, out: Path, budget_s: float, progress: Callable[[str], None]) -> JsonObject:
    """Run the request into the directory `out` and return its report, `run.json`.

    If the executor was killed, the report has what its ranks recorded. Raises BadPlan when the executor cannot run the
    plan, PlannerError when there is no report, and KeyboardInterrupt when interrupted, after all ranks have ended;
    `out` then has a report of what was measured until then.
    """
    path, report = out / "request.json", out / "run.json"
    codec.write_text(path, codec.to_json(request) + "\n")
    report.unlink(missing_ok=True)
    shown = ""

    def watch() -> None:
        nonlocal shown
        phase = _phase(out / "records" / "rank0.beat")
        if phase != shown:
            shown = phase
            progress(phase)

    with (out / "executor.txt").open("wb") as log:
        code = child.run_module(MODULE, arguments(path, out, budget_s), budget_s=budget_s, output=log, watch=watch)
        if code is not None and code < 0 and any((out / "records").glob("rank*.jsonl")):
            killed = [*arguments(path, out, budget_s), f"--killed={-code}"]
            child.run_module(MODULE, killed, budget_s=REPORT_S, output=log)
    if not report.is_file():
        raise _no_report(code, out)
    document = codec.read_json(report)
    if not isinstance(document, dict):
        raise PlannerError(f"{report} is not a report")
    if code is None:  # it was terminated, and reports that as an interrupt
        document |= {"status": "overrun", "complete": False, "exit_code": 1}
        document["failure"] = {"rank": None, "message": "the executor did not end within its budget and was ended"}
    return document


def _no_report(code: int | None, out: Path) -> PlannerError:
    free = shutil.disk_usage(out).free
    if free < FULL_BYTES:
        return PlannerError(
            "the run left no report",
            why=f"the disk of {out} is full: {free / 2**10:.0f} KiB are free",
            remedy="free the disk, or --out elsewhere",
        )
    log = codec.read_text(out / "executor.txt").strip()
    if code == UserError.exit_code:
        return BadPlan(log.removeprefix("error: "))
    how = "it did not end within its budget and was ended" if code is None else f"it ended with code {code}"
    _, _, error = log.rpartition("error: ")
    message = "; ".join(line.strip() for line in error.splitlines()) if error != log else (log.splitlines() or [""])[-1]
    return PlannerError("the run left no report", why=f"{how}: {message}" if message else how, remedy=f"see {out}")


def _phase(beat: Path) -> str:
    try:
        return str(json.loads(beat.read_text(encoding="utf-8"))["phase"])
    except (OSError, ValueError, KeyError, TypeError):
        return "starting"
