"""How long a piece of device work takes, without the host in it; and the clocks it ran under.

Short kernels are issued behind large matrix products: by the time these end all of them are queued, so the device runs
them back to back whatever the host costs, and at the clocks that a GPU at work is left by its power limit: after a rest
the same kernel can be a fifth faster. Long ones are issued as they are. On a CPU there is no queue and the wall clock
counts: that tests the code, not a machine.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from executor.records import middle
from topology.nvml import THROTTLE_BITS

LONG_S = 300e-6  # a call this long hides its own launch
QUEUE_S = 0.02  # device time queued at once
WARM_S = 0.015  # of products before the first call, and again before each group of short ones while `hot`
HEAT_SIZE = 8192  # of a product in bfloat16: some 1.5 ms on an H200


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds of a call on the device, its spread, how many medians, host seconds to issue it, when."""

    seconds: float
    spread: float
    count: int
    host_s: float
    began: float  # time.monotonic
    ended: float


class Timer:
    """Times calls on one device."""

    def __init__(self, torch: Any, device: Any, *, hot: bool = True) -> None:
        self.torch, self.device, self.hot = torch, device, hot
        self.cuda = device.type == "cuda"
        self._operand: Any = None
        self._product_s = 0.0

    def measure(self, call: Callable[[], object], *, seconds: float = 0.08, rounds: int = 5) -> Timing:
        """Return the time of one `call`, from at least `rounds` groups of calls that fill `seconds` of the device."""
        began = time.monotonic()
        if not self.cuda:
            return self._measure_cpu(call, rounds, began)
        self.heat(WARM_S if self.hot else 0.0)
        first = self._group(call, 1, 0.0)[0]
        one, host = self._group(call, 2, 0.0)
        one = min(first, one)
        calls = max(1, min(200, int(QUEUE_S / max(one, host, 1e-6))))
        times: list[float] = []
        hosts: list[float] = []
        until = time.monotonic() + max(seconds, 0.0)
        while len(times) < rounds or time.monotonic() < until:
            # A group of long calls heats the GPU itself; a short one would run on what a pause has left.
            ahead = 0.0 if one > max(LONG_S, 2 * host) else calls * host * 1.3
            if self.hot and calls * one < WARM_S:
                ahead = max(ahead, WARM_S)
            device_s, host_s = self._group(call, calls, ahead)
            times.append(device_s)
            hosts.append(host_s)
        mid, spread = middle(times)
        return Timing(mid, spread, len(times) * calls, middle(hosts)[0], began, time.monotonic())

    def heat(self, seconds: float) -> None:
        """Queue large products that take the device about `seconds`."""
        if not self.cuda or seconds <= 0:
            return
        torch = self.torch
        if self._operand is None:
            size = (HEAT_SIZE, HEAT_SIZE)
            self._operand = torch.randn(size, device=self.device, dtype=torch.bfloat16)
            torch.mm(self._operand, self._operand)
            self._product_s = self._group(lambda: torch.mm(self._operand, self._operand), 5, 0.0)[0]
        for _ in range(max(1, round(seconds / self._product_s))):
            torch.mm(self._operand, self._operand)

    def _group(self, call: Callable[[], object], calls: int, ahead_s: float) -> tuple[float, float]:
        """Return (device seconds, host seconds) of one of `calls` calls issued together, products `ahead_s` long first."""
        cuda = self.torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
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
        mid, spread = middle(times)
        return Timing(mid, spread, rounds, mid, began, time.monotonic())

    def synchronize(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize(self.device)


_FIELDS = "index,clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"


class ClockWatch:
    """Reads clocks a few times a second beside the measurement, so that every sample knows what it ran under.

    One nvidia-smi that keeps printing: starting one for each sample would take longer than the sample.
    """

    def __init__(self, *, every_ms: int = 100) -> None:
        self._lines: list[tuple[float, str]] = []
        self._process: subprocess.Popen[str] | None = None
        command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits", f"-lms={every_ms}"]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        for line in self._process.stdout:
            self._lines.append((time.monotonic(), line))

    def between(self, began: float, ended: float, gpu: int) -> dict[str, Any]:
        """Return the fields of a `topology.samples.Conditions`: medians over the time, and every throttle reason seen.

        A sample shorter than the interval of readings gets the next one after it.
        """
        rows = [cells for at, line in tuple(self._lines) if began <= at and (cells := _cells(line, gpu))]
        inside = [
            cells for at, line in tuple(self._lines) if began <= at <= ended + 0.1 and (cells := _cells(line, gpu))
        ]
        rows = inside or rows[:1]
        if not rows:
            return {}
        bits = 0
        for row in rows:
            bits |= _bits(row[4])
        return {
            "sm_clock_hz": _median(rows, 1, 1e6),
            "power_w": _median(rows, 2, 1.0),
            "temperature_c": _median(rows, 3, 1.0),
            "throttle": [text for bit, text in THROTTLE_BITS.items() if bits & bit],
        }

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._process = None


def _cells(line: str, gpu: int) -> list[str] | None:
    cells = [cell.strip() for cell in line.split(",")]
    return cells if len(cells) == 5 and cells[0] == str(gpu) else None


def _bits(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0


def _median(rows: Sequence[Sequence[str]], column: int, scale: float) -> float | None:
    values = []
    for row in rows:
        try:
            values.append(float(row[column]) * scale)
        except ValueError:
            continue
    return middle(values)[0] if values else None
