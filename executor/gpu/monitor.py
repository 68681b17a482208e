"""Clocks, power and throttle reasons during a run or a measurement; samples of a throttled GPU are marked invalid."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from executor.gpu.faults import GpuFault, NvmlFaults, SmiFaults
from executor.gpu.state import Nvml, read_states, throttle_reasons
from executor.launch.records import median_and_spread
from topology.profile.measurement import GpuState
from topology.profile.samples import FAULTS, Conditions

PERIOD_S = 2.0  # with nvidia-smi, which takes tenths of a second to start
NVML_PERIOD_S = 0.5  # short enough for samples of a short run; queries of an open library are cheap
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


_FIELDS = "index,clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"


class ClockMonitor:
    """Reads clocks ten times a second during a measurement, so that each sample can state its conditions.

    Runs one nvidia-smi in loop mode: starting one per sample would take longer than the sample.
    """

    def __init__(self) -> None:
        self._lines: list[tuple[float, str]] = []
        self._process: subprocess.Popen[str] | None = None
        command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits", "-lms=100"]
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

    def between(self, began: float, ended: float, gpu: int) -> Conditions:
        """Return the conditions between two `time.monotonic()` values.

        Clocks, power and temperature are medians; `throttle` has every reason seen. A sample shorter than the reading
        interval gets the next reading after it.
        """
        rows = [cells for at, line in tuple(self._lines) if began <= at and (cells := _cells(line, gpu))]
        inside = [
            cells for at, line in tuple(self._lines) if began <= at <= ended + 0.1 and (cells := _cells(line, gpu))
        ]
        rows = inside or rows[:1]
        bits = 0
        for row in rows:
            bits |= _bits(row[4])
        return Conditions(
            sm_clock_hz=_median(rows, 1, 1e6),
            power_w=_median(rows, 2, 1.0),
            temperature_c=_median(rows, 3, 1.0),
            throttle=throttle_reasons(bits),
        )

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
    return median_and_spread(values)[0] if values else None


def invalid_reason(conditions: Conditions) -> str:
    """Return why a sample under these conditions is invalid, or an empty string."""
    faults = [reason for reason in conditions.throttle if reason in FAULTS]
    return f"the GPU was slowed down: {', '.join(faults)}" if faults else ""
