"""Start one of the executor's modules as a process of its own, and see that it ends: the planner imports no torch.

An argument list and no shell; a session of its own, so that Ctrl-C reaches us alone and we end the rest in order; and
`executor.guard` before it, so that the kernel tells it when we are killed. It keeps to its budget by itself; if it does
not, it is asked to end, and then made to.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

ROOT = Path(__file__).resolve().parents[1]
LATE_S = 20.0  # beyond the budget: ending ranks takes time when a driver is stuck
GRACE_S = 15.0
POLL_S = 0.2
INTERRUPTED = 130


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the argument list of a module of ours, as a person could type it."""
    return [sys.executable, "-m", module, *arguments]


def run(
    module: str,
    arguments: Sequence[str],
    *,
    budget_s: float,
    output: IO[bytes] | int,
    late_s: float = LATE_S,
    watch: Callable[[], None] = lambda: None,
) -> int | None:
    """Run a module and return its exit code, or None where it overran its budget and had to be ended.

    `output` takes its standard output and error; `watch` is called while it runs. Raises KeyboardInterrupt after it has
    been ended because we were interrupted (Ctrl-C or SIGTERM), or when it says that it was.
    """
    inherited = os.environ.get("PYTHONPATH", "")
    process = subprocess.Popen(
        [sys.executable, "-m", "executor.guard", str(os.getpid()), *command(module, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output != subprocess.DEVNULL else None,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), inherited] if inherited else [str(ROOT)]),
            "PYTHONSAFEPATH": "1",  # a torch.py in the current folder is not torch
        },
        start_new_session=True,
    )
    deadline = time.monotonic() + budget_s + late_s
    try:
        with _terminate_as_interrupt():
            while process.poll() is None:
                if time.monotonic() > deadline:
                    _end(process)
                    return None
                watch()
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        _end(process)
        raise
    if process.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    return process.returncode


def ended(code: int | None) -> str:
    """Say in words how a process ended that `run` returned `code` for."""
    return "overran its budget and was ended" if code is None else f"ended with code {code}"


def our_standard_error() -> int:
    """Return where a process may talk when our standard output holds the answer."""
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError):  # a stream without a descriptor, as in tests
        return subprocess.DEVNULL


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Whoever stops us by SIGTERM wants our processes gone, too. Only the main thread may listen."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end what it started and itself; kill it if it does not, or if Ctrl-C is pressed again."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait(GRACE_S)
