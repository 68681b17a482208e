"""Rates of the overlap modes fitted to measured times: a few numbers for all shapes, none for a single one.

Errors are relative, and large ones count linearly instead of squared, so that unexplained times do not bend all rates.
The logarithms of the rates are fitted, so that they stay above zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import scipy  # submodules are imported when first used
from numpy.typing import NDArray

from simulator.overlap.modes import OverlapRates, Parts, mode_s

SPAN = 4.0  # largest factor by which a rate may leave its start; beyond it the rate would mean something else
HELD = 0.01  # relative error that a change by a factor of e counts as: a rate without samples stays at its start
OUTLIER = 0.02  # relative error beyond which a time is treated as an outlier
RATES = tuple(field.name for field in fields(OverlapRates) if field.name != "issue")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedMode:
    """One measured time of a mode, and the times of its parts alone (numbers)."""

    operation: str
    mode: str
    parts: Parts
    seconds: float


Batch = tuple[str, str, Parts, NDArray[np.float64]]


def mean_error(samples: Sequence[TimedMode], rates: OverlapRates) -> float:
    """Return the mean of |predicted / measured - 1|."""
    return float(np.mean(np.abs(_errors(_batches(samples), rates))))


def fit_rates(samples: Sequence[TimedMode]) -> OverlapRates:
    """Return the rates that minimise the relative errors, each within a factor of `SPAN` of its default.

    Factors on the host's issue time are fitted as well, one for each operation and mode. Raises ValueError without
    samples.
    """
    if not samples:
        raise ValueError("there is nothing to fit: no samples")
    batches = _batches(samples)
    first = OverlapRates()
    issued = [f"{operation} {mode}" for operation, mode, _, _ in batches]

    def rates_at(logs: NDArray[np.float64]) -> OverlapRates:
        factors = dict(zip((*RATES, *issued), (float(factor) for factor in np.exp(logs)), strict=True))
        return replace(
            first,
            **{name: getattr(first, name) * factors[name] for name in RATES},
            issue={**first.issue} | {name: first.issue.get(name, 1.0) * factors[name] for name in issued},
        )

    most = np.log(SPAN)
    found = scipy.optimize.least_squares(
        lambda logs: np.concatenate([_errors(batches, rates_at(logs)), HELD * logs]),
        np.zeros(len(RATES) + len(issued)),
        bounds=(-most, most),
        loss="soft_l1",
        f_scale=OUTLIER,
    )
    return rates_at(found.x)


def _batches(samples: Sequence[TimedMode]) -> list[Batch]:
    """Return the samples by operation and mode, their parts as columns."""
    kinds = dict.fromkeys((sample.operation, sample.mode) for sample in samples)
    batches = []
    for operation, mode in kinds:
        these = [sample for sample in samples if (sample.operation, sample.mode) == (operation, mode)]
        columns = {
            part.name: np.array([float(getattr(sample.parts, part.name)) for sample in these]) for part in fields(Parts)
        }
        batches.append((operation, mode, Parts(**columns), np.array([sample.seconds for sample in these])))
    return batches


def _errors(batches: Sequence[Batch], rates: OverlapRates) -> NDArray[np.float64]:
    """Return predicted / measured - 1 of all samples."""
    errors = [mode_s(mode, operation, parts, rates) / seconds - 1 for operation, mode, parts, seconds in batches]
    return np.concatenate(errors)
