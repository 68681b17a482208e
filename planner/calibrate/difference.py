"""Explain a run whose time differs from its prediction: the terms that could account for it, and what to measure next.

Errors of terms are independent normal numbers (`planner.calibrate.terms`), so the expected part of a difference due to
a term is the term's share of the step's variance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.calibrate.agenda import Wanted, agenda_for
from planner.calibrate.planned_step import PlannedStep
from planner.io.figures import interval_text, last_digit_s, seconds_text
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


# --- as text ----------------------------------------------------------------------------------------------------------


FAR = 2.0  # multiple of a step's usual error beyond which terms alone hardly explain the difference


def difference_lines(found: Difference, file: str) -> Iterator[str]:
    """Return lines with the difference, the terms that could account for it, and what to measure next."""
    last_s, apart = last_digit_s(found.predicted), found.measured_s / found.predicted.value - 1
    side = "inside" if found.inside else "outside"
    far = abs(math.log1p(apart)) > FAR * math.log1p(found.expected)
    other = (
        "work outside the step: loading data, checkpoints, logging, validation, other jobs on the machine"
        if apart > 0
        else "less work than the plan says: fewer tokens in a sequence, a smaller batch, frozen parameters"
    )
    measured, predicted = seconds_text(found.measured_s, last_s), interval_text(found.predicted)
    yield f"measured  {measured}, {apart:+.0%} against the predicted {predicted}: {side} its 80% range"
    if far:
        yield f"likely    {other}"
    yield from (
        f"{'could be' if place == 0 else '':10s}{one.name}: they are expected to account for {one.share:.0%} of the"
        f" difference; to account for all of it, they would take {_times(one.times)} as long as predicted"
        for place, one in enumerate(found.accounts)
    )
    if not far:
        yield f"or        {other}"
    yield from (
        f"{'measure' if place == 0 else '':10s}{one.name}: this takes about {one.seconds:.0f} s, after which the step"
        f" is known within {one.after:.1%}"
        for place, one in enumerate(found.next)
    )
    yield f"start     on the machine: planner calibrate --for {file} --out profile.json"


def _times(factor: float) -> str:
    return "more than 20 times" if factor > 20 else "almost no time, not" if factor < 0.05 else f"{factor:.2g} times"
