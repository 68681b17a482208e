"""Summary of what clients saw: time to the first token, time between tokens, throughput."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.serving.server import Served


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Seconds over all requests."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Figures of one run. `tpot` is the mean time between the tokens of an answer after its first."""

    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    output_tokens_per_s: float
    requests_per_s: float
    goodput: float  # share of requests within both targets; 1 without targets
    preempted: int
    busy: float
    keeps_up: bool = True  # whether requests of an open loop are answered as fast as they come


def distribution(values: np.ndarray) -> Distribution:
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    return Distribution(mean=float(values.mean()), p50=p50, p95=p95, p99=p99)


def latency(served: Served, *, ttft_s: float = 0.0, tpot_s: float = 0.0) -> Latency:
    """Return the figures of a run; a target of 0 is no target."""
    answers = served.answers
    first = np.array([answer.first_s - answer.arrival_s for answer in answers])
    whole = np.array([answer.done_s - answer.arrival_s for answer in answers])
    tokens = np.array([answer.tokens for answer in answers])
    between = (whole - first) / np.maximum(tokens - 1, 1)
    good = np.ones(len(answers), bool)
    if ttft_s:
        good &= first <= ttft_s
    if tpot_s:
        good &= between <= tpot_s
    return Latency(
        ttft_s=distribution(first),
        tpot_s=distribution(between),
        e2e_s=distribution(whole),
        output_tokens_per_s=float(tokens.sum() / served.seconds),
        requests_per_s=len(answers) / served.seconds,
        goodput=float(good.mean()),
        preempted=served.preempted,
        busy=served.busy,
    )
