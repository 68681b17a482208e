"""Beliefs about the finalists after each trial: the posterior as it narrows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.io.plan_words import plan_in_words
from planner.tune.beliefs import believe
from planner.tune.candidates import Candidate, Candidates
from planner.tune.loop import View
from planner.tune.stop import outlook
from planner.tune.trials import Trial

SHOWN = 8  # plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Believed:
    """The belief about a plan after `trials` trials, in seconds; `measured_s` after a trial of it that took steps."""

    plan: str
    trials: int
    value: float
    low: float
    high: float
    measured_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """`finalists`, plan by plan and trial by trial; `better_plan_left` is the probability of a better untried plan, by
    number of trials.
    """

    finalists: tuple[Believed, ...]
    better_plan_left: tuple[float, ...]


def history(view: View, *, within: float, unknown_machine: bool = False) -> History:
    """Return the posterior of the finalists: the plans measured fastest and those believed fastest."""
    rows = _finalists(view)
    found: list[Believed] = []
    left = []
    for made in range(len(view.trials) + 1):
        seen = view.trials[:made]
        beliefs = believe(view.candidates, seen, unknown_machine=unknown_machine)
        left.append(outlook(view.candidates, beliefs, seen, within).probability)
        for row in rows:
            value, low, high = beliefs.step.interval(row)
            one = view.candidates.plans[row]
            found.append(
                Believed(
                    plan=candidate_words(one),
                    trials=made,
                    value=value,
                    low=low,
                    high=high,
                    measured_s=_measured(one, seen),
                )
            )
    return History(finalists=tuple(found), better_plan_left=tuple(left))


def candidate_words(one: Candidate) -> str:
    """Return a description of a candidate, including how it differs from others with the same degrees."""
    return plan_in_words(one.plan) + (", compiled" if one.runtime.compile else "")


def _measured(one: Candidate, trials: tuple[Trial, ...]) -> float | None:
    return next((trial.step_s for trial in trials if trial.key == one.key), None)


def _finalists(view: View) -> list[int]:
    candidates: Candidates = view.candidates
    timed = sorted((trial.step_s, candidates.row(trial.key)) for trial in view.trials if trial.step_s)
    tried = [row for _, row in timed if row is not None][: SHOWN // 2]
    beliefs = view.beliefs
    chance = [float(beliefs.fits[row] * beliefs.runs[row]) for row in range(len(candidates))]
    ranked = sorted(
        (row for row in range(len(candidates)) if chance[row] > 0.05),
        key=lambda row: float(beliefs.step.mean[row]) - math.log(chance[row]),
    )
    return list(dict.fromkeys([*tried, *ranked]))[:SHOWN]
