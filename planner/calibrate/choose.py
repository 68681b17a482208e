"""The order of measurements: first those that narrow the choice most per second.

Errors of terms are independent standard normal numbers before anything is measured (`planner.calibrate.terms`). A
measurement observes a combination of them with noise, and leaves a smaller covariance. The targets are differences of
two plans' steps, or single steps. This is greedy Bayesian experimental design (Chaloner and Verdinelli, Bayesian
experimental design: a review, Statistical Science, 1995): take the measurement that lowers the weighted variance of the
targets most per second, condition on it, and repeat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.calibrate.calibration_request import Request
from simulator.calibration.gaussian import conditioned

Floats = NDArray[np.float64]

LEAST_GAIN = 0.003  # share of the remaining variance that a measurement must remove to be worth its seconds
LEAST_SPREAD = 0.002  # root of the variance, per target, that a measurement must remove at least
OWN_WEIGHT = 0.1  # weight of the first plan's own step, besides its differences from others


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A possible measurement: `request` describes it; it takes about `seconds` on `ranks` GPUs. `seen` (observations,
    terms) is how the logarithm of each measured time changes with each term, `noise` (observations) the error of each
    time.
    """

    name: str
    request: Request
    ranks: int
    seconds: float
    seen: Floats
    noise: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Targets: `rows` (targets, terms) with their `weights`."""

    rows: Floats
    weights: Floats

    def spread(self, covariance: Floats) -> float:
        """Return the uncertainty of the targets: the root of their weighted mean variance."""
        return math.sqrt(max(self.variance(covariance), 0.0) / max(float(self.weights.sum()), 1e-12))

    def variance(self, covariance: Floats) -> float:
        return float(np.einsum("i,ij,jk,ik->", self.weights, self.rows, covariance, self.rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A chosen measurement, with the uncertainty of the targets before and after it, as spreads of logarithms."""

    measurement: Measurement
    before: float
    after: float


@dataclass(slots=True)
class Knowledge:
    """The covariance of the terms' errors, given what was measured."""

    covariance: Floats

    @classmethod
    def of_nothing(cls, terms: int) -> Knowledge:
        return cls(np.eye(terms))

    def after(self, measurement: Measurement) -> Floats:
        """Return the covariance after a measurement."""
        return conditioned(self.covariance, measurement.seen, measurement.noise)

    def measure(self, measurement: Measurement) -> None:
        self.covariance = self.after(measurement)


def targets_of_differences(effects: Floats, steps: Floats) -> Targets:
    """Return the targets that decide between plans, given their effects (plans, terms) and predicted steps, the fastest
    first.

    The difference of each plan to the first counts more, the likelier the two change places; the first step itself
    counts a little.
    """
    apart = effects[1:] - effects[0]
    unsure = np.maximum(np.linalg.norm(apart, axis=1), 1e-9)
    gaps = np.log(steps[1:] / steps[0])
    weights = np.exp(-0.5 * np.square(gaps / unsure))
    return Targets(rows=np.vstack([apart, effects[:1]]), weights=np.append(weights, OWN_WEIGHT))


def targets_of_steps(effects: Floats) -> Targets:
    """Return the plans' own steps as targets."""
    return Targets(rows=effects, weights=np.ones(len(effects)))


def in_order(
    measurements: Sequence[Measurement],
    targets: Targets,
    knowledge: Knowledge,
    *,
    gpus: int,
    budget_s: float,
    everything: bool = False,
) -> list[Chosen]:
    """Return the measurements that are worth their seconds within `budget_s` on `gpus` GPUs, in order; `knowledge` is
    conditioned on them. With `everything`, the others follow in their given order.

    Measurements on few GPUs run at the same time on different GPUs, so a second of one costs its share of the GPUs.
    """
    left, found, time_left = list(measurements), [], budget_s
    while left:
        now = targets.variance(knowledge.covariance)
        least = max(LEAST_GAIN * now, LEAST_SPREAD**2 * float(targets.weights.sum()))
        gains = [now - targets.variance(knowledge.after(one)) for one in left]
        rates = [
            gain / cost if (cost := _cost(one, gpus)) <= time_left and gain >= least else -1.0
            for gain, one in zip(gains, left, strict=True)
        ]
        best = int(np.argmax(rates))
        if rates[best] <= 0:
            break
        one = left.pop(best)
        before = targets.spread(knowledge.covariance)
        knowledge.measure(one)
        found.append(Chosen(measurement=one, before=before, after=targets.spread(knowledge.covariance)))
        time_left -= _cost(one, gpus)
    for one in left if everything else ():
        if (cost := _cost(one, gpus)) <= time_left:
            before = targets.spread(knowledge.covariance)
            knowledge.measure(one)
            found.append(Chosen(measurement=one, before=before, after=targets.spread(knowledge.covariance)))
            time_left -= cost
    return found


def expected_seconds(chosen: Sequence[Chosen], gpus: int) -> float:
    """Return the approximate seconds of measurements together."""
    return sum(_cost(one.measurement, gpus) for one in chosen)


def _cost(one: Measurement, gpus: int) -> float:
    return max(one.seconds * min(one.ranks, gpus) / max(gpus, 1), 1e-3)
