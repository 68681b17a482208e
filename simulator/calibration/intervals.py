"""The range in which four of five measurements are expected: one table of factors, learned from whole sources.

`intervals.json` is written by tests/bench/learn_intervals.py from measured runs. A source (a paper, a benchmark, a
host) is off as a whole before its rows are off by themselves, and the next question is of a source that nobody has
seen. So with x = log(measured / predicted), source means spread by s_b over k sources and rows within them by s_w, the
range is

    mean(x) -+ t(0.9, k - 1) * sqrt(s_b^2 (1 + 1/k) + s_w^2)

the prediction interval of a random-effects model (Higgins, Thompson, Spiegelhalter, J. R. Statist. Soc. A 172, 2009).
Few rows far off widen it beyond what holds 80 %, so with eight sources or more it is the 10 % and 90 % quantiles of all
rows, each source's counting as one (pooled distributions: Dunn, Wasserman, Ramdas, J. Am. Statist. Assoc. 118, 2023).
How often it holds is asked of each source with the factors learned from the others; the answers stand in the file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources

from topology.cluster import Source
from topology.codec import convert


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """`low` and `high` times the prediction hold 80 %. `left_out` is the share that they hold of each source when
    learned from the others, and `coverage` its mean over sources; None with fewer than three.
    """

    low: float
    high: float
    sources: int
    rows: int
    coverage: float | None
    left_out: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of which GPUs and runtimes the steps are that factors were learned from, and the most GPUs of one."""

    architectures: tuple[str, ...]
    runtimes: tuple[str, ...]
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalTable:
    """Factors by what a prediction rests on; where they are from. `held_out` were judged and not learned from."""

    made_on: str
    command: str
    measured_on: Measured
    factors: dict[str, Factors]
    held_out: dict[str, float]


@cache
def interval_table() -> IntervalTable:
    """Return the factors as the package has them."""
    text = (resources.files("simulator") / "calibration" / "intervals.json").read_text("utf-8")
    return convert(json.loads(text), IntervalTable, where="intervals.json")


def basis_of(*, low: bool, several_nodes: bool) -> str:
    """Return what an uncalibrated step rests on: a key of `IntervalTable.factors`."""
    if low:
        return "low_precision"
    return "nodes" if several_nodes else "node"


def step_factors(
    basis: str,
    shares: dict[str, float],
    *,
    host: float,
    calibrated: bool,
    factors: dict[str, Factors],
    width: float = 1.0,
) -> tuple[float, float]:
    """Return (low, high) over the predicted step.

    What was measured, and curves through it, is as sure as calibrated steps were; all else as steps from datasheets.
    Waiting for the host is as sure as waits were in runs on hosts that nobody had seen. Each is off by itself, so what
    they add to the range adds up as variances do. `shares` are the step's by source, `host` the share of waiting for
    the host. The range from datasheets is `width` times as wide (`simulator.calibration.distance`).
    """
    measured = sum(shares.get(source.value, 0.0) for source in (Source.MEASURED, Source.FITTED)) if calibrated else 0.0
    known, far, waits = factors["calibrated"], factors[basis], factors["host"]
    parts = (
        ((1 - host) * measured, known.low, known.high),
        ((1 - host) * (1 - measured), far.low**width, far.high**width),
        (host, waits.low, waits.high),
    )
    below = math.sqrt(sum((share * (1 - low)) ** 2 for share, low, _ in parts))
    above = math.sqrt(sum((share * (high - 1)) ** 2 for share, _, high in parts))
    return 1 - below, 1 + above


def memory_factors() -> tuple[float, float]:
    """Return (low, high) over memory, allocated or reserved, that was predicted by sums."""
    memory = interval_table().factors["memory"]
    return memory.low, memory.high


def replayed_memory_factors() -> tuple[float, float]:
    """Return the same over memory that the allocator's replay found (`simulator.memory`)."""
    memory = interval_table().factors["replayed memory"]
    return memory.low, memory.high
