"""The intervals of uncalibrated predictions hold about what they promise on the measured cases shipped for tests."""

from __future__ import annotations

import json

import pytest

from planner.cases import load_case
from simulator.closed_form import MEMORY_SPREAD, STEP_SPREAD, estimate_plans
from tests.planner.conftest import CASES


@pytest.fixture(scope="module")
def answers():
    """Return (measured, estimate) of every case."""
    found = []
    for file in sorted(CASES.glob("*.json")):
        for raw in json.loads(file.read_text()):
            case = load_case(raw)
            table = estimate_plans(case.model, case.cluster, case.workload, [case.plan], case.runtime)
            found.append((raw["measured"], table.estimate(0), table.basis[0]))
    return found


def test_four_in_five_measured_steps_lie_inside(answers) -> None:
    """80% intervals: between 70% and 97% of the cases, and no basis below 60%."""
    inside = {basis: [] for basis in STEP_SPREAD}
    for measured, estimate, basis in answers:
        if "step_s" in measured:
            inside[basis].append(estimate.step_s.low <= measured["step_s"] <= estimate.step_s.high)
    together = [one for group in inside.values() for one in group]

    assert len(together) >= 20
    assert 0.70 <= sum(together) / len(together) <= 0.97
    for group in inside.values():
        assert len(group) < 5 or sum(group) / len(group) >= 0.6


def test_intervals_hold_their_value_and_widen_with_what_is_unsure() -> None:
    for spreads in (STEP_SPREAD, MEMORY_SPREAD):
        assert all(low < 1 < high for low, high in spreads.values())
        width = {basis: high / low for basis, (low, high) in spreads.items()}
        assert width["node"] <= width["nodes"] <= width["unsettled"]


def test_a_step_that_waits_for_its_host_is_less_sure() -> None:
    """Hosts differ more than GPUs: the same plan with short sequences is launch-bound, and its interval wider upward."""

    def high_over_value(seq_len: int) -> tuple[float, float]:
        case = load_case(
            {
                "id": "host",
                "model": "llama3-8b",
                "cluster": "h200x4",
                "workload": {"seq_len": seq_len, "global_batch_size": 1},
                "plan": {"tp": 4, "micro_batch_size": 1, "recompute": "none"},
                "runtime": {"name": "torchtitan"},
            }
        )
        estimate = estimate_plans(case.model, case.cluster, case.workload, [case.plan], case.runtime).estimate(0)
        step = estimate.step_s
        return step.high / step.value, estimate.breakdown_s["host"] / step.value

    (wide, waiting), (narrow, busy) = high_over_value(256), high_over_value(16384)

    assert waiting > 0.5
    assert busy < 0.05
    assert wide > narrow + 0.5
