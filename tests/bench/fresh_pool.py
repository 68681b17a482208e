"""Processes for one run after another, each as fresh as a new program's but without importing torch again.

Ranks are forked from a server that has imported torch and torchtitan and never touched a GPU: a run has its own
contexts, process groups and allocators, and one that hangs or fails ends alone. Where a forked process cannot use the
GPU, every rank is a new interpreter instead.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from executor.calibrate.run import environment as calibration_environment
from executor.gpu.state import run_text
from executor.launch.local_ranks import FORCED_VARIABLES, REMOVED_VARIABLES, ROOT

POLL_S = 0.05
ENDING_S = 4.0  # after one rank failed, for the others to say so themselves
RELEASE_S = 10.0
IDLE_MIB = 2048  # a GPU with less in use is free
PROBE_S = 60.0


class Pool:
    """Runs one request at a time. `launch_s`: how long this host takes to launch a small kernel; None on a CPU."""

    def __init__(self, device: str, start: str = "forkserver") -> None:
        self.device = device
        self.launch_s: float | None = None
        for name in REMOVED_VARIABLES:
            os.environ.pop(name, None)
        os.environ |= {**calibration_environment(device), **FORCED_VARIABLES, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        inherited = os.environ.get("PYTHONPATH", "")
        if str(ROOT) not in inherited.split(os.pathsep):
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), inherited)))
        self.context: Any = multiprocessing.get_context(start)
        if start == "forkserver":
            self.context.set_forkserver_preload(["tests.bench.fresh_worker"])
        if device == "cuda" and not self._can_compute():
            print("forked processes cannot use the GPU: new interpreters instead", flush=True)
            self.context = multiprocessing.get_context("spawn")

    def _can_compute(self) -> bool:
        from tests.bench.fresh_probe import touch

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "launch_s"
            process = self.context.Process(target=touch, args=(str(path),))
            process.start()
            process.join(PROBE_S)
            if process.is_alive():
                process.kill()
            if process.exitcode == 0:
                self.launch_s = float(path.read_text())
        return process.exitcode == 0

    def run(self, request: dict[str, Any], folder: Path, limit_s: float) -> dict[str, Any]:
        """Return how a run ended within `limit_s` seconds: its status, and what its ranks said of it."""
        from tests.bench.fresh_probe import rank_main

        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        port = _free_port()
        ranks = [
            self.context.Process(target=rank_main, args=(rank, request, str(folder), port))
            for rank in range(request["gpus"])
        ]
        for process in ranks:
            process.start()
        timed_out = _wait(ranks, began + limit_s)
        _end(ranks)
        if self.device == "cuda":
            _released()
        said = [_read(folder / f"rank{rank}.json") for rank in range(request["gpus"])]
        return summary(said, [_tail(folder / f"rank{rank}.log") for rank in range(request["gpus"])], limit_s if timed_out else None) | {
            "seconds": round(time.monotonic() - began, 1)
        }  # fmt: skip


def summary(said: list[dict[str, Any]], logs: list[str], timeout_s: float | None) -> dict[str, Any]:
    """Return the status of a run, its cause where it failed, and what was measured, the fullest rank's memory."""
    statuses = [one.get("status") for one in said]
    timed = bool(said) and all("steps_s" in one for one in said)
    measured = None
    if timed:
        steps = sorted(said[0]["steps_s"])
        measured = {
            "step_s": steps[len(steps) // 2] if len(steps) % 2 else sum(steps[len(steps) // 2 - 1 : len(steps) // 2 + 1]) / 2,
            "steps_s": [round(seconds, 6) for seconds in said[0]["steps_s"]],
            "reserved_bytes": max((one.get("reserved_bytes", 0) for one in said), default=0),
            "reserved_by_rank": [one.get("reserved_bytes", 0) for one in said],
            "retries": sum(one.get("retries", 0) for one in said),
            "mean_sm_clock_hz": said[0].get("mean_sm_clock_hz"),
            "profiled": said[0].get("profiled"),
        }  # fmt: skip
    phases = said[0].get("phases_s", {}) if said else {}
    if timed:  # what failed after the last step cost a picture, not the measurement
        return {"status": "ok", "cause": "", "measured": measured, "phases_s": phases}
    full = [one for one in said if one.get("status") == "out of memory"]
    failed = [one for one in said if one.get("status") == "failed"]
    if full:
        return {"status": "out of memory", "cause": full[0]["cause"], "measured": None, "phases_s": phases}
    if timeout_s is not None and not failed:
        where = ", ".join(str(one.get("phase", "starting")) for one in said)
        return {"status": "failed", "cause": f"not over after {timeout_s:.0f} s: {where}", "measured": None, "phases_s": phases}  # fmt: skip
    cause = failed[0]["cause"] if failed else f"a process ended without a word ({statuses})"
    return {"status": "failed", "cause": cause, "measured": None, "phases_s": phases, "log": logs[0]}


def _wait(ranks: list[Any], until: float) -> bool:
    """Wait for all ranks, or for a failure and a little more; return whether time ran out."""
    failed_at = None
    while any(process.is_alive() for process in ranks):
        now = time.monotonic()
        if failed_at is None and any(process.exitcode not in {0, None} for process in ranks):
            failed_at = now
        if failed_at is not None and now - failed_at > ENDING_S:
            return False
        if now > until:
            return failed_at is None
        time.sleep(POLL_S)
    return False


def _end(ranks: list[Any]) -> None:
    """Kill each rank and whatever it started; each leads a session of its own."""
    for process in ranks:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            if process.is_alive():
                process.kill()
    for process in ranks:
        process.join(5.0)


def _released() -> None:
    """Wait until no GPU holds memory of the processes that have ended."""
    until = time.monotonic() + RELEASE_S
    while time.monotonic() < until:
        text = run_text(("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")) or ""
        if all(int(line) < IDLE_MIB for line in text.split() if line.isdigit()):
            return
        time.sleep(0.3)
    print("warning: a GPU is not empty", file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-1500:] if path.is_file() else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
