"""Independent pieces of one computation on several cores, by children that the process forks as it is.

    with several_cores():  # in a command
        ...
    results = on_cores(pieces, seconds=0.8)

A child knows all that its parent does and has nothing to load. Pieces are taken as processes get to them, and each has
one result, whichever process it is from: so the results are those of one core. What a child does not hand in, since it
raised or was killed, its parent does itself, and raises what there is to raise. Elsewhere than in `several_cores`, and
on other systems than Linux, whose fork is safe for a process with threads that only wait, all is done in order.
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

# Seconds that pieces have to take together. A child of 60 to 800 MiB starts and answers in 10 to 40 ms, measured on two
# cores that others used, too.
WORTH_S = 0.15
NUMBER_BYTES = 2

_cores: ContextVar[int] = ContextVar("cores", default=1)
_T = TypeVar("_T")


@contextmanager
def several_cores() -> Iterator[None]:
    """Let `on_cores` fork inside, where this process may use several cores."""
    token = _cores.set(len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1)
    try:
        yield
    finally:
        _cores.reset(token)


def forks(count: int, seconds: float) -> bool:
    """Return whether `on_cores` forks for so many pieces that take so long together."""
    return min(_cores.get(), count) > 1 and seconds >= WORTH_S


def on_cores(pieces: Sequence[Callable[[], _T]], *, seconds: float) -> list[_T]:
    """Return what `pieces` return, in their order; `seconds` is about what they take together. What they change is
    lost where a child runs them.
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
    """Return the end of a pipe that holds the numbers of pieces, each to be read once."""
    reading, writing = os.pipe()
    os.write(writing, b"".join(number.to_bytes(NUMBER_BYTES, "big") for number in range(count)))
    os.close(writing)
    return reading


def _taken(queue: int) -> Iterator[int]:
    while number := os.read(queue, NUMBER_BYTES):
        yield int.from_bytes(number, "big")


def _fork(pieces: Sequence[Callable[[], Any]], queue: int) -> tuple[int, Any]:
    """Start a child; return its process id and the connection on which it hands in its results."""
    from multiprocessing.connection import Pipe  # noqa: PLC0415 - of a computation that forks only

    answer, mine = Pipe(duplex=False)
    parent, pid = os.getpid(), os.fork()
    if pid:
        mine.close()
        return pid, answer
    try:
        gc.disable()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        set_alarm()  # which a child does not inherit
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
