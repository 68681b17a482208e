"""Start the executor as a process of its own, watch it, and read its report: the planner imports no torch."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from topology import codec
from topology.errors import BadPlan, PlannerError, UserError

ROOT = Path(__file__).resolve().parents[1]
LATE_S = 15.0  # beyond the budget: ending ranks takes time when a driver is stuck
GRACE_S = 15.0
POLL_S = 0.2


def command(request: Path, out: Path, budget_s: float) -> list[str]:
    """Return the exact argument list that is started."""
    return [
        sys.executable,
        "-m",
        "executor.apply_run",
        f"--request={request}",
        f"--out={out}",
        f"--budget={budget_s:g}",
    ]


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

    Raises BadPlan when the executor cannot run the plan, PlannerError when there is no report, and KeyboardInterrupt when interrupted, after the ranks are gone; the
    report of what had been measured then lies in `out`.
    """
    path = out / "request.json"
    report = out / "run.json"
    codec.write_text(path, codec.to_json(request) + "\n")
    report.unlink(missing_ok=True)
    inherited = os.environ.get("PYTHONPATH", "")
    with (out / "executor.txt").open("wb") as log:
        process = subprocess.Popen(
            command(path, out, budget_s),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), inherited] if inherited else [str(ROOT)]),
                "PYTHONSAFEPATH": "1",
            },
            start_new_session=True,  # Ctrl-C reaches us alone, and we end the rest in order
        )
        try:
            _watch(process, out / "records" / "rank0.beat", time.monotonic() + budget_s + LATE_S, progress)
        except KeyboardInterrupt:
            _end(process)
            raise
    if process.returncode == 130:
        raise KeyboardInterrupt
    if not report.is_file():
        text = codec.read_text(out / "executor.txt").strip()
        if process.returncode == UserError.exit_code:
            raise BadPlan(text.removeprefix("error: "))
        words = text.splitlines()
        raise PlannerError(
            "the run left no report",
            why=words[-1] if words else f"the executor ended with code {process.returncode}",
            remedy=f"see {out}",
        )
    document = codec.read_json(report)
    if not isinstance(document, dict):
        raise PlannerError(f"{report} is not a report")
    return document


def _watch(process: subprocess.Popen[bytes], beat: Path, deadline: float, progress: Callable[[str], None]) -> None:
    said = ""
    while process.poll() is None:
        if time.monotonic() > deadline:
            _end(process)
            return
        phase = _phase(beat)
        if phase != said:
            said = phase
            progress(phase)
        time.sleep(POLL_S)


def _phase(beat: Path) -> str:
    try:
        return str(json.loads(beat.read_text(encoding="utf-8"))["phase"])
    except (OSError, ValueError, KeyError, TypeError):
        return "starting"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the executor to end its ranks and itself; kill it if it does not, or if Ctrl-C is pressed again."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait(GRACE_S)
