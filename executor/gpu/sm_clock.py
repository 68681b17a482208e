"""The mean SM clock between two points of a stream.

Each SM counts its cycles; cycles over elapsed time is the mean clock of exactly the timed kernels. A driver query
returns the clock of one moment, usually after the work when the clock has recovered, and delays launches. A stamp is
one tiny kernel in the stream.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from executor.kernels import on_demand as kernels

PROGRAMS_PER_PROCESSOR = 4  # enough that nearly every SM runs one


class SmClock:
    """Takes stamps and returns the mean clock between successive stamps. Does nothing on a CPU.

    `missing` is the reason if a GPU's clock is unknown: no Triton, or a failing compiler.
    """

    def __init__(self, device: torch.device) -> None:
        self.stamps: list[Tensor] = []
        self.missing = ""
        self._kernel: Any = None
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count
            self._device = device
            try:
                self._kernel = kernels.stamp
            except ImportError as error:
                self.missing = f"mean clocks: {error}"

    def stamp(self) -> None:
        """Record every SM's cycle count and the time on the current stream."""
        if self._kernel is None:
            return
        words = torch.zeros((self._processors, 2), dtype=torch.int64, device=self._device)
        try:
            self._kernel[(PROGRAMS_PER_PROCESSOR * self._processors,)](words, num_warps=1)
        except Exception as error:  # noqa: BLE001 - a compiler that is missing or too old fails in any way; clocks are extra
            self._kernel, self.missing = None, f"mean clocks: {type(error).__name__}: {str(error)[:200]}"
            return
        self.stamps.append(words)

    def hertz(self) -> list[float | None]:
        """Return the mean clocks in Hz between successive stamps, and clear the stamps; waits for the GPU."""
        read = [words.cpu() for words in self.stamps]
        self.stamps.clear()
        return [_between(one, other) for one, other in pairwise(read)]


def _between(one: Tensor, other: Tensor) -> float | None:
    """Return the median clock in Hz over the SMs of both stamps; rows are (cycles, nanoseconds), int64."""
    both = (one[:, 1] > 0) & (other[:, 1] > one[:, 1]) & (other[:, 0] > one[:, 0])
    if not bool(both.any()):
        return None
    passed = (other - one)[both]
    return float((passed[:, 0].double() / passed[:, 1].double()).median()) * 1e9
