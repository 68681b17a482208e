"""The range in which four of five measurements are expected: one table of factors, learned from whole sources.

`intervals.json` is written by tests/bench/learn_intervals.py from measured runs. The rows of a source (a paper, a
benchmark, a host) share an error, besides the error of each row, and a new question comes from a source that is not in
the table. So with x = log(measured / predicted), source means spread by s_b over k sources and rows within them by s_w,
the range is

    mean(x) -+ t(0.9, k - 1) * sqrt(s_b^2 (1 + 1/k) + s_w^2)

the prediction interval of a random-effects model (Higgins, Thompson, Spiegelhalter, J. R. Statist. Soc. A 172, 2009).
A few outliers make it too wide, so with eight sources or more the range is the 10 % and 90 % quantiles of all rows,
every source having the same weight (pooled distributions: Dunn, Wasserman, Ramdas, J. Am. Statist. Assoc. 118, 2023).
The file also has the coverage of each source with the factors learned from the others.

The factors of hosts are of their speed: of the time in which a host issues what it issues. Of a run only a range of it
is known, between the factors with which it is predicted to wait as long as it did; `low` is the quantile of the upper
ends, `high` of the lower.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources

from simulator.columns.plan_table import Floats
from topology.cluster import Source
from topology.codec import convert


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """A prediction times `low` and times `high` are the ends of its 80 % range. `left_out` is the share of each
    source's rows inside the range when factors are learned from the other sources, `coverage` its mean over sources;
    None with fewer than three.
    """

    low: float
    high: float
    sources: int
    rows: int
    coverage: float | None
    left_out: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The GPUs and runtimes of the steps that factors were learned from, and the most GPUs in one of them."""

    architectures: tuple[str, ...]
    runtimes: tuple[str, ...]
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalTable:
    """Factors by basis of a prediction, and their origin. `held_out` sources were only used to judge them."""

    made_on: str
    command: str
    measured_on: Measured
    factors: dict[str, Factors]
    held_out: dict[str, float]


@cache
def interval_table() -> IntervalTable:
    """Return the factors shipped with the package."""
    text = (resources.files("simulator") / "calibration" / "intervals.json").read_text("utf-8")
    return convert(json.loads(text), IntervalTable, where="intervals.json")


def basis_of(*, low: bool, several_nodes: bool) -> str:
    """Return the basis of an uncalibrated step: a key of `IntervalTable.factors`."""
    if low:
        return "low_precision"
    return "nodes" if several_nodes else "node"


def step_factors(
    basis: str,
    shares: dict[str, float],
    *,
    host: float,
    by_host: Callable[[tuple[float, float]], Floats],
    calibrated: bool,
    factors: dict[str, Factors],
    width: float = 1.0,
    host_measured: bool = False,
) -> tuple[float, float]:
    """Return the ends (low, high) of a step's 80 % range as factors of the prediction.

    Measured parts and curves through measurements have the range of calibrated steps, other parts that of steps from
    datasheets. The host has that of hosts whose kinds of layers were measured (`host_measured`) or were not: a range of
    its speed, so a step may wait for a slow one that is not predicted to. `by_host` gives the steps whose hosts take
    factors of their time, as factors of the step. Errors are independent, so their widths add as variances do. `shares`
    are the step's shares by source, `host` is the share of waiting for the host. The range from datasheets is `width`
    times as wide (`simulator.calibration.distance`).
    """
    measured = sum(shares.get(source.value, 0.0) for source in (Source.MEASURED, Source.FITTED)) if calibrated else 0.0
    known, far, hosts = factors["calibrated"], factors[basis], factors["measured host" if host_measured else "host"]
    parts = (
        ((1 - host) * measured, known.low, known.high),
        ((1 - host) * (1 - measured), far.low**width, far.high**width),
    )
    fast, slow = by_host((hosts.low, hosts.high))
    below = math.hypot(*(share * (1 - low) for share, low, _ in parts), 1 - fast)
    above = math.hypot(*(share * (high - 1) for share, _, high in parts), slow - 1)
    return 1 - below, 1 + above


def memory_factors() -> tuple[float, float]:
    """Return the ends (low, high) of the 80 % range of memory, allocated or reserved, predicted by sums; factors."""
    memory = interval_table().factors["memory"]
    return memory.low, memory.high


def replayed_memory_factors() -> tuple[float, float]:
    """Return the ends (low, high) of the 80 % range of memory predicted by the allocator's replay (`simulator.memory`);
    factors.
    """
    memory = interval_table().factors["replayed memory"]
    return memory.low, memory.high
