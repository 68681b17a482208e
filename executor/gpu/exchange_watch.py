"""A watchdog for exchanges in which a CUDA stream waits for a memory word, which has no timeout of its own.

Every such call ends with a count that the stream writes into pinned host memory, where a thread can read it without
calling the driver (which would block during graph capture or behind a full queue). When calls are outstanding and none
has ended for STALL_S, the thread prints which call is stalled and the Python stacks, and ends the process; a launcher
such as torchrun then ends the other ranks. Kernels have their own limit on waiting (`executor.kernels.signals`), so
captured graphs, in which only kernels wait, need no watchdog.
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
POLL_S = 1.0
EXIT_CODE = 1
MAX_WORKSPACES = 256
_WRAP = 1 << 31


class CallCounter:
    """Counts the calls of one workspace: on the host when they are issued, by the stream when they end."""

    def __init__(self, name: str, address: int) -> None:
        self.name, self.address = name, address
        self._ended = ctypes.c_int32.from_address(address)
        self._issued = 0
        self._due: deque[tuple[int, str]] = deque()
        self._seen = 0
        self._since: float | None = None  # since when a call is outstanding and the count is the same; None: no call is

    def issue(self, what: str) -> int:
        """Register a call; return the number that its stream must write at `address` when it ends."""
        self._forget_ended()
        self._issued = (self._issued + 1) % _WRAP
        self._due.append((self._issued, what))
        return self._issued

    def stalled(self, now_s: float) -> tuple[float, int, str] | None:
        """Return (seconds without progress, number, what) of the oldest outstanding call; None when all have ended."""
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
    """Checks all counters every POLL_S and calls `give_up` with a message when one stalls, at most once.

    `words` are MAX_WORKSPACES int32 in host memory, where streams write; the watch keeps them alive.
    """

    def __init__(self, words: torch.Tensor, give_up: Callable[[str], None], *, stall_s: float = STALL_S) -> None:
        self._words, self._give_up, self._stall_s = words, give_up, stall_s
        self._counters: list[CallCounter] = []

    def add_counter(self, name: str) -> CallCounter:
        if len(self._counters) == MAX_WORKSPACES:
            raise ValueError(f"more than {MAX_WORKSPACES} workspaces cannot be watched")
        self._counters.append(
            CallCounter(name, self._words.data_ptr() + self._words.element_size() * len(self._counters))
        )
        return self._counters[-1]

    def check(self, now_s: float) -> bool:
        """Return whether a counter has stalled; `give_up` was called then."""
        for counter in self._counters:
            due = counter.stalled(now_s)
            if due is not None and due[0] >= self._stall_s:
                seconds, number, what = due
                self._give_up(
                    f"{what} (call {number} of {counter.name}) has not ended, and none after it, for {seconds:.0f} s:"
                    " a peer did not deliver its part.\n  do: look for the first failure in the other ranks' logs;"
                    " the ranks must make the same calls in one order"
                )
                return True
        return False

    def run(self) -> None:
        while not self.check(time.monotonic()):
            time.sleep(POLL_S)


@cache
def process_watch() -> Watch:
    """Return the watch of this process; its thread starts at the first call."""
    words = torch.zeros(MAX_WORKSPACES, dtype=torch.int32, pin_memory=torch.cuda.is_available())
    watch = Watch(words, exit_process, stall_s=STALL_S)
    threading.Thread(target=watch.run, name="overlap watch", daemon=True).start()
    return watch


def exit_process(message: str) -> None:
    """Print the message and all stacks, and end the process without cleanup: a GPU synchronization would never
    return.
    """
    rank = os.environ.get("RANK", "?")
    print(f"rank {rank}: {message}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    os._exit(EXIT_CODE)
