"""Clocks, throttle reasons and processes of GPUs, from nvidia-smi or from the driver's library (NVML).

nvidia-smi is installed with every driver, and if the driver hangs, only a child process hangs, which can be killed. But
it initialises NVML for every query; to read several times a second, keep the library open (`Nvml`), in a daemon thread.
"""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from executor.gpu.faults import NvmlFaults
from topology.processes import process_owner
from topology.profile.measurement import GpuState
from topology.readers.nvml import THROTTLE_BITS
from topology.units import MIB

TIMEOUT_S = 10.0
RunCommand = Callable[[Sequence[str]], str]


def run_text(command: Sequence[str]) -> str:
    """Return a command's output, or nothing if it is absent, fails or hangs."""
    try:
        done = subprocess.run(
            list(command), capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses a GPU. `owner` is None when its user cannot be known from inside a container."""

    gpu_uuid: str
    pid: int
    owner: str | None
    memory_bytes: int | None


def read_states(run: RunCommand = run_text) -> dict[int, GpuState]:
    """Return the states of GPUs by nvidia-smi's index; empty without nvidia-smi."""
    # The field was renamed in driver 535: old drivers know only the old name, new ones may drop it.
    for name in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
        found = filter(None, map(read_state, run(state_query(name)).splitlines()))
        if states := {state.gpu: state for state in found}:
            return states
    return {}


def state_query(reasons: str) -> tuple[str, ...]:
    """Return nvidia-smi's command for lines that `read_state` reads; `reasons` is its name of throttle reasons."""
    query = f"--query-gpu=index,clocks.sm,power.draw,temperature.gpu,{reasons}"
    return ("nvidia-smi", query, "--format=csv,noheader,nounits")


def read_state(line: str) -> GpuState | None:
    """Return the state that a line of nvidia-smi gives; None for another line."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 5 or not cells[0].isdigit():
        return None
    clock, power, temperature = (_number(cell) for cell in cells[1:4])
    try:
        bits: int | None = int(cells[4], 16)
    except ValueError:
        bits = None
    return _gpu_state(int(cells[0]), clock, power, temperature, bits)


def _gpu_state(
    gpu: int, clock_mhz: float | None, power_w: float | None, temperature_c: float | None, bits: int | None
) -> GpuState:
    return GpuState(
        gpu=gpu,
        sm_clock_hz=clock_mhz * 1e6 if clock_mhz is not None else None,
        power_w=power_w,
        temperature_c=temperature_c,
        throttle=None if bits is None else throttle_reasons(bits),
    )


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """Return the throttle reasons for a driver's bit mask."""
    return tuple(text for bit, text in THROTTLE_BITS.items() if bits & bit)


class Nvml:
    """The driver's library (NVML), initialised once; `read` returns the same as `read_states`, with the same indices.

    Raises ImportError, OSError or an NVMLError where the library cannot be initialised.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml or importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]
        self.faults = NvmlFaults(self._nvml, self._handles)

    def read(self) -> dict[int, GpuState]:
        """Return the states of all GPUs; a field that a driver does not give is None."""
        nvml, states = self._nvml, dict[int, GpuState]()
        for gpu, handle in enumerate(self._handles):
            power_mw = self._field("nvmlDeviceGetPowerUsage", handle)
            bits = self._field("nvmlDeviceGetCurrentClocksEventReasons", handle)
            if bits is None:  # the name before driver 535
                bits = self._field("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
            states[gpu] = _gpu_state(
                gpu,
                self._field("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
                None if power_mw is None else power_mw / 1e3,
                self._field("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
                None if bits is None else int(bits),
            )
        return states

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _field(self, name: str, *arguments: Any) -> float | None:
        try:
            return float(getattr(self._nvml, name)(*arguments))
        except (self._nvml.NVMLError, AttributeError):
            return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def gpu_processes(run: RunCommand = run_text) -> list[GpuProcess]:
    """Return the compute processes on all GPUs."""
    text = run(
        ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"),
    )
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[1].isdigit():
            used = _number(cells[2])
            pid = int(cells[1])
            found.append(GpuProcess(cells[0], pid, process_owner(pid), int(used * MIB) if used is not None else None))
    return found
