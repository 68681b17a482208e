"""Device time of a call, without host overhead.

Short kernels are issued behind large matmuls: when these end, all calls are queued, so the device runs them back to
back whatever the host overhead, and at the sustained clocks of a busy GPU (after a rest the same kernel can be 20%
faster). Of long kernels, only the first is. On a CPU there is no queue and wall-clock time is used; that tests the code
only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from executor.launch.records import median_and_spread

LONG_S = 300e-6  # a call this long hides its own launch overhead
QUEUE_S = 0.02  # device time queued at once
WARM_S = 0.015  # duration of matmuls before the first call, and before each group of short ones while `hot`
STEADY = 0.05  # spread of groups above which more are measured
LONGER = 3  # times as long, at most
HEAT_SIZE = 8192  # m, n, k of the bfloat16 matmul that keeps the GPU busy: 1.5 ms on an H200


@dataclass(frozen=True, slots=True)
class Timing:
    """Device seconds of one call (median), spread, number of calls, host seconds to issue one, and the time of
    measurement.
    """

    seconds: float
    spread: float
    count: int
    host_s: float
    began: float  # time.monotonic()
    ended: float


class Timer:
    """Times calls on one device; with `hot` at the clocks of a busy GPU."""

    def __init__(self, device: torch.device, *, hot: bool = True) -> None:
        self.device, self.hot = device, hot
        self.cuda = device.type == "cuda"
        self._operand: torch.Tensor | None = None
        self._product_s = 0.0

    def measure(
        self,
        call: Callable[[], object],
        *,
        seconds: float = 0.08,
        rounds: int = 5,
        settle_s: float = 0.0,
        queue_s: float = QUEUE_S,
    ) -> Timing:
        """Return the time of one `call`, from at least `rounds` groups of calls, of `queue_s` seconds each, over at
        least `seconds`, `LONGER` times as many where they differ; calls of the first `settle_s` seconds are not
        counted.
        """
        began = time.monotonic()
        if not self.cuda:
            return self._measure_cpu(call, rounds, began)
        self.heat(WARM_S if self.hot else 0.0)
        first = self._group(call, 1, 0.0)[0]
        one, host = self._group(call, 2, 0.0)
        one = min(first, one)
        calls = max(1, min(200, int(queue_s / max(one, host, 1e-6))))
        times: list[float] = []
        hosts: list[float] = []
        settled = time.monotonic() + settle_s
        until = settled + max(seconds, 0.0)
        while (
            len(times) < rounds
            or time.monotonic() < until
            or (len(times) < LONGER * rounds and median_and_spread(times)[1] > STEADY)
        ):
            # After its first call, a group of long calls keeps the GPU busy; one of short calls needs products ahead.
            ahead = 1.3 * host * (1 if one > max(LONG_S, 2 * host) else calls)
            if self.hot and calls * one < WARM_S:
                ahead = max(ahead, WARM_S)
            device_s, host_s = self._group(call, calls, ahead)
            if time.monotonic() < settled:
                continue
            times.append(device_s)
            hosts.append(host_s)
        mid, spread = median_and_spread(times)
        return Timing(mid, spread, len(times) * calls, median_and_spread(hosts)[0], began, time.monotonic())

    def heat(self, seconds: float) -> None:
        """Queue large matmuls that keep the device busy for about `seconds`."""
        if not self.cuda or seconds <= 0:
            return
        operand = self._operand
        if operand is None:
            operand = self._operand = torch.randn((HEAT_SIZE, HEAT_SIZE), device=self.device, dtype=torch.bfloat16)
            torch.mm(operand, operand)
            self._product_s = self._group(partial(torch.mm, operand, operand), 5, 0.0)[0]
        for _ in range(max(1, round(seconds / self._product_s))):
            torch.mm(operand, operand)

    def _group(self, call: Callable[[], object], calls: int, ahead_s: float) -> tuple[float, float]:
        """Return (device seconds, host seconds) per call of `calls` calls issued after `ahead_s` of matmuls."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.heat(ahead_s)
        start.record()
        issued = time.perf_counter()
        for _ in range(calls):
            call()
        host_s = (time.perf_counter() - issued) / calls
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls, host_s

    def _measure_cpu(self, call: Callable[[], object], rounds: int, began: float) -> Timing:
        call()
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            call()
            times.append(max(time.perf_counter() - started, 1e-9))
        mid, spread = median_and_spread(times)
        return Timing(mid, spread, rounds, mid, began, time.monotonic())

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)
