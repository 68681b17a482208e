"""Python's garbage collector, kept out of steps.

It stops the host whenever enough objects have been made, for tens of milliseconds in a model of 13B parameters, at
another moment on every rank: the device runs dry, and all ranks wait for each other's pauses. So it runs between steps
only, now and then (torchtitan 0.2.2 does the same: tools/utils.py, GarbageCollection).
"""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Self

EVERY = 50  # steps


class NoCollection:
    """Within it nothing is collected but by `between_steps`, which is to be called where time does not count."""

    def __enter__(self) -> Self:
        gc.collect()
        self._was_on = gc.isenabled()
        gc.disable()
        return self

    def between_steps(self, index: int) -> None:
        """Collect young objects after every `EVERY` steps."""
        if index and index % EVERY == 0:
            gc.collect(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._was_on:
            gc.enable()
