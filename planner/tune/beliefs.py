"""Beliefs about the step time and memory of every plan, given the trials: Gaussian, with an exact posterior.

The logarithm of a plan's step is its prediction, plus errors of terms that plans share (compute, host, communication by
mesh axis, ...), each weighted by its part of that plan's step, plus an error that similar plans share, plus the plan's
own. So one measured plan corrects all plans that spend their time on the same terms. The prior standard deviation of a
plan is that of its predicted range; the terms only determine the correlation between the errors of two plans. The width
of the ranges is learned as well: beliefs are averaged over two scales, of shared errors and of all others, weighted by
the probability of the measurements (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section
5.2).

Beliefs about memory are similar. A trial that ran out of memory shows only that its plan needs more than available: the
posterior is matched to the truncated Gaussian's mean and variance (Minka, Expectation propagation, 2001).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from planner.tune.candidates import Candidate, Candidates
from planner.tune.trials import Status, Trial
from simulator.calibration.gaussian import gain, observed
from simulator.config.estimate import NORMAL_80, Estimate
from simulator.config.plan import PLAN_FIELDS, SIZES
from simulator.config.plan_schema import Kind

Floats = NDArray[np.float64]

# Standard deviations of logarithms, relative to each other: kernels, collectives and hosts differ between machines as
# in `planner.learn.fit`; even a correct description is off by 5 % in a single run.
COMPUTE, COLLECTIVES, HOST, BUBBLE = 0.25, 0.5, 1.0, 0.3
# Source: assumed. Errors of the whole step: clocks and what no term includes; shared by similar plans; a plan's own.
WHOLE = 0.1
ALIKE, OWN = 0.1, 0.05
UNKNOWN_MACHINE = 25.0  # variance of a factor common to all steps that may have any value: a processor instead of a GPU
SCALES = (0.35, 0.6, 1.0, 1.7, 3.0)
NEGLIGIBLE = 0.005  # probability of a pair of scales below which it is left out
SCALE_SPREAD = math.log(2)  # prior of the logarithm of both scales
NOISE = 0.01  # of the logarithm of a measured step: variation between starts of processes (examples/validation)
ALIKE_OCTAVES = 2.0  # doublings of degrees over which the similarity of plans decreases by a factor of e
# Settings in which two plans may differ besides sizes: words, and settings that may be left to the runtime.
CHOICES = tuple(
    name for name, known in PLAN_FIELDS.items() if not known.kind.listed and (known.optional or known.kind is Kind.WORD)
)
TERM_SPREADS = {
    "compute": COMPUTE,
    "recompute": COMPUTE,
    "contention": COMPUTE,
    "copies": COMPUTE,
    "optimizer": COMPUTE,
    "bubble": BUBBLE,
    "host": HOST,
    "allocator": HOST,
    "exposed_communication": COLLECTIVES,
}
SAME_TERM = {"recompute": "compute"}  # the forward pass repeated: its error is that of the first one


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """A joint Gaussian over the logarithms of one quantity of all candidates: `mean` (n), `covariance` (n, n)."""

    mean: Floats
    covariance: Floats

    @property
    def spread(self) -> Floats:
        """Standard deviations."""
        return np.sqrt(np.maximum(np.diag(self.covariance), 1e-18))

    def interval(self, row: int) -> tuple[float, float, float]:
        """Return (middle, low, high) of a candidate, in its unit; the range from low to high has a probability
        of 80 %.
        """
        mean, wide = float(self.mean[row]), NORMAL_80 * float(self.spread[row])
        return math.exp(mean), math.exp(mean - wide), math.exp(mean + wide)

    def given(self, rows: Sequence[int], logs: Sequence[float], noise: Sequence[float]) -> Belief:
        """Return the posterior after `logs` were measured for the candidates `rows`, each with a spread of `noise`."""
        if not rows:
            return self
        at = np.asarray(rows)
        across = self.covariance[:, at]
        gained = gain(across, across[at], noise)
        return Belief(
            mean=self.mean + gained @ (np.asarray(logs) - self.mean[at]), covariance=self.covariance - gained @ across.T
        )

    def beyond(self, row: int, log_limit: float, *, above: bool) -> Belief:
        """Return the posterior after a candidate was found to be above (or not above) a limit."""
        mean, variance = float(self.mean[row]), float(self.covariance[row, row])
        sign, spread = (1.0 if above else -1.0), math.sqrt(max(variance, 1e-18))
        z = sign * (mean - log_limit) / spread
        ratio = math.exp(-(z**2) / 2 - math.log(2 * math.pi) / 2 - log_ndtr(z))  # for its truncated moments
        moved, shrunk = sign * spread * ratio, variance * (1 - ratio * (ratio + z))
        along = self.covariance[:, row] / max(variance, 1e-18)
        return Belief(
            mean=self.mean + along * moved, covariance=self.covariance + np.outer(along, along) * (shrunk - variance)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The factor on a term's seconds, as learned from the trials; the range from low to high has a probability
    of 80 %.
    """

    term: str
    factor: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Beliefs:
    """Beliefs after the trials: steps (logarithms of seconds), memory (of bytes), and whether plans run at all."""

    step: Belief
    fits: Floats  # probability that a plan has enough memory
    runs: Floats  # probability that no other cause fails it
    scales: tuple[float, float] = (1.0, 1.0)  # of shared errors, and of those of similar plans and single ones
    corrections: tuple[Correction, ...] = ()


