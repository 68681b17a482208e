"""The end of the time that an answer may take: long computations look at it now and then, wherever they are.

    with limited(asked.time_limit):   # in a command
        ...
    check_time()                      # in a loop

A computation that is over raises `Unproved`; whoever has found something by then ends with that. In a process
`with_alarm` it raises in between as well, whatever runs in its main thread: on a machine with much else to do, what
takes a moment may take seconds.
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

# CPU seconds that a command needs to end with what it has found. Where others have the processor as well it takes
# longer, so the time is over as much earlier, by no more than that part of a limit.
ENDING_S, MOST_EARLIER = 0.25, 0.25
LEAST_S = 0.1  # CPU seconds that show how much of a processor a process has
LATE_S = 0.005  # behind the end of the time, for an alarm that is not to come before it
FOREVER_S = 1e9  # which an alarm can be set to

_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)
_began: ContextVar[tuple[float, float] | None] = ContextVar("began", default=None)  # wall and CPU seconds
_alarm: ContextVar[bool] = ContextVar("alarm", default=False)


@contextmanager
def command(*, process: bool = False) -> Iterator[None]:
    """Count the time of all limits inside from here on, or from where a command around it began: what a command loads
    first is part of it. One that is a `process` of its own began with that.
    """
    age_s = _age_s() if process else 0.0
    token = _began.set(_began.get() or (time.monotonic() - age_s, 0.0 if age_s else time.process_time()))
    try:
        yield
    finally:
        _began.reset(token)


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """End what is done inside after so many seconds; None is no limit."""
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
    """End what is done inside at a reading of `time.monotonic`; None is no limit."""
    token = _deadline.set(deadline)
    set_alarm()
    try:
        yield
    finally:
        _deadline.reset(token)
        set_alarm()


@contextmanager
def with_alarm(seconds: float | None = None) -> Iterator[None]:
    """Let the end of the time raise wherever the main thread of this process is, once for each limit. Until there is
    one, the process ends `seconds` after the command began.
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
    if _deadline.get() is None:  # nothing has been loaded that could say what was found
        os.write(2, f"error: {ended()}\n".encode())
        os._exit(Unproved.exit_code)
    check_time()


def set_alarm() -> None:
    """Set the alarm to the end of the time, where there is one and it has not passed."""
    if _alarm.get() and threading.current_thread() is threading.main_thread():
        left = reading() - time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, min(left + LATE_S, FOREVER_S) if 0 < left < inf else 0)


def reading() -> float:
    """Return the reading of `time.monotonic` at which the time is over."""
    deadline = _deadline.get()
    return inf if deadline is None else deadline


def check_time() -> None:
    """Raise Unproved where the time is over."""
    if time.monotonic() >= reading():
        raise ended()


def ended() -> Unproved:
    """Return what says that the time is over and nothing was found."""
    return Unproved(
        "the time limit ended before there was an answer",
        why="no plan was found by then, and it was not shown that there is none",
        remedy="a longer --time-limit",
    )


def _age_s() -> float:
    """Return how long ago this process was started, as Linux tells (proc(5), field 22 of stat); 0 elsewhere."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, uptime_s - ticks / os.sysconf("SC_CLK_TCK"))
