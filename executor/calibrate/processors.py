"""Processors in turn, so that what a host takes does not depend on which of them its threads happen to be on.

A thread stays on a processor for a while, and processors differ while somebody else uses them: the same Python took 1.0
to 1.9 times as long on the 16 of a virtual machine, on others a second later, and layers 1.0 to 1.8 times as long as
before (examples/profiles/hosts.md). Steps that go from processor to processor take what the host takes in the mean.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Self

FEWEST = 4  # processors, below which there is no other one to go to
BACKWARD = "pt_autograd"  # torch's threads of backward passes, which launch about half of a step's kernels


class Processors:
    """Within this context `turn` moves the threads that launch kernels to their next processors; afterwards they run
    wherever they could before. Does nothing where the system cannot do that. `rank`: of ranks that take turns together.
    """

    def __init__(self, rank: int = 0) -> None:
        self._all = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._at, self._before = rank, set[int]()

    def turn(self) -> None:
        """Move the main thread to the next processor, and backward passes to one half of all further on."""
        count = len(self._all)
        if count < FEWEST:
            return
        self._at += 1
        self._move(0, {self._all[self._at % count]})
        for thread in _backward_threads():
            self._move(thread, {self._all[(self._at + count // 2) % count]})

    def _move(self, thread: int, to: set[int]) -> None:
        with suppress(OSError):  # it has ended, or may not be moved
            os.sched_setaffinity(thread, to)

    def __enter__(self) -> Self:
        self._before = _threads().keys() - set(_backward_threads())
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._all) < FEWEST:
            return
        # Threads that were started meanwhile are where the one was that started them.
        for thread in {0, *(_threads().keys() - self._before)}:
            self._move(thread, set(self._all))


def _threads() -> dict[int, str]:
    """Return the names of this process's threads by id; none where the system does not say."""
    found = {}
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):
            found[int(thread.name)] = (thread / "comm").read_text().strip()
    return found


def _backward_threads() -> list[int]:
    return [thread for thread, name in _threads().items() if name.startswith(BACKWARD)]
