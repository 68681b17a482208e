"""The agenda of a calibration: the steps whose uncertainty it is to reduce, the measurements in their order, and what
stays assumed afterwards.

The steps are those of plans that could win a question, of plans in files, or of typical plans of a runtime.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.calibrate.calibration_request import shrink
from planner.calibrate.choose import (
    Chosen,
    Floats,
    Knowledge,
    Measurement,
    Targets,
    expected_seconds,
    in_order,
    targets_of_differences,
    targets_of_steps,
)
from planner.calibrate.layer_runs import timed_runtime
from planner.calibrate.measurements import (
    PossibleMeasurements,
    job_of,
    layers_in_words,
    messages,
    ops_of,
    own_effects,
    without_known,
)
from planner.calibrate.planned_step import PlannedStep
from planner.calibrate.terms import Term, terms_of
from simulator.calibration.calibration import Calibration
from simulator.config.estimate import NORMAL_80
from topology.cluster import Cluster
from topology.profile.profile import Profile

STARTING_S = 16.0  # seconds of a budget in which processes start: import torch from a cold disk, join groups
MEASURED_BELOW = 0.8  # share of a term's spread; a term with more left was hardly measured
LEAST_CHANGE = 0.01  # share of a step that an assumption must be able to change to be listed


LAUNCHES: dict[str, object] = {
    "kind": "host",
    "name": "launches of small kernels",
    "ranks": 1,
    "seconds": 2.0,
    "items": [],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The steps to become certain, the likeliest plans first. `choice`: they are plans of one question, one of which is
    chosen; otherwise each step counts by itself.
    """

    steps: tuple[PlannedStep, ...]
    choice: bool = False
    everything: bool = False  # continue with measurements of little value while there is time


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A term that keeps its assumed value: its possible error (80 %), the plan whose step it changes most and by how
    much, and whether it could change which plan is first.
    """

    name: str
    spread: float
    plan: str
    change: float
    decides: bool


@dataclass(slots=True, kw_only=True)
class Agenda:
    """`chosen` are the measurements to make, in order; `known` those that the profile has."""

    wanted: Wanted
    terms: list[Term]
    effects: Floats
    steps_s: Floats
    targets: Targets
    known: list[Measurement]
    chosen: list[Chosen]
    gpus: int

    @property
    def seconds(self) -> float:
        """Approximate seconds, including the start of processes."""
        return STARTING_S + expected_seconds(self.chosen, self.gpus)

    def jobs(self) -> list[dict[str, object]]:
        """Return the executor's jobs in order; the last, if there is time, measures launches, for the report only."""
        last = [LAUNCHES] if self.wanted.everything else []
        return [*(job_of(one.measurement) for one in self.chosen), *last]

    def knowledge(self, made: Sequence[Measurement]) -> Knowledge:
        """Return the knowledge after the measurements `made`."""
        found = Knowledge.of_nothing(len(self.terms))
        for one in made:
            found.measure(one)
        return found

    def spread_after(self, made: Sequence[Measurement]) -> float:
        """Return the uncertainty (80 %, relative) of the targets after the measurements `made`."""
        return math.expm1(NORMAL_80 * self.targets.spread(self.knowledge(made).covariance))

    def assumed(self, made: Sequence[Measurement]) -> list[Assumption]:
        """Return assumptions that remain after the measurements `made` and could change a step, the largest effect
        first.
        """
        spreads = np.sqrt(np.maximum(np.diag(self.knowledge(made).covariance), 0.0))
        found = []
        for place, term in enumerate(self.terms):
            if spreads[place] < MEASURED_BELOW:
                continue
            changes = NORMAL_80 * spreads[place] * self.effects[:, place]
            most = int(np.argmax(np.abs(changes)))
            if abs(changes[most]) < LEAST_CHANGE:
                continue
            found.append(
                Assumption(
                    name=term.name,
                    spread=math.expm1(NORMAL_80 * spreads[place] * term.spread),
                    plan=layers_in_words(self.wanted.steps[most].plan),
                    change=math.expm1(changes[most]),
                    decides=self.wanted.choice and self._decides(changes),
                )
            )
        return sorted(found, key=lambda one: (not one.decides, -abs(one.change)))

    def _decides(self, changes: Floats) -> bool:
        """Return whether changing steps by `changes`, in either direction, makes another plan the first."""
        logs = np.log(self.steps_s)
        return any(int(np.argmin(logs + sign * changes)) != int(np.argmin(logs)) for sign in (1.0, -1.0))


def agenda_for(
    wanted: Wanted,
    cluster: Cluster,
    profile: Profile | None,
    *,
    gpus: int,
    budget_s: float,
    calibration: Calibration | None = None,
    collectives: bool = True,
    operators: bool = True,
    stand_in: bool = False,
) -> Agenda:
    """Return what to measure on `gpus` GPUs of `cluster` within `budget_s` seconds; for a `stand_in` tiny ones of the
    same kinds.

    Raises the errors of predicting the steps.
    """
    steps = list(wanted.steps)
    runtimes = [step.runtime for step in steps]
    runtimes += [timed_runtime(one) for one in runtimes]
    sent = [messages(step, cluster) for step in steps]
    terms = terms_of([step.plan for step in steps], runtimes, ops_of(sent))
    rows, seconds = own_effects(steps, cluster, terms, calibration)
    order = np.argsort(seconds, kind="stable") if wanted.choice else np.arange(len(steps))
    wanted = replace(wanted, steps=tuple(steps[place] for place in order))
    rows, seconds = rows[order], seconds[order]
    targets = targets_of_differences(rows, seconds) if wanted.choice and len(steps) > 1 else targets_of_steps(rows)
    possible = PossibleMeasurements(cluster, gpus, terms, calibration).of(wanted.steps, [sent[one] for one in order])
    possible = [
        one
        for one in possible
        if (operators or not one.request.operators) and (collectives or not one.request.collectives)
    ]
    if stand_in:
        possible = [one for some in possible if not (one := replace(some, request=shrink(some.request))).request.empty]
    lacking, known = without_known(possible, profile)
    agenda = Agenda(
        wanted=wanted, terms=terms, effects=rows, steps_s=seconds, targets=targets, known=known, chosen=[], gpus=gpus
    )
    agenda.chosen = in_order(
        lacking,
        targets,
        agenda.knowledge(known),
        gpus=gpus,
        budget_s=max(budget_s - STARTING_S, 0.5 * budget_s),
        everything=wanted.everything,
    )
    return agenda


def made_of(agenda: Agenda, profile: Profile) -> list[Measurement]:
    """Return the measurements of the agenda that a profile has, including those known before."""
    _, made = without_known([*agenda.known, *(one.measurement for one in agenda.chosen)], profile)
    return made
