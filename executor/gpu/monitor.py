"""Clocks, power and throttle reasons during a run or a measurement; samples of a throttled GPU are marked invalid."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Self

from executor.gpu.faults import GpuFault, NvmlFaults, SmiFaults
from executor.gpu.state import Nvml, read_state, read_states, state_query
from executor.launch.records import median_and_spread
from topology.profile.measurement import GpuState
from topology.profile.samples import FAULTS, Conditions
from topology.readers.nvml import THROTTLE_BITS

PERIOD_S = 2.0  # with nvidia-smi, which takes tenths of a second to start
NVML_PERIOD_S = 0.5  # short enough for samples of a short run; queries of an open library are cheap
LOOP_MS = 100
Read = Callable[[], dict[int, GpuState]]
Sample = tuple[float, dict[int, GpuState]]  # seconds since the epoch, states by nvidia-smi index


class GpuMonitor:
    """Reads GPU states and faults in a thread from `start` to `stop`: by NVML twice a second, else nvidia-smi every 2
    s.

    `faults` are those seen so far.
    """

    def __init__(self, read: Read = read_states, open_nvml: Callable[[], Nvml] = Nvml) -> None:
        self._read, self._open_nvml, self._over = read, open_nvml, threading.Event()
        self._samples: list[Sample] = []
        self.faults: list[GpuFault] = []
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpu-watch")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[Sample]:
        """Stop the thread and return the samples."""
        self._over.set()
        self._thread.join(timeout=2 * PERIOD_S)
        return list(self._samples)

    def _run(self) -> None:
        try:
            nvml = self._open_nvml()
        except Exception:  # noqa: BLE001 - whatever fails (library, driver, version), nvidia-smi may work
            self._ask(self._read, SmiFaults(), PERIOD_S)
            return
        self._ask(nvml.read, nvml.faults, NVML_PERIOD_S)
        nvml.close()

    def _ask(self, read: Read, faults: NvmlFaults | SmiFaults, period_s: float) -> None:
        over = False
        while not over:
            over = self._over.wait(period_s)  # once more at the end: many runs end because of a fault
            states = {} if over else read()
            if states:
                self._samples.append((time.time(), states))
            if isinstance(faults, NvmlFaults) or (self._samples and not states):
                self.faults += [GpuFault(gpu=gpu, what=what, at=time.time()) for gpu, what in faults.poll()]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSummary:
    """A GPU during a run: the lowest and the median clock, the highest power, all throttle reasons seen."""

    gpu: int
    samples: int
    sm_clock_hz: dict[str, float] | None
    power_w: float | None
    throttle: tuple[str, ...]


def summarise(samples: Sequence[Sample], gpus: Sequence[int], begin: float, end: float) -> list[GpuSummary]:
    """Return clocks, power and throttle reasons of each GPU between two times (seconds since the epoch)."""
    during = [states for at, states in samples if begin <= at <= end]
    answer = []
    for gpu in gpus:
        mine = [states[gpu] for states in during if gpu in states]
        clocks = [state.sm_clock_hz for state in mine if state.sm_clock_hz is not None]
        power = [state.power_w for state in mine if state.power_w is not None]
        answer.append(
            GpuSummary(
                gpu=gpu,
                samples=len(mine),
                sm_clock_hz={"lowest": min(clocks), "median": median(clocks)} if clocks else None,
                power_w=max(power) if power else None,
                throttle=tuple(sorted({reason for state in mine for reason in state.throttle or ()})),
            )
        )
    return answer


class ClockMonitor:
    """Reads clocks ten times a second during a measurement, so that each sample can state its conditions. Does nothing
    unless it `reads`.

    Runs one nvidia-smi in loop mode: starting one per sample would take longer than the sample.
    """

    def __init__(self, *, reads: bool) -> None:
        self._states: list[tuple[float, GpuState]] = []
        self._process: subprocess.Popen[str] | None = None
        if reads:
            with suppress(OSError):
                self._process = subprocess.Popen(
                    [*state_query("clocks_event_reasons.active"), f"-lms={LOOP_MS}"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
                threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._process = None

    def _read(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            for line in self._process.stdout:
                self.add(time.monotonic(), line)

    def add(self, at: float, line: str) -> None:
        """Keep a line of nvidia-smi."""
        if (state := read_state(line)) is not None:
            self._states.append((at, state))

    def between(self, began: float, ended: float, gpu: int) -> Conditions:
        """Return the conditions between two `time.monotonic()` values.

        Clocks, power and temperature are medians; `throttle` has every reason seen. A sample shorter than the reading
        interval gets the next reading after it.
        """
        later = [(at, state) for at, state in tuple(self._states) if began <= at and state.gpu == gpu]
        states = [state for at, state in later if at <= ended + LOOP_MS / 1e3] or [state for _, state in later[:1]]
        seen = {reason for state in states for reason in state.throttle or ()}
        return Conditions(
            sm_clock_hz=_median(state.sm_clock_hz for state in states),
            power_w=_median(state.power_w for state in states),
            temperature_c=_median(state.temperature_c for state in states),
            throttle=tuple(reason for reason in THROTTLE_BITS.values() if reason in seen),
        )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median_and_spread(known)[0] if known else None


def invalid_reason(conditions: Conditions) -> str:
    """Return why a sample under these conditions is invalid, or an empty string."""
    faults = [reason for reason in conditions.throttle if reason in FAULTS]
    return f"the GPU was slowed down: {', '.join(faults)}" if faults else ""
