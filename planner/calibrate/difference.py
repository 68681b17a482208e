"""Explain a run whose time differs from its prediction: the terms that could account for it, and what to measure next.

Errors of terms are independent normal numbers (`planner.calibrate.terms`), so the expected part of a difference due to
a term is the term's share of the step's variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner.calibrate.agenda import Wanted, agenda_for
from planner.calibrate.planned_step import PlannedStep
from simulator.calibration.calibration import Calibration
from simulator.config.estimate import NORMAL_80, Estimate, Interval
from topology.cluster import Cluster
from topology.profile.profile import Profile

MOST_TERMS, MOST_MEASUREMENTS = 5, 3
LEAST_SHARE = 0.02  # least share of a difference for a term to be listed
BUDGET_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A term that may be off. It is expected to account for `share` of the difference; for the whole difference, its
    cost would have to be `times` the predicted one.
    """

    name: str
    share: float
    times: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NextMeasurement:
    """A measurement to make, with its approximate seconds; afterwards the step is known within `after` (80 %)."""

    name: str
    seconds: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A measured step compared with its prediction. `expected` is the usual error of steps (80 %)."""

    measured_s: float
    predicted: Interval
    expected: float
    accounts: tuple[Account, ...]
    next: tuple[NextMeasurement, ...]

    @property
    def inside(self) -> bool:
        """Whether the measured step is inside the range of the prediction."""
        return self.predicted.low <= self.measured_s <= self.predicted.high


def difference_from(
    step: PlannedStep,
    cluster: Cluster,
    estimate: Estimate,
    step_s: float,
    *,
    calibration: Calibration | None = None,
    profile: Profile | None = None,
) -> Difference:
    """Return the terms that could account for a step that took `step_s` seconds and was predicted as `estimate`.

    Raises the errors of predicting it.
    """
    agenda = agenda_for(
        Wanted(steps=(step,)),
        cluster,
        profile,
        gpus=min(step.plan.gpus, cluster.gpus_per_node),
        budget_s=BUDGET_S,
        calibration=calibration,
    )
    covariance = agenda.knowledge(agenda.known).covariance
    effects = agenda.effects[0]
    moved = covariance @ effects  # change of each term per unit of the step's logarithm, times the variance
    variance = float(effects @ moved)
    apart = math.log(step_s / estimate.step_s.value)
    accounts: list[Account] = []
    for place in np.argsort(-effects * moved):
        share = float(effects[place] * moved[place]) / max(variance, 1e-12)
        if share < LEAST_SHARE or len(accounts) == MOST_TERMS:
            break
        term = agenda.terms[place]
        alone = min(abs(apart / float(effects[place])) * term.spread, math.log(1000.0))
        accounts.append(Account(name=term.name, share=share, times=math.exp(math.copysign(alone, apart))))
    return Difference(
        measured_s=step_s,
        predicted=estimate.step_s,
        expected=math.expm1(NORMAL_80 * math.sqrt(max(variance, 0.0))),
        accounts=tuple(accounts),
        next=tuple(
            NextMeasurement(
                name=one.measurement.name, seconds=one.measurement.seconds, after=math.expm1(NORMAL_80 * one.after)
            )
            for one in agenda.chosen[:MOST_MEASUREMENTS]
        ),
    )
