"""Keep Python's garbage collector out of timed steps.

A collection stops the host for tens of milliseconds in a model of 13B parameters, at a different moment on every rank,
and all ranks wait for the slowest. So it runs only between steps, every `COLLECT_EVERY_STEPS` (as in torchtitan 0.2.2:
tools/utils.py, GarbageCollection).
"""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Self

COLLECT_EVERY_STEPS = 50  # steps


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
