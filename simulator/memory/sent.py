"""Tensors that a rank sends to others: torch's allocator keeps them until the device has sent them.

A freed tensor that NCCL's sends or receives use stays until the device has passed that point (ProcessGroupNCCL's
`pointToPoint` records its stream, pytorch/pytorch#132292). The host is ahead of the device where kernels take longer
than their launches, by a full queue at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from simulator.kernels.operators import OperatorSpec, WorkKind, backward_work, forward_work
from simulator.memory.allocator import Block
from simulator.passes.block import running
from simulator.runtimes.parts import RecomputeSpec
from simulator.step.context import CostContext
from simulator.step.host import QUEUED_LAUNCHES


class PassSeconds(NamedTuple):
    """Seconds of the host and of the device in a pass, and the kernels launched in it."""

    host_s: float = 0.0
    device_s: float = 0.0
    launches: float = 0.0

    def and_then(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(*(a + b for a, b in zip(self, other, strict=True)))


def pass_seconds(
    operators: Sequence[OperatorSpec], mode: RecomputeSpec, context: CostContext
) -> tuple[PassSeconds, PassSeconds]:
    """Return what a block's operators take in its forward and its backward pass, without communication."""
    found = {False: PassSeconds(), True: PassSeconds()}
    sizes, bytes_of, host = context.sizes, context.dtype_bytes, context.spec.host
    for run in running(operators, context, {"": mode}):
        again = mode.recomputes and bool(run.again[""][0])
        forward = forward_work(run.operator, sizes, bytes_of)
        for backward, works in ((False, forward), (True, backward_work(run.operator, sizes, bytes_of))):
            for work in [*works, *(forward if backward and again else ())]:
                if work.kind not in {WorkKind.COLLECTIVE, WorkKind.WAIT}:
                    launches, device_s = float(work.launches), context.roofline.seconds_and_source(work)[0]
                    one = PassSeconds(host.launch_s * launches, float(np.asarray(device_s).flat[0]), launches)
                    found[backward] = found[backward].and_then(one)
    return found[False], found[True]


class SentTensors:
    """The tensors that the host has freed and the device has not sent, and the clocks of both."""

    def __init__(self) -> None:
        self.host_s = self.device_s = 0.0
        self._waiting: list[tuple[float, Block]] = []  # and the time at which the device has sent them

    def add(self, block: Block) -> None:
        """A tensor of the pass that is being issued is freed by the host."""
        self._waiting.append((inf, block))

    def issue(self, times: PassSeconds) -> list[Block]:
        """Issue the kernels of a pass; return the tensors that the device has sent by then."""
        self.host_s += times.host_s
        self.device_s = max(self.device_s + times.device_s, self.host_s)
        queued_s = QUEUED_LAUNCHES * times.device_s / max(times.launches, 1.0)
        self.host_s = max(self.host_s, self.device_s - queued_s)
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
