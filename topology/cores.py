"""Independent pieces of one computation on several cores, each run in a forked child of this process.

    with several_cores():  # in a command
        ...
    results = on_cores(pieces, seconds=0.8)

A forked child has its parent's memory and loads nothing. Parent and children each take the next piece when they are
free, and every piece is computed once, so the results are those of one core. Where a child raises or is killed, the
parent computes the pieces whose results are missing, and an exception is raised there. Outside `several_cores` all
pieces run in order in this process; so they do on systems other than Linux, where forking a process with waiting
threads is not safe.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from topology.time_limit import set_alarm

# Forking pays from this many seconds of work on: a child of 60 to 800 MiB starts and answers in 10 to 40 ms (measured
# on two busy cores).
WORTH_S = 0.15
NUMBER_BYTES = 2

_cores: ContextVar[int] = ContextVar("cores", default=1)
_T = TypeVar("_T")


@contextmanager
def several_cores() -> Iterator[None]:
    """Let `on_cores` fork within this context, one child for each further core that this process may use."""
    token = _cores.set(len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1)
    try:
        yield
    finally:
        _cores.reset(token)


def forks(count: int, seconds: float) -> bool:
    """Return whether `on_cores` forks for `count` pieces that take `seconds` in total."""
    return min(_cores.get(), count) > 1 and seconds >= WORTH_S


def on_cores(pieces: Sequence[Callable[[], _T]], *, seconds: float) -> list[_T]:
    """Return the results of `pieces` in order; `seconds` estimates their total time. A piece that runs in a child
    cannot change objects of this process.
    """
    if not forks(len(pieces), seconds):
        return [piece() for piece in pieces]
    results: dict[int, _T] = {}
    queue = _queue(len(pieces))
    children = []
    try:
        children = [_fork(pieces, queue) for _ in range(min(_cores.get(), len(pieces)) - 1)]
        for number in _taken(queue):
            results[number] = pieces[number]()
        for _, answer in children:
            with suppress(EOFError, OSError):
                results |= answer.recv()
    finally:
        os.close(queue)
        for pid, answer in children:
            answer.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [results[number] if number in results else piece() for number, piece in enumerate(pieces)]


def _queue(count: int) -> int:
    """Return the reading end of a pipe that holds the indices of the pieces; each is read once."""
    reading, writing = os.pipe()
    os.write(writing, b"".join(number.to_bytes(NUMBER_BYTES, "big") for number in range(count)))
    os.close(writing)
    return reading


def _taken(queue: int) -> Iterator[int]:
    while number := os.read(queue, NUMBER_BYTES):
        yield int.from_bytes(number, "big")


def _fork(pieces: Sequence[Callable[[], Any]], queue: int) -> tuple[int, Any]:
    """Start a child; return its process id and the connection over which it sends {index: result}."""
    from multiprocessing.connection import Pipe  # noqa: PLC0415 - of a computation that forks only

    answer, mine = Pipe(duplex=False)
    parent, pid = os.getpid(), os.fork()
    if pid:
        mine.close()
        return pid, answer
    try:
        gc.disable()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        set_alarm()  # a child does not inherit timers
        _cores.set(1)
        results = {}
        with suppress(Exception):
            for number in _taken(queue):
                if os.getppid() != parent:
                    break
                results[number] = pieces[number]()
        mine.send(results)
    finally:
        os._exit(0)
