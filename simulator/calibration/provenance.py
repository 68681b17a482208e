"""Which sources a step's time comes from.

Shares are of the step: kernels measured with the same shape, kernels from a curve through other shapes, the rest from
datasheets or assumed. `simulator.calibration.intervals` has the range for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.calibration.calibration import Calibration
from simulator.config.runtime import Runtime
from topology.cluster import Source

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Seconds of a step by source, each of shape (plans,)."""

    seconds: dict[Source, Floats]

    def row(self, index: int, step_s: float) -> dict[str, float]:
        """Return the shares of one plan, best source first; they add up to 1."""
        total = sum(float(part[index]) for part in self.seconds.values()) or step_s
        return {source.value: float(part[index]) / total for source, part in self.seconds.items()}


def shares(
    breakdown_s: dict[str, Floats],
    *,
    measured: Floats,
    fitted: Floats,
    calibration: Calibration | None,
    runtime: Runtime,
    communication_measured: NDArray[np.bool_],
) -> Shares:
    """Return the seconds of each step by source.

    `measured` and `fitted` are shares of the time of kernels. A bubble is the compute time of other ranks, so it has
    the sources of compute.
    """
    step = sum(breakdown_s.values(), np.zeros_like(measured))
    found = {source: np.zeros_like(step) for source in Source}

    def book(name: str, source: Source) -> None:
        found[source] = found[source] + breakdown_s.get(name, 0.0)

    compute = breakdown_s["compute"] + breakdown_s["recompute"] + breakdown_s["bubble"]
    found[Source.MEASURED] = found[Source.MEASURED] + compute * measured
    found[Source.FITTED] = found[Source.FITTED] + compute * fitted
    found[Source.DATASHEET] = found[Source.DATASHEET] + compute * (1 - (measured + fitted))
    moved = breakdown_s["exposed_communication"]
    found[Source.MEASURED] = found[Source.MEASURED] + np.where(communication_measured, moved, 0.0)
    found[Source.DATASHEET] = found[Source.DATASHEET] + np.where(communication_measured, 0.0, moved)
    if calibration is None:
        found[Source.DATASHEET] = found[Source.DATASHEET] + breakdown_s["copies"] + breakdown_s["optimizer"]
        found[Source.ASSUMED] = found[Source.ASSUMED] + breakdown_s["contention"] + breakdown_s["host"]
        return Shares(seconds=found)
    book("copies", Source.FITTED if calibration.operators.packing else Source.DATASHEET)
    book("contention", Source.FITTED if calibration.contention else Source.ASSUMED)
    book("optimizer", Source.FITTED if calibration.operators.update_rates else Source.DATASHEET)
    ran = calibration.runtime(runtime.name, compiled=runtime.compile).runs > 0
    book("host", Source.FITTED if ran else Source.ASSUMED)
    return Shares(seconds=found)


def main_source(row: dict[str, float]) -> Source:
    """Return the best source such that it and all better ones cover half of a step."""
    total = 0.0
    for source in Source:
        total += row.get(source.value, 0.0)
        if total >= 0.5:
            return source
    return Source.ASSUMED
