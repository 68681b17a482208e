"""Clocks, power and throttle reasons while a run is going: a slow step on a throttled GPU says nothing of the plan."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from executor.gpu_state import Nvml, read_states

PERIOD_S = 2.0  # of nvidia-smi, which takes tenths of a second to start
NVML_PERIOD_S = 0.5  # so that a short run has samples; all fields are one call each to an open library
Read = Callable[[], dict[int, dict[str, Any]]]
Sample = tuple[float, dict[int, dict[str, Any]]]  # time of the clock, state by nvidia-smi's index


class GpuWatch:
    """Asks NVML twice a second, or nvidia-smi every two seconds, in a thread, from `start` to `stop`."""

    def __init__(self, read: Read = read_states, open_nvml: Callable[[], Nvml] = Nvml) -> None:
        self._read, self._open_nvml, self._over = read, open_nvml, threading.Event()
        self._samples: list[Sample] = []
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpu-watch")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[Sample]:
        """Return what was seen."""
        self._over.set()
        self._thread.join(timeout=2 * PERIOD_S)
        return list(self._samples)

    def _run(self) -> None:
        try:
            nvml = self._open_nvml()
        except Exception:  # noqa: BLE001 - no library, no driver, another version: whatever it is, nvidia-smi may do
            self._ask(self._read, PERIOD_S)
            return
        self._ask(nvml.read, NVML_PERIOD_S)
        nvml.close()

    def _ask(self, read: Read, period_s: float) -> None:
        while not self._over.wait(period_s):
            states = read()
            if states:
                self._samples.append((time.time(), states))


def summarise(samples: Sequence[Sample], gpus: Sequence[int], begin: float, end: float) -> list[dict[str, Any]]:
    """Return, GPU by GPU, clocks and reasons for being slow between two times of the clock; `samples` tells how many."""
    during = [states for at, states in samples if begin <= at <= end]
    answer = []
    for gpu in gpus:
        mine = [states[gpu] for states in during if gpu in states]
        clocks = [state["sm_clock_hz"] for state in mine if state["sm_clock_hz"] is not None]
        power = [state["power_w"] for state in mine if state["power_w"] is not None]
        reasons = sorted({reason for state in mine for reason in state["throttle"] or ()})
        answer.append(
            {
                "gpu": gpu,
                "samples": len(mine),
                "sm_clock_hz": {"lowest": min(clocks), "median": median(clocks)} if clocks else None,
                "power_w": max(power) if power else None,
                "throttle": reasons,
            }
        )
    return answer
