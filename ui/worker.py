"""The process that answers questions, one at a time: `python -m ui.worker`, started by `ui.jobs`.

Requests come on standard input, messages go to standard output (`ui.messages`). A message is ("progress", line),
("result", value) or ("error", PlannerError); after a result or an error follows whether the process takes another
request. It ends when its standard input does.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from contextlib import suppress
from typing import IO, Any

from topology.errors import PlannerError
from ui.messages import receive, send
from ui.work import WORK

MEMORY_BYTES = 4 << 30  # searches on 16,384 GPUs take 0.2 GiB, traces of 200,000 spans 1 GiB
KEPT_BYTES = 1 << 30  # a process that has grown beyond this ends, since Python seldom gives memory back
REPORT_S = 0.1  # between two lines of progress


def main() -> None:
    """Answer requests until standard input ends."""
    _bound()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not be read as a message
    waiting: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(waiting,), daemon=True, name="requests").start()
    again = True
    while again:
        kind, arguments = waiting.get()
        message = _answer(kind, arguments, out)
        again = _memory_bytes() < KEPT_BYTES
        send(out, message)
        send(out, again)


def _read(waiting: queue.SimpleQueue[tuple[str, tuple[Any, ...]]]) -> None:
    """Pass requests on; at the end of the input, when the server is gone, end this process in the middle of its work."""
    with suppress(EOFError):
        while True:
            waiting.put(receive(sys.stdin.buffer))
    os._exit(0)


def _answer(kind: str, arguments: tuple[Any, ...], out: IO[bytes]) -> tuple[str, Any]:
    said = 0.0

    def progress(line: str) -> None:
        nonlocal said
        if time.monotonic() - said > REPORT_S:
            said = time.monotonic()
            send(out, ("progress", line))

    try:
        return "result", WORK[kind](progress, *arguments)
    except PlannerError as error:
        return "error", error
    except MemoryError:
        limit = f"a question may use {MEMORY_BYTES / 2**30:.0f} GiB of this machine's memory"
        return "error", PlannerError("out of memory", why=limit, remedy="ask in a terminal, which has no limit")
    except Exception as error:  # noqa: BLE001 - shown on the page: a process has nobody else to tell
        return "error", PlannerError(
            f"internal error: {type(error).__name__}: {error}",
            why="this is a bug of the program, not of the question",
            remedy="please report it with the link of this page",
        )


def _bound() -> None:
    """Limit this process's memory."""
    with suppress(ImportError, OSError, ValueError):  # not on every system
        import resource  # noqa: PLC0415 - as above

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))


def _memory_bytes() -> int:
    import psutil  # noqa: PLC0415 - after the first answer, not before it

    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()
