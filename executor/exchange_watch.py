"""Says which exchange stands still and ends the process: a stream that waits for a word would wait for ever.

Every call in which a stream waits ends with a count that this stream writes into pinned memory of the host, where a
thread can read it without asking the driver (which it could not while a graph is captured, nor behind a full queue).
When calls are outstanding and none has ended for STALL_S, the thread says which one is due, shows where the program
stands, and leaves; a launcher such as torchrun then ends the other ranks. Kernels give up on their own
(`executor.kernels.signals`), so captured graphs, in which only kernels wait, need no watch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cache

import torch

STALL_S = 60.0  # as long as a barrier of symmetric memory waits
TICK_S = 1.0
EXIT_CODE = 1
LINES = 256
_WRAP = 1 << 31


class Line:
    """The calls of one workspace, counted by the host as they are issued and by a stream as they end."""

    def __init__(self, name: str, address: int) -> None:
        self.name, self.address = name, address
        self._ended = ctypes.c_int32.from_address(address)
        self._issued = 0
        self._due: deque[tuple[int, str]] = deque()
        self._seen = 0
        self._since: float | None = None  # when a call was due and the count stood at what was seen

    def issue(self, what: str) -> int:
        """Note a call; return the number that its stream is to write at `address` when it ends."""
        self._forget_ended()
        self._issued = (self._issued + 1) % _WRAP
        self._due.append((self._issued, what))
        return self._issued

    def stalled(self, now_s: float) -> tuple[float, int, str] | None:
        """Return (seconds without an end, number, what) of the call that is due; None when all have ended."""
        ended = self._ended.value
        due = next((one for one in tuple(self._due) if not _reached(ended, one[0])), None)
        if due is None:
            self._since = None
            return None
        if self._since is None or ended != self._seen:
            self._seen, self._since = ended, now_s
        return (now_s - self._since, *due)

    def _forget_ended(self) -> None:
        ended = self._ended.value
        while self._due and _reached(ended, self._due[0][0]):
            self._due.popleft()


def _reached(ended: int, number: int) -> bool:
    return (ended - number) % _WRAP < _WRAP // 2


class Watch:
    """Looks at all lines once a tick, and calls `give_up` with what it has to say at most once.

    `words` are LINES int32 on the host, where streams write; the watch keeps them alive.
    """

    def __init__(self, words: torch.Tensor, give_up: Callable[[str], None], *, stall_s: float = STALL_S) -> None:
        self._words, self._give_up, self._stall_s = words, give_up, stall_s
        self._lines: list[Line] = []

    def line(self, name: str) -> Line:
        if len(self._lines) == LINES:
            raise ValueError(f"more than {LINES} workspaces cannot be watched")
        self._lines.append(Line(name, self._words.data_ptr() + self._words.element_size() * len(self._lines)))
        return self._lines[-1]

    def forget(self) -> None:
        """Watch none of the lines so far: all their calls have ended, and their words are given to others."""
        self._lines = []
        self._words.zero_()

    def look(self, now_s: float) -> bool:
        """Say whether a line stalled."""
        for line in self._lines:
            due = line.stalled(now_s)
            if due is not None and due[0] >= self._stall_s:
                seconds, number, what = due
                self._give_up(
                    f"{what} (call {number} of {line.name}) has not ended, and none after it, for {seconds:.0f} s: a peer "
                    "did not deliver its part.\n  do: look for the first failure in the other ranks' logs; the ranks must "
                    "make the same calls in one order"
                )
                return True
        return False

    def run(self) -> None:
        while not self.look(time.monotonic()):
            time.sleep(TICK_S)


@cache
def the_watch() -> Watch:
    """Return the process's own, whose thread runs from the first call on."""
    words = torch.zeros(LINES, dtype=torch.int32, pin_memory=torch.cuda.is_available())
    watch = Watch(words, leave, stall_s=STALL_S)
    threading.Thread(target=watch.run, name="overlap watch", daemon=True).start()
    return watch


def leave(message: str) -> None:
    """Tell and end the process at once: whatever synchronizes with the GPU now would never return."""
    rank = os.environ.get("RANK", "?")
    print(f"rank {rank}: {message}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    os._exit(EXIT_CODE)
