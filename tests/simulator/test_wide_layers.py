"""Layers that stay in 16 bits where others multiply in float8: between a plan all in float8 and one in 16 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.memory.replay import MemoryReplay
from topology.catalog.clusters import cluster

LAYERS = 8
FLOAT8 = Runtime(name="torchtitan", compile=True, compute_dtype="float8", low_precision_recipe="rowwise")


def scenario(runtime: Runtime, plan: Plan, model: str) -> Scenario:
    workload = Workload(seq_len=4096, global_batch_size=4 * plan.data_parallel)
    network = replace(load_model(model), layers=LAYERS)
    return Scenario(model=network, cluster=cluster("dgx-h100"), workload=workload, runtime=runtime)


def step_s(runtime: Runtime, plan: Plan, model: str = "llama3-8b") -> float:
    return float(estimate_plans(scenario(runtime, plan, model), [plan]).step_s[0])


@pytest.mark.parametrize(("model", "recompute"), [("llama3-8b", "selective-op"), ("qwen3-30b-a3b", "none")])
def test_a_plan_with_all_layers_in_16_bits_is_the_plan_in_16_bits(model: str, recompute: str) -> None:
    """In time and memory; of half of the layers, half the difference."""
    plan = Plan(dp_shard=8, recompute=recompute)
    runtimes = [
        replace(FLOAT8, wide_layers=(0, LAYERS)),
        replace(FLOAT8, wide_layers=(LAYERS // 4, LAYERS // 4)),
        FLOAT8,
    ]
    plain_s = step_s(FLOAT8.in_16_bits, plan, model)
    wide_s, half_s, low_s = (step_s(runtime, plan, model) for runtime in runtimes)
    plain, wide, half, low = (
        MemoryReplay(scenario(runtime, plan, model), plan).rank(0).allocated_bytes
        for runtime in (FLOAT8.in_16_bits, *runtimes)
    )

    assert wide_s == pytest.approx(plain_s, rel=0.01)
    assert half_s == pytest.approx((wide_s + low_s) / 2, rel=0.02)
    assert wide == pytest.approx(plain, rel=0.005)
    assert half == pytest.approx((wide + low) / 2, rel=0.02)


def test_a_pipeline_waits_for_the_stage_with_layers_in_16_bits() -> None:
    """Two of them on one stage cost more than one each on two stages, and no more than if all were."""
    plan = Plan(dp_shard=2, pp=4, schedule="1F1B", layers_per_stage=(2, 2, 2, 2))
    plain, one_each, both = (step_s(replace(FLOAT8, wide_layers=wide), plan) for wide in ((0, 0), (1, 1), (0, 2)))

    assert plain < one_each < both
    assert both <= step_s(replace(FLOAT8, wide_layers=(0, LAYERS)), plan)
