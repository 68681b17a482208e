"""Have the executor run a plan, and read its report."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner import child
from topology import codec
from topology.errors import BadPlan, PlannerError, UserError

MODULE = "executor.apply_run"


def arguments(request: Path, out: Path, budget_s: float) -> list[str]:
    """Return what the executor's module is given."""
    return [f"--request={request}", f"--out={out}", f"--budget={budget_s:g}"]


def command(request: Path, out: Path, budget_s: float) -> list[str]:
    """Return the argument list that is started."""
    return child.command(MODULE, arguments(request, out, budget_s))


def ranks_command(ranks: int, request: Path, out: Path) -> list[str]:
    """Return what the executor starts in turn, as a person would type it: torch's elastic agent with our worker."""
    return [
        "torchrun",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
        "-m",
        "executor.worker",
        f"--request={request}",
        f"--out={out / 'records'}",
    ]


def require_torch() -> None:
    """Raise PlannerError (exit 1) where the executor cannot run."""
    if importlib.util.find_spec("torch") is None:
        raise PlannerError(
            "torch is not installed, so no plan can be run",
            why="the executor runs plans with torch.distributed",
            remedy='pip install "meshwright[exec]"; --dry-run works without',
        )


def run(request: dict[str, Any], out: Path, budget_s: float, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the request into the directory `out` and return its report, `run.json`.

    Raises BadPlan when the executor cannot run the plan, PlannerError when there is no report, and KeyboardInterrupt
    when interrupted, after the ranks are gone; the report of what had been measured then lies in `out`.
    """
    path, report = out / "request.json", out / "run.json"
    codec.write_text(path, codec.to_json(request) + "\n")
    report.unlink(missing_ok=True)
    said = ""

    def watch() -> None:
        nonlocal said
        phase = _phase(out / "records" / "rank0.beat")
        if phase != said:
            said = phase
            progress(phase)

    with (out / "executor.txt").open("wb") as log:
        code = child.run(MODULE, arguments(path, out, budget_s), budget_s=budget_s, output=log, watch=watch)
    if not report.is_file():
        raise _no_report(code, out)
    document = codec.read_json(report)
    if not isinstance(document, dict):
        raise PlannerError(f"{report} is not a report")
    if code is None:  # its ranks had been ended when it was asked to end, which it took for an interrupt
        document |= {"status": "overrun", "complete": False, "exit_code": 1}
        document["failure"] = {"rank": None, "message": "the executor did not end within its budget and was ended"}
    return document


def _no_report(code: int | None, out: Path) -> PlannerError:
    words = codec.read_text(out / "executor.txt").strip()
    if code == UserError.exit_code:
        return BadPlan(words.removeprefix("error: "))
    how = "it did not end within its budget and was ended" if code is None else f"it ended with code {code}"
    _, _, own = words.rpartition("error: ")
    said = "; ".join(line.strip() for line in own.splitlines()) if own != words else (words.splitlines() or [""])[-1]
    return PlannerError("the run left no report", why=f"{how}: {said}" if said else how, remedy=f"see {out}")


def _phase(beat: Path) -> str:
    try:
        return str(json.loads(beat.read_text(encoding="utf-8"))["phase"])
    except (OSError, ValueError, KeyError, TypeError):
        return "starting"
