"""What a step's time rests on, and how sure that makes us.

Shares are of the step: kernels measured at the very shape, kernels from a curve through others, the rest from datasheets
or assumed. A calibrated interval is as wide as runs of one and two layers lie around what is predicted for them, and
wider by what rests on less than measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.calibration import Calibration
from simulator.runtime import Runtime
from topology.cluster import Source

Floats = NDArray[np.float64]

# An 80 % half-width over a median deviation, for a normal distribution.
HALF_WIDTH = 1.28 / 0.6745
LEAST = 0.06  # the same layers took 3 to 6 % more or less on two hosts with the same GPUs (examples/profiles)
BORROWED = 0.03  # the executor took 1.2 % less to 3.3 % more than torchtitan for the same plan, minutes apart (examples/validation)
UNRUN = 0.08  # where no layer of the runtime was run: its host and its order of kernels are the description's
# What a share adds that is not measured: the intervals that datasheet predictions have (simulator.closed_form).
WIDER = {Source.MEASURED: 0.0, Source.FITTED: 0.0, Source.DATASHEET: 0.15, Source.ASSUMED: 0.30}
# What a wait for the host adds, for each share of the step that it is. Hosts of equal machines differ far more than their
# GPUs: one tensor-parallel layer kept them busy for 9 to 16 ms in three sessions, a fully sharded one for 4.9 to 7.9
# (examples/profiles). Beside the runtime's description, which another machine was the model for, those were 1.9 to 3.5
# times as slow; none was quicker.
HOST_MEASURED = 0.28
HOST_DESCRIBED = (0.0, 1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Seconds of a step by source, one value a plan."""

    seconds: dict[Source, Floats]

    def more(self, source: Source, seconds: Floats) -> Shares:
        """Return the shares of steps that take `seconds` more, resting on `source`."""
        return Shares(seconds={**self.seconds, source: self.seconds[source] + seconds})

    def row(self, index: int, step_s: float) -> dict[str, float]:
        """Return the shares of one plan, best source first; they add up to 1."""
        total = sum(float(part[index]) for part in self.seconds.values()) or step_s
        return {source.value: float(part[index]) / total for source, part in self.seconds.items()}


def shares(
    breakdown_s: dict[str, Floats],
    *,
    measured_s: Floats,
    fitted_s: Floats,
    kernels_s: Floats,
    calibration: Calibration | None,
    runtime: Runtime,
    communication_measured: NDArray[np.bool_],
) -> Shares:
    """Return what each part of a step rests on.

    `measured_s` and `fitted_s` are parts of `kernels_s`, the compute of a micro batch. A bubble is made of the compute
    of others, so it rests on the same.
    """
    step = sum(breakdown_s.values(), np.zeros_like(kernels_s))
    found = {source: np.zeros_like(step) for source in Source}

    def book(name: str, source: Source) -> None:
        found[source] = found[source] + breakdown_s.get(name, 0.0)

    compute = breakdown_s["compute"] + breakdown_s["recompute"] + breakdown_s["bubble"]
    whole = np.maximum(kernels_s, 1e-30)
    found[Source.MEASURED] = found[Source.MEASURED] + compute * measured_s / whole
    found[Source.FITTED] = found[Source.FITTED] + compute * fitted_s / whole
    found[Source.DATASHEET] = found[Source.DATASHEET] + compute * (1 - (measured_s + fitted_s) / whole)
    moved = breakdown_s["exposed_communication"]
    found[Source.MEASURED] = found[Source.MEASURED] + np.where(communication_measured, moved, 0.0)
    found[Source.DATASHEET] = found[Source.DATASHEET] + np.where(communication_measured, 0.0, moved)
    if calibration is None:
        found[Source.DATASHEET] = found[Source.DATASHEET] + breakdown_s["copies"] + breakdown_s["optimizer"]
        found[Source.ASSUMED] = found[Source.ASSUMED] + breakdown_s["contention"] + breakdown_s["host"]
        return Shares(seconds=found)
    book("copies", Source.FITTED if calibration.packing is not None else Source.DATASHEET)
    book("contention", Source.FITTED if calibration.beside else Source.ASSUMED)
    book("optimizer", Source.FITTED if calibration.updates else Source.DATASHEET)
    ran = calibration.runtime(runtime.name, compiled=runtime.compile).runs > 0
    book("host", Source.FITTED if ran else Source.ASSUMED)
    return Shares(seconds=found)


def half_width(row: dict[str, float], calibration: Calibration, runtime: Runtime, *, host: float) -> float:
    """Return the relative half-width of a calibrated step's 80 % interval; `host` is the share of waiting for it."""
    costs = calibration.runtime(runtime.name, compiled=runtime.compile)
    base = float(np.hypot(HALF_WIDTH * costs.spread, LEAST)) if costs.runs and costs.spread else UNRUN
    base += BORROWED if costs.borrowed else 0.0
    return base + HOST_MEASURED * host + sum(row.get(source.value, 0.0) * wider for source, wider in WIDER.items())


def main_source(row: dict[str, float]) -> Source:
    """Return the best source that half of a step rests on, with all better ones."""
    total = 0.0
    for source in Source:
        total += row.get(source.value, 0.0)
        if total >= 0.5:
            return source
    return Source.ASSUMED
