"""Broadcast of numbers from rank 0 to the other ranks of its host, through memory that their processes share.

A broadcast through sockets takes a tenth of a millisecond, a decode step a few milliseconds; a word in shared memory is
visible after a microsecond. A message is a value and then its number, and a reader takes the value after it has seen
the number: x86 keeps the order of stores, so the value is complete.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist

SPIN_S, POLL_S = 5e-4, 2e-5  # a sleep takes a tenth of a millisecond at least, so short waits do not
SLOTS = 64  # messages that a reader may be behind


class SharedBroadcast:
    """The constructor is collective: all ranks of `group`, processes of one host, call it at the same time."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.writes = dist.get_rank(group) == 0
        self._told = 0
        path = [""]
        if self.writes:
            with tempfile.NamedTemporaryFile(prefix="meshwright-", delete=False) as file:
                file.write(bytes(16 * SLOTS))
                path = [file.name]
        dist.broadcast_object_list(path, group_src=0, group=group)
        self._words = np.memmap(path[0], dtype=np.int64, mode="r+", shape=(SLOTS, 2))
        dist.barrier(group=group)
        if self.writes:
            Path(path[0]).unlink()

    def agreed(self, value: int) -> int:
        """Return rank 0's `value`. Ranks must synchronise otherwise at least every SLOTS calls; they do, since they
        take the same steps.
        """
        slot = self._words[self._told % SLOTS]
        self._told += 1
        if self.writes:
            slot[0] = value
            slot[1] = self._told
            return value
        until = time.perf_counter() + SPIN_S
        while int(slot[1]) != self._told:
            if time.perf_counter() > until:
                time.sleep(POLL_S)
        return int(slot[0])
