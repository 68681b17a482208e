"""Ranges of predictions: how the shipped factors follow from sources, and that they hold on the measured cases shipped
for tests.
"""

from __future__ import annotations

import json
import math

import pytest

from planner.question.cases import load_case
from simulator.calibration.intervals import Factors, interval_table, step_factors
from tests.planner.conftest import CASES


@pytest.fixture(scope="module")
def answers():
    """Return (measured, estimate) of every case."""
    cases = [raw for file in sorted(CASES.glob("*.json")) for raw in json.loads(file.read_text())]
    return [(raw["measured"], estimate_of(raw)) for raw in cases]


def estimate_of(raw):
    case = load_case(raw)
    return case.question.estimate([case.plan]).estimate(0)


def test_four_in_five_measured_steps_lie_inside(answers) -> None:
    """80% intervals, wide enough for sources that were not seen: between 70% and 97% of the cases."""
    inside = [
        estimate.step_s.low <= measured["step_s"] <= estimate.step_s.high
        for measured, estimate in answers
        if "step_s" in measured
    ]

    assert len(inside) >= 20
    assert 0.70 <= sum(inside) / len(inside) <= 0.97


def test_every_factor_was_judged_on_sources_left_out() -> None:
    """At least two thirds of a source's rows in the mean, learned from the others; few sources make wide ranges."""
    for basis, one in interval_table().factors.items():
        assert one.low < 1 < one.high, basis
        assert one.sources >= 3, basis
        assert one.coverage is not None, basis
        assert one.coverage >= 0.67, basis
    width = {basis: one.high / one.low for basis, one in interval_table().factors.items()}
    assert width["calibrated"] < width["node"] < width["nodes"] < width["low_precision"]


def factors(low: float, high: float) -> Factors:
    return Factors(low=low, high=high, sources=3, rows=9, coverage=None, left_out={})


def test_a_step_is_as_sure_as_its_parts() -> None:
    """Parts that are off by themselves add up as variances do; without a calibration nothing was measured."""
    known = {"calibrated": factors(0.9, 1.1), "node": factors(0.7, 1.5), "host": factors(0.5, 4.0)}
    shares = {"measured": 0.3, "fitted": 0.2, "datasheet": 0.4, "assumed": 0.1}

    assert step_factors("node", shares, host=0.0, calibrated=True, factors=known) == pytest.approx(
        (1 - math.hypot(0.05, 0.15), 1 + math.hypot(0.05, 0.25))
    )
    assert step_factors("node", shares, host=0.0, calibrated=False, factors=known) == pytest.approx((0.7, 1.5))
    assert step_factors("node", shares, host=0.5, calibrated=False, factors=known) == pytest.approx(
        (1 - math.hypot(0.15, 0.25), 1 + math.hypot(0.25, 1.5))
    )


def test_a_step_that_waits_for_its_host_is_less_sure() -> None:
    """Hosts differ more than GPUs: the same plan with short sequences is launch-bound, and its interval wider
    upward.
    """

    def high_over_value(seq_len: int) -> tuple[float, float]:
        estimate = estimate_of(
            {
                "id": "host",
                "model": "llama3-8b",
                "cluster": "h200x4",
                "workload": {"seq_len": seq_len, "global_batch_size": 1},
                "plan": {"tp": 4, "micro_batch_size": 1, "recompute": "none"},
                "runtime": {"name": "torchtitan"},
            }
        )
        step = estimate.step_s
        return step.high / step.value, estimate.breakdown_s["host"] / step.value

    (wide, waiting), (narrow, busy) = high_over_value(256), high_over_value(16384)

    assert waiting > 0.5
    assert busy < 0.2
    assert wide > narrow + 0.5 * (waiting - busy)
