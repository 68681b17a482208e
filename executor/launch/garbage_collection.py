"""Keep Python's garbage collector and the system's pages out of timed steps.

A collection stops the host for tens of milliseconds in a model of 13B parameters, at a different moment on every rank,
and all ranks wait for the slowest. So it runs only between steps, every `COLLECT_EVERY_STEPS` (as in torchtitan 0.2.2:
tools/utils.py, GarbageCollection).
"""

from __future__ import annotations

import ctypes
import gc
from types import TracebackType
from typing import Self

COLLECT_EVERY_STEPS = 50  # steps
# Of glibc's malloc.h. Larger requests than the first are mapped by themselves and returned when freed, 32 MiB is the
# most that glibc takes; of the rest, this much is kept at the end of the heap.
M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 2**25
M_TRIM_THRESHOLD, KEPT_BYTES = -1, 2**29


class PausedGarbageCollection:
    """Context without automatic garbage collection; call `between_steps` outside of timed regions."""

    def __enter__(self) -> Self:
        gc.collect()
        self._was_on = gc.isenabled()
        gc.disable()
        return self

    def between_steps(self, index: int) -> None:
        """Collect young objects after every `COLLECT_EVERY_STEPS` steps."""
        if index and index % COLLECT_EVERY_STEPS == 0:
            gc.collect(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._was_on:
            gc.enable()


def keep_freed_memory() -> bool:
    """Return whether this process's malloc keeps freed memory from here on; other libraries than glibc do not.

    FSDP2 lists the tiles of the gradients that it packs, up to 13 MB for a layer, and by glibc's defaults such a list
    takes fresh pages from the system every time (examples/profiles/hosts.md).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
