"""The time limit of an answer, checked within long computations.

    with limited(asked.time_limit):   # in a command
        ...
    check_time()                      # in a loop

After the deadline `check_time` raises `Unproved`; callers that have found something catch it and return that.
`with_alarm` also raises it between two checks, from a signal handler in the main thread: on a busy machine a short
stretch of work may take seconds.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from pathlib import Path
from types import FrameType

from topology.errors import Unproved

# CPU seconds in which a command finishes and shows what it has found, and the largest part of a limit kept back for it.
# On a busy machine the same work takes longer, so the deadline comes earlier in proportion.
ENDING_S, MOST_EARLIER = 0.25, 0.25
LEAST_S = 0.1  # CPU seconds from which the share of a processor that this process gets can be estimated
LATE_S = 0.005  # by how much an alarm is set after the deadline, so that it never comes before it
FOREVER_S = 1e9  # the longest time for which an alarm is set

_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)
_began: ContextVar[tuple[float, float] | None] = ContextVar("began", default=None)  # wall and CPU seconds
_alarm: ContextVar[bool] = ContextVar("alarm", default=False)


@contextmanager
def command(*, process: bool = False) -> Iterator[None]:
    """Start the clock of all limits set inside; an outer `command` keeps its own start. What a command imports first
    counts against its limit. With `process`, the clock starts when this process was started.
    """
    age_s = _age_s() if process else 0.0
    token = _began.set(_began.get() or (time.monotonic() - age_s, 0.0 if age_s else time.process_time()))
    try:
        yield
    finally:
        _began.reset(token)


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Set the deadline inside to `seconds` after the command began; None is no limit."""
    if seconds is None:
        with until(None):
            yield
        return
    now, cpu_s = time.monotonic(), time.process_time()
    began, before_s = _began.get() or (now, cpu_s)
    slower = (now - began) / (cpu_s - before_s) if cpu_s - before_s >= LEAST_S else 1.0
    with until(began + seconds - min(max(slower - 1.0, 0.0) * ENDING_S, MOST_EARLIER * seconds)):
        yield


@contextmanager
def until(deadline: float | None) -> Iterator[None]:
    """Set the deadline inside to `deadline`, a value of `time.monotonic`; None is no limit."""
    token = _deadline.set(deadline)
    set_alarm()
    try:
        yield
    finally:
        _deadline.reset(token)
        set_alarm()


@contextmanager
def with_alarm(seconds: float | None = None) -> Iterator[None]:
    """Raise Unproved at the deadline, wherever the main thread of this process is; once for each limit. Before a limit
    is set, the process exits `seconds` after the command began.
    """
    if not hasattr(signal, "setitimer") or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return
    token = _alarm.set(True)
    signal.signal(signal.SIGALRM, _ring)
    if seconds is not None:
        began, _ = _began.get() or (time.monotonic(), 0.0)
        signal.setitimer(signal.ITIMER_REAL, min(max(began + seconds - time.monotonic(), LATE_S), FOREVER_S))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        _alarm.reset(token)


def _ring(_number: int, _frame: FrameType | None) -> None:
    if _deadline.get() is None:  # no limit is set yet: nothing has been imported that could show a result
        os.write(2, f"error: {ended()}\n".encode())
        os._exit(Unproved.exit_code)
    check_time()


def set_alarm() -> None:
    """Set the alarm to the deadline; clear it where there is none or it has passed."""
    if _alarm.get() and threading.current_thread() is threading.main_thread():
        left = reading() - time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, min(left + LATE_S, FOREVER_S) if 0 < left < inf else 0)


def reading() -> float:
    """Return the value of `time.monotonic` at the deadline; infinity without one."""
    deadline = _deadline.get()
    return inf if deadline is None else deadline


def check_time() -> None:
    """Raise Unproved after the deadline."""
    if time.monotonic() >= reading():
        raise ended()


def ended() -> Unproved:
    """Return the error for a deadline that passed before anything was found."""
    return Unproved(
        "the time limit ended before there was an answer",
        why="no plan was found by then, and it was not shown that there is none",
        remedy="a longer --time-limit",
    )


def _age_s() -> float:
    """Return how many seconds ago this process was started (proc(5), field 22 of stat); 0 on systems without /proc."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, uptime_s - ticks / os.sysconf("SC_CLK_TCK"))
