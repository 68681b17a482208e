"""The waterfall adds up, and says the same as the estimate it was read from."""

from __future__ import annotations

import pytest

from planner.explain.waterfall import difference, memory_rows, waterfall
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.lowering.simulation import simulate_plan
from tests.planner.conftest import LLAMA8B, make_cluster

PLANS = (
    Plan(dp_shard=16),
    Plan(dp_shard=4, tp=4, sequence_parallel=True),
    Plan(dp_shard=2, pp=4, cp=2, micro_batch_size=2, recompute="full", virtual_stages=2, schedule="Interleaved1F1B"),
)


@pytest.fixture(scope="module")
def estimates():
    workload = Workload(seq_len=4096, global_batch_size=64)
    table = estimate_plans(
        Scenario(model=LLAMA8B, cluster=make_cluster(2, 8), workload=workload, runtime=Runtime()), PLANS
    )
    simulated = simulate_plan(
        Scenario(model=LLAMA8B, cluster=make_cluster(2, 8), workload=workload, runtime=Runtime()), PLANS[1]
    ).estimate
    return [*(table.estimate(i) for i in range(len(PLANS))), simulated]


def test_the_fall_from_peak_to_step_adds_up(estimates):
    for estimate in estimates:
        fall = waterfall(estimate)

        assert fall.peak_s + sum(term.seconds for term in fall.terms) == pytest.approx(estimate.step_s.value)
        assert fall.peak_s / fall.step_s == pytest.approx(estimate.mfu)
        assert sum(term.share for term in fall.terms) == pytest.approx(1 - estimate.mfu)
        assert fall.top_loss.seconds == max(term.seconds for term in fall.terms)


def test_communication_is_split_by_axis(estimates):
    names = {term.name for term in waterfall(estimates[2]).terms}

    assert {"exposed CP communication", "exposed PP communication", "recompute", "bubble"} <= names


def test_two_plans_differ_by_their_terms(estimates):
    first, second = estimates[:2]
    rows = difference(first, second)
    seconds = [row.delta for row in rows if row.unit == "s"]

    assert sum(seconds) == pytest.approx(second.step_s.value - first.step_s.value)
    assert [abs(x) for x in seconds] == sorted((abs(x) for x in seconds), reverse=True)
    assert all(row.delta == 0 for row in difference(first, first))


def test_memory_is_listed_for_every_stage(estimates):
    rows = memory_rows(estimates[2])

    assert {row.stage for row in rows} == {0, 1, 2, 3}
    for stage in range(4):
        here = {row.category: row.nbytes for row in rows if row.stage == stage}
        assert here == estimates[2].memory.by_stage[stage]