def believe(candidates: Candidates, trials: Iterable[Trial], *, unknown_machine: bool = False) -> Beliefs:
    """Return the beliefs after `trials`. With `unknown_machine` all steps may be off by a common factor of any size."""
    made = [(row, trial) for trial in trials if (row := candidates.row(trial.key)) is not None]
    timed = [(row, trial) for row, trial in made if trial.step_s is not None]
    rows = [row for row, _ in timed]
    logs = np.log([float(trial.step_s or 1.0) for _, trial in timed])
    noise = [max(NOISE, trial.noise) for _, trial in timed]
    errors = _Errors(candidates, unknown_machine=unknown_machine)
    worlds = errors.worlds(rows, logs, noise)
    step = _mixed([(chance, errors.prior(two).given(rows, logs.tolist(), noise)) for two, chance in worlds])
    means = [math.exp(sum(chance * math.log(two[part]) for two, chance in worlds)) for part in (0, 1)]
    scales = (means[0], means[1])
    capacity = np.log([one.estimate.memory.capacity_bytes for one in candidates.plans])
    memory = _memory(candidates, made, capacity)
    fits = ndtr((capacity - memory.mean) / memory.spread)
    for row, trial in made:
        if trial.status is Status.OUT_OF_MEMORY:
            fits[row] = 0.0
        elif trial.step_s is not None:
            fits[row] = 1.0
    return Beliefs(
        step=step,
        fits=fits,
        runs=_runs(candidates, made),
        scales=scales,
        corrections=errors.corrections(scales, rows, logs, noise),
    )


