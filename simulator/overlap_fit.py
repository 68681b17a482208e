"""Rates of the overlap modes from measured times: few numbers for all shapes, none that belongs to one.

The error to make small is the mean of |predicted / measured - 1|. It has kinks where a copy ceases to be hidden, so one
rate after another is moved by shrinking steps, and again from where that ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from simulator.overlap_modes import OverlapRates, Parts, mode_s

SPAN = 4.0  # how far a rate may move from its default; beyond that it would no longer be what its name says
ISSUE_SPAN = 4.0  # and the host's calls of one operation and mode from what was counted
RATES = tuple(field.name for field in fields(OverlapRates) if field.name != "issue")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedMode:
    """One measured time of a mode, beside what its parts take alone (numbers)."""

    operation: str
    mode: str
    parts: Parts
    seconds: float


Batch = tuple[str, str, Parts, NDArray[np.float64]]


def mean_error(samples: Sequence[TimedMode], rates: OverlapRates) -> float:
    """Return the mean of |predicted / measured - 1|."""
    return _error(_batches(samples), rates)


def fit_rates(
    samples: Sequence[TimedMode], start: OverlapRates | None = None, *, first_step: float = 2.0, rounds: int = 3
) -> OverlapRates:
    """Return the rates with the least mean error, each within a factor of `SPAN` of where it starts.

    `first_step` is the factor by which each is moved first; a small one, and one round, for what is fitted already.

    Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("there is nothing to fit: no samples")
    batches = _batches(samples)
    best = first = start or OverlapRates()
    error = _error(batches, best)
    names = [*RATES, *(f"{operation} {mode}" for operation, mode, _, _ in batches)]
    for _ in range(rounds):
        step = first_step
        while step > 1.01:
            improved = False
            for name in names:
                for factor in (step, 1 / step):
                    tried = _moved(best, first, name, factor)
                    if tried is not None and (found := _error(batches, tried)) < error:
                        best, error, improved = tried, found, True
            if not improved:
                step = step**0.5
    return best


def _moved(rates: OverlapRates, first: OverlapRates, name: str, factor: float) -> OverlapRates | None:
    """Return `rates` with one of them multiplied by `factor`, or nothing where that would leave its span."""
    if name in RATES:
        value = getattr(rates, name) * factor
        return replace(rates, **{name: value}) if 1 / SPAN <= value / getattr(first, name) <= SPAN else None
    value = rates.issue.get(name, 1.0) * factor
    within = 1 / ISSUE_SPAN <= value / first.issue.get(name, 1.0) <= ISSUE_SPAN
    return replace(rates, issue={**rates.issue, name: value}) if within else None


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


def _error(batches: Sequence[Batch], rates: OverlapRates) -> float:
    errors = [
        np.abs(mode_s(mode, operation, parts, rates) / seconds - 1) for operation, mode, parts, seconds in batches
    ]
    return float(np.mean(np.concatenate(errors)))
