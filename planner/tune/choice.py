"""Choice of the next plan to try: the one with the largest expected improvement of the final choice per second of its
trial.

A trial may improve the best measured step. Its value is the expected improvement (Jones, Schonlau and Welch, J. Global
Optimization 13, 1998) over that step under the joint belief, which every trial has corrected, times the probability
that the plan runs at all. The value of a plan that may not fit includes that of plans that would be known to fit if it
did.

Plans that certainly fit are tried first. A plan that may not fit is tried if its value is larger even when the cost of
a failed trial is included. After the first measurement, only trials are begun that are expected to end within the time
left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from planner.tune.beliefs import NOISE, Belief, Beliefs, Floats
from planner.tune.candidates import Candidates
from planner.tune.trials import Chosen, Runner, Trial
from simulator.config.estimate import SURE

LEAST_FITS = 0.05  # plans with a lower probability of fitting are not tried
MOST_TOGETHER = 4  # trials per start of processes; with more, their results would come too late for the choice
COMPANION = 0.25  # share of the most valuable trial's value that a trial needs to be added to a start


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best measured plan: its index and its step."""

    row: int
    step_s: float


def best_of(candidates: Candidates, trials: Sequence[Trial]) -> Best | None:
    """Return the fastest measured plan; None if there is none."""
    timed = [(trial.step_s, row) for trial in trials if trial.step_s and (row := candidates.row(trial.key)) is not None]
    if not timed:
        return None
    step_s, row = min(timed)
    return Best(row=row, step_s=step_s)


def untried(candidates: Candidates, beliefs: Beliefs, trials: Sequence[Trial]) -> list[int]:
    """Return the plans that may be tried: not tried yet, and not ruled out by their memory."""
    done = {trial.key for trial in trials if trial.status.blames_plan}
    return [row for row, one in enumerate(candidates.plans) if beliefs.fits[row] >= LEAST_FITS and one.key not in done]


def choose(
    candidates: Candidates,
    beliefs: Beliefs,
    trials: Sequence[Trial],
    runner: Runner,
    *,
    together: int = MOST_TOGETHER,
    counted: bool = False,
    left_s: float = math.inf,
) -> list[Chosen]:
    """Return the next plan to try, and those worth trying with the same start of processes; empty for none.

    If trials are `counted`, and not only their seconds, a low cost is no reason for a trial. Trials must end within
    `left_s` seconds, except the first of a tuning, without which nothing would be known.
    """
    least = 1.0 if counted else COMPANION
    rows = untried(candidates, beliefs, trials)
    if not rows:
        return []
    best = best_of(candidates, trials)
    if best is None:
        first = _first(beliefs, rows)
        return [first, *_companions(candidates, beliefs, rows, first, runner, together, least, left_s)]
    rows = [row for row in rows if whole_s(candidates, beliefs, row, runner) <= left_s]
    if not rows:
        return []
    gains = gain(beliefs.step, rows, best)
    costs = np.array([_cost_s(candidates, beliefs, row, runner) for row in rows])
    chances = beliefs.fits[rows] * beliefs.runs[rows]
    values = chances * gains
    unsure = beliefs.fits[rows] < SURE
    values += np.where(unsure, beliefs.fits[rows] * _unlocked(beliefs, rows, gains, unsure), 0.0)
    place = int(np.argmax(values / costs))
    row = rows[place]
    chosen = Chosen(row=row, why=_why(beliefs, row, float(gains[place]), best), predicted_s=beliefs.step.interval(row))
    return [chosen, *_companions(candidates, beliefs, rows, chosen, runner, together, least, left_s)]


def gain(step: Belief, rows: Sequence[int], best: Best) -> Floats:
    """Return the expected improvement of the best measured step by each plan, relative to that step."""
    at = np.asarray(rows)
    less = math.log(best.step_s) - step.mean[at]
    spread = np.sqrt(np.square(step.spread[at]) + NOISE**2)
    z = less / spread
    return np.asarray(less * ndtr(z) + spread * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi), dtype=np.float64)


def _first(beliefs: Beliefs, rows: Sequence[int]) -> Chosen:
    """Return the first trial: the plan with the smallest ratio of expected time to the probability that it runs."""
    chance = np.maximum(beliefs.fits * beliefs.runs, 1e-9)
    row = min(rows, key=lambda one: float(beliefs.step.mean[one]) - math.log(float(chance[one])))
    reason = "believed fastest"
    if beliefs.fits[row] < SURE:
        reason += f", and {float(beliefs.fits[row]):.0%} likely to fit"
    return Chosen(row=row, why=reason, predicted_s=beliefs.step.interval(row))


def _cost_s(candidates: Candidates, beliefs: Beliefs, row: int, runner: Runner) -> float:
    """Return the expected seconds of a trial; a failing one ends before its steps."""
    steps_s = runner.steps() * math.exp(float(beliefs.step.mean[row]))
    return max(0.1, runner.start_s(candidates.plans[row]) + float(beliefs.fits[row]) * steps_s)


def whole_s(candidates: Candidates, beliefs: Beliefs, row: int, runner: Runner) -> float:
    """Return the seconds of a trial that does not fail."""
    return runner.start_s(candidates.plans[row]) + runner.steps() * math.exp(float(beliefs.step.mean[row]))


def _unlocked(beliefs: Beliefs, rows: Sequence[int], gains: Floats, unsure: NDArray[np.bool_]) -> float:
    """Return the largest value among plans that may not fit: if one of them fits, the others become likelier."""
    at = np.asarray(rows)
    return float(np.max(np.where(unsure, gains * (SURE - np.minimum(beliefs.fits[at], SURE)), 0.0)))


def _companions(
    candidates: Candidates,
    beliefs: Beliefs,
    rows: Sequence[int],
    first: Chosen,
    runner: Runner,
    together: int,
    least: float,
    left_s: float,
) -> list[Chosen]:
    """Return plans that share the start of `first` and would still be worth a trial if `first` measured as believed.

    Each has at least the share `least` of the value of the then most valuable plan, and all end within `left_s`.
    """
    step, found, taken = beliefs.step, [first], {first.row}
    left_s -= whole_s(candidates, beliefs, first.row, runner)
    alike = [
        row
        for row in rows
        if beliefs.fits[row] >= SURE and runner.shares_start(candidates.plans[first.row], candidates.plans[row])
    ]
    while len(found) < together:
        last = found[-1].row
        step = step.given([last], [float(step.mean[last])], [NOISE])
        reached = min((one.row for one in found), key=lambda row: float(step.mean[row]))
        best = Best(row=reached, step_s=math.exp(float(step.mean[reached])))
        left = [row for row in alike if row not in taken and whole_s(candidates, beliefs, row, runner) <= left_s]
        if not left:
            break
        gains = gain(step, left, best)
        place = int(np.argmax(gains))
        every = float(np.max(gain(step, [row for row in rows if row not in taken], best)))
        if gains[place] < max(0.1 * NOISE, least * every):
            break
        row = left[place]
        taken.add(row)
        left_s -= whole_s(candidates, beliefs, row, runner)
        found.append(
            Chosen(row=row, why="shares the start of the trial before it", predicted_s=beliefs.step.interval(row))
        )
    return found[1:]


def _why(beliefs: Beliefs, row: int, expected: float, best: Best) -> str:
    quicker = float(ndtr((math.log(best.step_s) - beliefs.step.mean[row]) / beliefs.step.spread[row]))
    words = f"{quicker:.0%} likely to beat the best measured; expected gain {expected:.1%}"
    return words if beliefs.fits[row] >= SURE else f"{words}; {float(beliefs.fits[row]):.0%} likely to fit"
