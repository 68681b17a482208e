"""The worker process: answers requests one at a time with the functions it was given, until the server is gone.

Requests and messages go over one pipe, as `multiprocessing` sends objects: both ends are this program. A request is
(kind, arguments, bytes of memory or None). A message is ("progress", line), ("early", value), ("result", value) or
("error", PlannerError); after a result or an error it sends whether it accepts another request.
"""

from __future__ import annotations

import os
import queue
import resource
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

from topology.cores import several_cores
from topology.errors import PlannerError
from topology.units import GIB, in_gib

Work = Mapping[str, Callable[..., Any]]  # each takes a Progress and the arguments of a request

KEPT_BYTES = GIB  # a larger process ends, since Python seldom returns memory
REPORT_S = 0.1  # seconds between two lines of progress


class Progress:
    """What a piece of work reports while it runs: lines of progress, and preliminary answers."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._reported_at = 0.0

    def __call__(self, line: str) -> None:
        if time.monotonic() - self._reported_at > REPORT_S:
            self._reported_at = time.monotonic()
            self._pipe.send(("progress", line))

    def early(self, value: object) -> None:
        """Send a preliminary answer."""
        self._pipe.send(("early", value))


def serve(work: Work, pipe: Connection) -> None:
    """Answer requests until the other end of the pipe is closed."""
    waiting: queue.SimpleQueue[tuple[str, tuple[Any, ...], int | None]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, waiting), daemon=True, name="requests").start()
    again = True
    while again:
        kind, arguments, memory_bytes = waiting.get()
        _bound(memory_bytes)
        message = _answer(work[kind], arguments, memory_bytes, pipe)
        again = _memory_bytes() < KEPT_BYTES
        pipe.send(message)
        pipe.send(again)


def _read(pipe: Connection, waiting: queue.SimpleQueue[Any]) -> None:
    """Pass requests on; at the end of the input, when the server has ended, exit even in the middle of work."""
    with suppress(EOFError, OSError):
        while True:
            waiting.put(pipe.recv())
    os._exit(0)


def _answer(
    function: Callable[..., Any], arguments: tuple[Any, ...], memory_bytes: int | None, pipe: Connection
) -> tuple[str, Any]:
    try:
        with several_cores():
            return "result", function(Progress(pipe), *arguments)
    except PlannerError as error:
        return "error", error
    except MemoryError:
        limit = f"a question may use {in_gib(memory_bytes or 0, 0)} of this machine's memory"
        return "error", PlannerError("out of memory", why=limit, remedy="ask in a terminal, which has no limit")
    except Exception as error:  # noqa: BLE001 - reported to who asked: a process has nobody else to report to
        return "error", PlannerError(
            f"internal error: {type(error).__name__}: {error}",
            why="this is a bug of the program, not of the question",
            remedy="please report it with the question",
        )


def _bound(memory_bytes: int | None) -> None:
    """Limit this process's memory, or lift the limit."""
    with suppress(OSError, ValueError):  # not every system limits this
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard if memory_bytes is None else memory_bytes, hard))


def _memory_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