class _Errors:
    """The uncertainty of predicted steps, and the correlations between their errors."""

    def __init__(self, candidates: Candidates, *, unknown_machine: bool) -> None:
        estimates = [one.estimate for one in candidates.plans]
        self.predicted = np.log([one.step_s.value for one in estimates])
        self.names, weights, spreads = _terms(estimates)
        shared = (weights * spreads) @ (weights * spreads).T + WHOLE**2
        own = ALIKE**2 * likeness(candidates.plans) + OWN**2 * np.eye(len(candidates))
        # Scaled so that the prior is as wide as the predicted range.
        size = np.array([_spread(one) for one in estimates]) / np.sqrt(np.diag(shared + own))
        self.shared, self.own = (part * np.outer(size, size) for part in (shared, own))
        self.weights, self.spreads = weights * size[:, None], spreads
        self.size = float(np.median(size))
        self.offset = UNKNOWN_MACHINE if unknown_machine else 0.0

    def prior(self, scales: tuple[float, float]) -> Belief:
        """Return the beliefs before any trial."""
        covariance = scales[0] ** 2 * self.shared + scales[1] ** 2 * self.own + self.offset
        return Belief(mean=self.predicted, covariance=covariance)

    def worlds(
        self, rows: Sequence[int], logs: Floats, noise: Sequence[float]
    ) -> list[tuple[tuple[float, float], float]]:
        """Return the scales with a significant probability after the trials, and the probability of each pair."""
        if not rows:
            return [((1.0, 1.0), 1.0)]
        pairs = list(product(SCALES, SCALES))
        known = np.array([_evidence(self.prior(two), rows, logs, noise, two) for two in pairs])
        chances = np.exp(known - known.max())
        chances /= chances.sum()
        kept = [(two, float(chance)) for two, chance in zip(pairs, chances, strict=True) if chance > NEGLIGIBLE]
        whole = sum(chance for _, chance in kept)
        return [(two, chance / whole) for two, chance in kept]

    def corrections(
        self, scales: tuple[float, float], rows: Sequence[int], logs: Floats, noise: Sequence[float]
    ) -> tuple[Correction, ...]:
        """Return the factors that the trials show for each term on which any plan spends time."""
        prior = self.prior(scales)
        variances = np.square(scales[0] * self.spreads)
        if rows:
            at = np.asarray(rows)
            across = (self.weights[at] * variances).T
            gained = gain(across, prior.covariance[np.ix_(at, at)], noise)
            means = gained @ (logs - prior.mean[at])
            variances = variances - np.einsum("to,to->t", gained, across)
        else:
            means = np.zeros(len(self.names))
        found = []
        for name, mean, variance in zip(self.names, means, variances, strict=True):
            middle, wide = self.size * float(mean), self.size * NORMAL_80 * math.sqrt(max(0.0, float(variance)))
            low, high = math.exp(middle - wide), math.exp(middle + wide)
            found.append(Correction(term=name, factor=math.exp(middle), low=low, high=high))
        return tuple(found)


def _mixed(parts: Sequence[tuple[float, Belief]]) -> Belief:
    """Return the Gaussian with the mean and the covariance of a mixture of (probability, Gaussian)."""
    mean = np.sum([chance * one.mean for chance, one in parts], axis=0)
    covariance = np.sum(
        [chance * (one.covariance + np.outer(one.mean - mean, one.mean - mean)) for chance, one in parts], axis=0
    )
    return Belief(mean=mean, covariance=covariance)


def _evidence(
    prior: Belief, rows: Sequence[int], logs: Floats, noise: Sequence[float], scales: tuple[float, float]
) -> float:
    """Return the logarithm of the probability of the measurements and of the scales' prior, up to a constant."""
    at = np.asarray(rows, dtype=np.intp)
    inner = observed(prior.covariance[np.ix_(at, at)], noise)
    away = logs - prior.mean[at]
    _, size = np.linalg.slogdet(inner)
    before = sum((math.log(scale) / SCALE_SPREAD) ** 2 for scale in scales)
    return float(-0.5 * (away @ np.linalg.solve(inner, away) + size + before))


def _memory(candidates: Candidates, made: Sequence[tuple[int, Trial]], capacity: Floats) -> Belief:
    """Return the posterior of the memory that the fullest rank reserves."""
    needed = np.log([max(1.0, one.estimate.memory.reserved_bytes) for one in candidates.plans])
    weights = _shares([one.estimate.memory.by_category for one in candidates.plans])
    form = weights @ weights.T + 0.25 + 0.1 * likeness(candidates.plans) + 0.1 * np.eye(len(candidates))
    size = np.array([_memory_spread(one.estimate) for one in candidates.plans]) / np.sqrt(np.diag(form))
    belief = Belief(mean=needed, covariance=form * np.outer(size, size))
    exact = [(row, trial.reserved_bytes) for row, trial in made if trial.reserved_bytes]
    belief = belief.given([row for row, _ in exact], [math.log(size) for _, size in exact], [NOISE] * len(exact))
    known = {row for row, _ in exact}
    for row, trial in made:
        full = trial.status is Status.OUT_OF_MEMORY
        if full or (trial.step_s is not None and row not in known):
            belief = belief.beyond(row, float(capacity[row]), above=full)
    return belief


