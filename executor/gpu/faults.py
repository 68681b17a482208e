"""GPU faults that the driver reports during a run: off the bus, Xid errors, memory errors beyond ECC.

Sources: nvml.h (error codes, event types); NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors) for the meanings.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from topology.readers.nvml import GPU_IS_LOST

XIDS = {
    13: "graphics engine exception, such as an address out of range in a kernel",
    31: "a kernel accessed memory that is not its own",
    48: "memory error that ECC could not correct",
    63: "a bad row of memory was recorded, to be replaced",
    64: "a bad row of memory could not be recorded",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many memory errors that ECC corrected",
    94: "memory error that ECC could not correct, contained in one process",
    95: "memory error that ECC could not correct, not contained",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
}
CONSEQUENCES = frozenset({43, 45})  # reported for every process that ends while it has work on a GPU
XID_EVENT = 8  # nvmlEventTypeXidCriticalError
UNCORRECTED, VOLATILE = 1, 0  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC
MOST_EVENTS = 64  # read at a time
LOST = "it has fallen off the bus: the driver cannot reach it"
COMPLAINT = re.compile(r"unable to determine the device handle|is lost|fallen off the bus|unknown error", re.IGNORECASE)
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFault:
    """A fault of a GPU: its nvidia-smi index (None: unknown), what happened, and when (seconds since the epoch)."""

    gpu: int | None
    what: str
    at: float

    @property
    def text(self) -> str:
        return f"{'a GPU' if self.gpu is None else f'GPU {self.gpu}'}: {self.what}"


class NvmlFaults:
    """Asks an initialised NVML library for the faults since this object was made; reports each once."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml, self._handles = nvml, handles
        self._told: set[tuple[int, str]] = set()
        self._events: Any = None
        self._before = [self._uncorrected(handle) for handle in handles]
        try:
            self._events = nvml.nvmlEventSetCreate()
            for handle in handles:
                nvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, self._events)
        except (nvml.NVMLError, AttributeError):  # missing in some virtual machines
            self._events = None

    def poll(self) -> list[tuple[int, str]]:
        """Return (GPU, what happened) of every fault not reported yet."""
        found = self._xids()
        for gpu, handle in enumerate(self._handles):
            if self._is_lost(handle):
                found.append((gpu, LOST))
            elif more := self._uncorrected(handle) - self._before[gpu]:
                found.append((gpu, f"{more} memory errors that ECC could not correct"))
                self._before[gpu] += more
        fresh = [one for one in dict.fromkeys(found) if one not in self._told]
        self._told.update(fresh)
        return fresh

    def _xids(self) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        nvml = self._nvml
        for _ in range(MOST_EVENTS if self._events is not None else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                gpu = int(nvml.nvmlDeviceGetIndex(event.device))
            except nvml.NVMLError:  # no further event
                break
            number = int(event.eventData)
            if number not in CONSEQUENCES:
                found.append((gpu, f"Xid {number}" + (f" ({XIDS[number]})" if number in XIDS else "")))
        return found

    def _is_lost(self, handle: Any) -> bool:
        try:
            self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except self._nvml.NVMLError as error:
            return getattr(error, "value", None) == GPU_IS_LOST
        except AttributeError:
            return False
        return False

    def _uncorrected(self, handle: Any) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetTotalEccErrors(handle, UNCORRECTED, VOLATILE))
        except (self._nvml.NVMLError, AttributeError):  # GPUs without ECC
            return 0


class SmiFaults:
    """The same without NVML: a fault is that nvidia-smi fails after it has answered once; its message is the
    description.
    """

    def __init__(self, complain: Callable[[], str] | None = None) -> None:
        self._complain, self._told = complain or _complaint, False

    def poll(self) -> list[tuple[int | None, str]]:
        """Return nvidia-smi's error message, once."""
        line = "" if self._told else next(filter(COMPLAINT.search, self._complain().splitlines()), "")
        self._told = self._told or bool(line)
        return [(None, line.strip()[:300])] if line else []


def _complaint() -> str:
    """Return the output of nvidia-smi, which has a message if it fails; empty if it cannot be run."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f"{done.stdout}\n{done.stderr}"
