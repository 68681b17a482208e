"""Run a module of the executor as a child process, since the planner imports no torch, and make sure that it ends.

The child gets an argument list and no shell, and a session of its own, so that Ctrl-C reaches this process only, which
then ends the child in order. It runs under `executor.launch.guard`, so that the kernel signals it when this process is
killed. It keeps to its time budget itself; if someone stopped it (SIGSTOP), it is continued in time for that. If it
overruns, it is terminated and then killed.
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

import psutil

from topology.processes import end_tree

ROOT = Path(__file__).resolve().parents[2]
OVERRUN_S = 20.0  # seconds allowed beyond the budget: ending ranks takes time when a driver is stuck
ENDING_S, ENDING_SHARE = 10.0, 0.3  # what a child keeps of its budget for ending: seconds, or a share if less
GRACE_S = 15.0
POLL_S = 0.2
INTERRUPTED = 130


def module_command(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the argument list that runs a module, as a user would type it."""
    return [sys.executable, "-m", module, *arguments]


def run_module(
    module: str,
    arguments: Sequence[str],
    *,
    budget_s: float,
    output: IO[bytes] | int,
    late_s: float = OVERRUN_S,
    watch: Callable[[], None] = lambda: None,
) -> int | None:
    """Run a module and return its exit code, or None where it overran `budget_s` by more than `late_s` and was ended.

    `output` receives its standard output and error; `watch` is called while it runs. Raises KeyboardInterrupt when this
    process is interrupted (Ctrl-C or SIGTERM), after ending the child, or when the child exits as interrupted.
    """
    inherited = os.environ.get("PYTHONPATH", "")
    process = subprocess.Popen(
        [sys.executable, "-m", "executor.launch.guard", str(os.getpid()), *module_command(module, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output != subprocess.DEVNULL else None,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), inherited] if inherited else [str(ROOT)]),
            "PYTHONSAFEPATH": "1",  # a torch.py in the current folder must not be imported
        },
        start_new_session=True,
    )
    started = time.monotonic()
    ending, deadline = started + budget_s - min(ENDING_S, ENDING_SHARE * budget_s), started + budget_s + late_s
    try:
        with _terminate_as_interrupt():
            while process.poll() is None:
                if time.monotonic() > deadline:
                    end_tree(process, GRACE_S)
                    return None
                if time.monotonic() > ending and _stopped(process):
                    process.send_signal(signal.SIGCONT)
                watch()
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        end_tree(process, GRACE_S)
        raise
    if process.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    return process.returncode


def _stopped(process: subprocess.Popen[bytes]) -> bool:
    """Return whether the process was stopped (SIGSTOP), so that it cannot notice the end of its time."""
    try:
        return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def exit_text(code: int | None) -> str:
    """Return as text how a process ended, from the `code` that `run` returned."""
    return "overran its budget and was ended" if code is None else f"ended with code {code}"


def standard_error() -> int:
    """Return the file descriptor for a child's messages when standard output is reserved for the answer."""
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError):  # a stream without a descriptor, as in tests
        return subprocess.DEVNULL


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM, and SIGHUP when a terminal closes, like Ctrl-C, so that children end and temporary folders go.

    Only the main thread may set a handler. A signal that is ignored (nohup) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
