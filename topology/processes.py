"""Processes: the owner of one, its descendants, and how to end a tree of them.

The GPU driver reports host pids, which name other processes inside a container.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

HOST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of linux/proc_ns.h
NAMESPACE = Path("/proc/self/ns/pid")
POLL_S = 0.05


def process_owner(pid: int) -> str | None:
    """Return the user name of a host process; None inside a container or when the process has ended."""
    try:
        if str(NAMESPACE.readlink()) != HOST_PID_NAMESPACE:
            return None
        return psutil.Process(pid).username()
    except (OSError, psutil.Error):
        return None


def alive(process: psutil.Process) -> bool:
    """Return whether a process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.Error:
        return False


def descendants(pid: int) -> list[psutil.Process]:
    """Return the children of a process, recursively; empty when it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to processes; those that have ended or belong to others are skipped."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def end_tree(process: subprocess.Popen[bytes], grace_s: float) -> tuple[int, ...]:
    """Send SIGTERM to a process; after `grace_s`, or at Ctrl-C, kill what is left of it and its descendants.

    Returns the pids that do not end within another `grace_s`, since they are stuck in a driver call.
    """
    tree = set(descendants(process.pid))
    process.terminate()
    if hasattr(signal, "SIGCONT"):
        process.send_signal(signal.SIGCONT)  # a stopped process acts on no signal before it is continued
    with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        process.wait(grace_s)
    tree |= set(descendants(process.pid))
    process.kill()  # first the process, since it could start its children again
    kill(tree)
    deadline = time.monotonic() + grace_s
    while (left := [one.pid for one in tree if alive(one)]) or process.poll() is None:
        if time.monotonic() > deadline:
            return tuple(left if process.poll() is not None else [process.pid, *left])
        time.sleep(POLL_S)
    return ()
