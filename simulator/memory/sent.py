"""Tensors that a rank sends to others: torch's allocator keeps them until the device has sent them.

A freed tensor that NCCL's sends or receives use stays until the device has passed that point (ProcessGroupNCCL's
`pointToPoint` records its stream, pytorch/pytorch#132292). The host is ahead of the device where kernels take longer
than their launches, by a full queue at most.
"""

from __future__ import annotations

from math import inf

from simulator.analytical.block_times import PassTimes
from simulator.memory.allocator import Block


class SentTensors:
    """The tensors that the host has freed and the device has not sent, and the clocks of both."""

    def __init__(self) -> None:
        self.host_s = self.device_s = 0.0
        self._waiting: list[tuple[float, Block]] = []  # and the time at which the device has sent them

    def add(self, block: Block) -> None:
        """A tensor of the pass that is being issued is freed by the host."""
        self._waiting.append((inf, block))

    def issue(self, times: PassTimes) -> list[Block]:
        """Issue the kernels of a pass of one plan; return the tensors that the device has sent by then."""
        self.host_s += float(times.advance.host_s[0])
        self.device_s = max(self.device_s + float(times.device_s[0]), self.host_s)
        self.host_s = max(self.host_s, self.device_s - float(times.ahead_s[0]))
        self._waiting = [(min(done_s, self.device_s), block) for done_s, block in self._waiting]
        return self._take(self.host_s)

    def wait(self) -> list[Block]:
        """Wait for the device; return all tensors."""
        self.host_s = self.device_s = 0.0
        return self._take(inf)

    def _take(self, now_s: float) -> list[Block]:
        found = [block for done_s, block in self._waiting if done_s <= now_s]
        self._waiting = [one for one in self._waiting if one[0] > now_s]
        return found