def _runs(candidates: Candidates, made: Sequence[tuple[int, Trial]]) -> Floats:
    """Return the probability that nothing but memory fails a plan; a failure casts doubt on similar plans."""
    like = likeness(candidates.plans)
    good, bad = np.full(len(candidates), 1.0), np.full(len(candidates), 0.03)
    for row, trial in made:
        if trial.step_s is not None:
            good += like[row]
        elif trial.status.blames_plan and trial.status is not Status.OUT_OF_MEMORY:
            bad += 2 * like[row]
    return np.asarray(good / (good + bad), dtype=np.float64)


def likeness(plans: Sequence[Candidate]) -> Floats:
    """Return the similarity of plans, (n, n), from 0 to 1: lower with every doubling of a degree and every other
    difference.
    """
    degrees = np.log2([[getattr(one.plan, name) for name in SIZES] for one in plans])
    far = np.abs(degrees[:, None, :] - degrees[None, :, :]).sum(axis=2) / ALIKE_OCTAVES
    for name in CHOICES:
        words = np.array([str(getattr(one.plan, name)) for one in plans])
        far = far + 0.5 * (words[:, None] != words[None, :])
    compiled = np.array([one.runtime.compile for one in plans])
    return np.asarray(np.exp(-far - (compiled[:, None] != compiled[None, :])), dtype=np.float64)


def _terms(estimates: Sequence[Estimate]) -> tuple[list[str], Floats, Floats]:
    """Return the names of a step's terms, their shares of each step (n, terms), and the spread of their errors."""
    named = []
    for one in estimates:
        parts: dict[str, float] = {}
        by_axis = one.exposed_by_axis_s
        left = one.breakdown_s.get("exposed_communication", 0.0) - sum(by_axis.values())
        whole = {name: seconds for name, seconds in one.breakdown_s.items() if name != "exposed_communication"}
        whole |= {f"exposed_communication {axis}": seconds for axis, seconds in by_axis.items()}
        whole["exposed_communication"] = max(0.0, left)
        for name, seconds in whole.items():
            term = SAME_TERM.get(name, name)
            parts[term] = parts.get(term, 0.0) + max(0.0, seconds)
        named.append(parts)
    names = sorted({name for parts in named for name, seconds in parts.items() if seconds > 0})
    spreads = np.array([TERM_SPREADS.get(name.split()[0], COMPUTE) for name in names])
    return names, _shares(named, names), spreads


def _shares(parts: Sequence[dict[str, float]], names: Sequence[str] | None = None) -> Floats:
    """Return parts as fractions of their sums, (n, names)."""
    names = names or sorted({name for one in parts for name in one})
    table = np.array([[one.get(name, 0.0) for name in names] for one in parts])
    return np.asarray(table / np.maximum(table.sum(axis=1, keepdims=True), 1e-30), dtype=np.float64)


def _spread(estimate: Estimate) -> float:
    step = estimate.step_s
    return max(0.01, math.log(step.high / step.low) / (2 * NORMAL_80)) if step.low > 0 else 0.5


def _memory_spread(estimate: Estimate) -> float:
    """Return the spread on that side of the prediction on which the available memory lies, as in `fit_probability`."""
    memory = estimate.memory
    high, low = memory.reserved_high_bytes, memory.reserved_low_bytes
    if memory.reserved_bytes <= 0 or low <= 0:
        return 0.2
    ends = high / memory.reserved_bytes if memory.fits else memory.reserved_bytes / low
    return max(0.02, math.log(ends) / NORMAL_80)
