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
        self._at, self._moved = rank, set[int]()

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
            self._moved.add(thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._moved:
            with suppress(OSError):
                os.sched_setaffinity(thread, set(self._all))


def _backward_threads() -> list[int]:
    """Return the ids of this process's threads that run backward passes; none where the system does not say."""
    found = []
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):
            if (thread / "comm").read_text().startswith(BACKWARD):
                found.append(int(thread.name))
    return found
