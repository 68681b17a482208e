"""Clocks, throttle reasons and other people's processes, as nvidia-smi tells them.

nvidia-smi rather than NVML: it is there wherever the driver is, and a hung driver hangs a child that can be killed
instead of this process.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from topology.processes import owner

TIMEOUT_S = 10.0
# Bits of nvmlClocksEventReasons that mean "slower than asked" (nvml.h).
REASONS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
Run = Callable[[Sequence[str]], str]


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
class Occupant:
    """A process that holds memory of a GPU. `owner` is None when it lives outside this container."""

    gpu_uuid: str
    pid: int
    owner: str | None
    memory_bytes: int | None


def read_states(run: Run = run_text) -> dict[int, dict[str, Any]]:
    """Return, by nvidia-smi's index, the fields of a `topology.measured.GpuState`. Empty without nvidia-smi."""
    # The field was renamed in driver 535; old drivers know only the old name, new ones may drop it.
    for name in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
        text = run(
            (
                "nvidia-smi",
                f"--query-gpu=index,clocks.sm,power.draw,temperature.gpu,{name}",
                "--format=csv,noheader,nounits",
            )
        )
        states = dict(filter(None, map(_state, text.splitlines())))
        if states:
            return states
    return {}


def _state(line: str) -> tuple[int, dict[str, Any]] | None:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 5 or not cells[0].isdigit():
        return None
    clock, power, temperature = (_number(cell) for cell in cells[1:4])
    try:
        bits = int(cells[4], 16)
        reasons: list[str] | None = [text for bit, text in REASONS.items() if bits & bit]
    except ValueError:
        reasons = None
    gpu = int(cells[0])
    return gpu, {
        "gpu": gpu,
        "sm_clock_hz": clock * 1e6 if clock is not None else None,
        "power_w": power,
        "temperature_c": temperature,
        "throttle": reasons,
    }


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def occupants(run: Run = run_text) -> list[Occupant]:
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
            found.append(Occupant(cells[0], pid, owner(pid), int(used * 2**20) if used is not None else None))
    return found
