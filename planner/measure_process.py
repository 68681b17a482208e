"""Start the executor's measurement as a process of its own: the planner never imports torch, nor the executor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from topology.errors import ProbeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from topology.measured import Measured

ROOT = Path(__file__).resolve().parents[1]
LATE_S = 20.0  # beyond the budget: ending children takes time when a driver is stuck
GRACE_S = 15.0


def measure(
    indices: Sequence[int], *, budget_s: float, machine: str, allow_busy: bool = False, device: str = "cuda"
) -> Measured:
    """Measure GPUs `indices` (nvidia-smi's, in CUDA's order) within `budget_s` seconds.

    Raises ProbeError when nothing could be measured; KeyboardInterrupt after the worker has tidied up.
    """
    from topology.measured import read_measured  # noqa: PLC0415 - keeps `--help` light

    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        out = Path(folder) / "measured.json"
        command = [
            sys.executable,
            "-m",
            "executor.guard",  # if we are killed, the kernel tells the worker, which then ends its own children
            str(os.getpid()),
            sys.executable,
            "-m",
            "executor.doctor_worker",
            f"--out={out}",
            f"--budget={budget_s:g}",
            f"--device={device}",
            f"--indices={','.join(map(str, indices))}",
            f"--machine={machine}",
            *(["--allow-busy"] if allow_busy else []),
        ]
        inherited = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join([str(ROOT), inherited] if inherited else [str(ROOT)])
        # Its standard output is ours on standard error: ours holds the answer.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_descriptor() else subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
        try:
            process.wait(budget_s + LATE_S)
        except subprocess.TimeoutExpired:
            _end(process)
        except KeyboardInterrupt:
            _end(process)
            raise
        if process.returncode == 130:
            raise KeyboardInterrupt
        if not out.is_file():
            raise ProbeError(
                "nothing could be measured",
                why=f"the measuring process ended with code {process.returncode}; its words are above",
                remedy="run planner doctor without --measure for what can be read",
            )
        return read_measured(out)


def _has_descriptor() -> bool:
    try:
        sys.stderr.fileno()
    except (OSError, ValueError):  # a stream without a descriptor, as in tests
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the worker to end its children and itself; kill it if it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(GRACE_S)
