"""The clock that a GPU's processors really ran at between two points of a stream.

Each processor counts its cycles; counted over the time in between that is the mean clock of just the kernels that are
timed. Asking the driver tells the clock at one moment, usually when the work is over and the clock up again, and holds up
launches on the way. A stamp is one tiny kernel in the stream.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

PROGRAMS_PER_PROCESSOR = 4  # so that nearly all get one


class SmClock:
    """Takes stamps, and tells the mean clock between each and the next. Without a GPU it knows none.

    `missing` says why a GPU's is not known: no Triton, or a compiler that fails.
    """

    def __init__(self, device: torch.device) -> None:
        self.stamps: list[Tensor] = []
        self.missing = ""
        self._kernel: Any = None
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count
            self._device = device
            try:
                from executor.kernels.cycles import stamp  # noqa: PLC0415 - triton
            except ImportError as error:
                self.missing = f"mean clocks: {error}"
                return
            self._kernel = stamp

    def stamp(self) -> None:
        """Have the current stream write down every processor's cycles and the time."""
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
        """Return the clocks between successive stamps, and forget these; waits for the GPU."""
        read = [words.cpu() for words in self.stamps]
        self.stamps.clear()
        return [_between(one, other) for one, other in pairwise(read)]


def _between(one: Tensor, other: Tensor) -> float | None:
    """Return the median over processors that both stamps reached; each row is (cycles, nanoseconds), of 64 bits."""
    both = (one[:, 1] > 0) & (other[:, 1] > one[:, 1]) & (other[:, 0] > one[:, 0])
    if not bool(both.any()):
        return None
    passed = (other - one)[both]
    return float((passed[:, 0].double() / passed[:, 1].double()).median()) * 1e9
