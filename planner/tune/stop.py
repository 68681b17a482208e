"""When to stop: when no untried plan is likely to beat the best measured by enough, or when the budget ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from planner.tune.beliefs import Beliefs
from planner.tune.candidates import Candidates
from planner.tune.choice import best_of, untried
from planner.tune.trials import Trial

LIKELY = 0.05  # probability that a better plan remains, above which a tuning continues
SAMPLES = 4000
NEGLIGIBLE = 1e-5  # probability of a single plan below which it is not sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The possible improvement: the probability that an untried plan beats the best measured by more than `within`, and
    the expected gain of the best of them (relative, 0 if none does).

    `candidate` is the likeliest of them, None where there is none. Without a measured plan the probability is 1.
    """

    probability: float
    expected: float
    candidate: int | None


def outlook(candidates: Candidates, beliefs: Beliefs, trials: Sequence[Trial], within: float) -> Outlook:
    """Return the possible improvement over the best measured plan, by sampling the joint belief about the untried
    plans.
    """
    rows, best = untried(candidates, beliefs, trials), best_of(candidates, trials)
    if best is None:
        return Outlook(probability=1.0 if rows else 0.0, expected=0.0, candidate=rows[0] if rows else None)
    chance = beliefs.fits * beliefs.runs
    wanted = math.log(best.step_s) + math.log1p(-within)
    alone = chance * ndtr((wanted - beliefs.step.mean) / beliefs.step.spread)
    rows = [row for row in rows if alone[row] > NEGLIGIBLE]
    if not rows:
        return Outlook(probability=0.0, expected=0.0, candidate=None)
    draw = np.random.default_rng(0)
    at = np.asarray(rows)
    covariance = beliefs.step.covariance[np.ix_(at, at)]
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    logs = beliefs.step.mean[at] + draw.standard_normal((SAMPLES, len(at))) @ root.T
    logs = np.where(draw.random((SAMPLES, len(at))) < chance[at], logs, np.inf)
    least = logs.min(axis=1)
    better = least < wanted
    return Outlook(
        probability=float(better.mean()),
        expected=float(np.where(better, 1 - np.exp(least - math.log(best.step_s)), 0.0).mean()),
        candidate=int(at[int(np.argmax(alone[at]))]),
    )
