"""Bounds of a step through a pipeline, over what pipelines are made of: neither is ever above the account."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator.analytical.scenario import Scenario
from simulator.bounds.screening import Screening
from simulator.columns.plan_columns import plan_columns
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.pipeline.schedules.registry import SCHEDULES
from topology.catalog.clusters import cluster

RUNTIMES = {
    "hosts ahead": Runtime(name="torchtitan", compile=True),
    "hosts behind": Runtime(name="torchtitan"),
    "whole gradients": Runtime(name="megatron-lm", param_dtype="bfloat16"),
}
PP, GPUS = 4, 32


def plans_of(schedule, *, stages, sharded):
    """Return pipelines with replicas, shards, or both; kept or gathered anew; alone on a node and across two."""
    for tp, recompute in ((1, "none"), (4, "full")):
        data = GPUS // PP // tp
        common = {
            "tp": tp,
            "sequence_parallel": tp > 1,
            "pp": PP,
            "virtual_stages": stages,
            "schedule": schedule,
            "recompute": recompute,
        }
        if not sharded:
            yield Plan(**common, dp_replicate=data, zero_stage=1)
            continue
        for reshard in (True, False):
            yield Plan(**common, dp_shard=data, reshard_after_forward=reshard)
        yield Plan(**common, dp_replicate=2, dp_shard=data // 2, reshard_after_forward=True)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_bound_of_a_pipeline_is_above_its_account(schedule, runtime):
    kind, asked = SCHEDULES[schedule], RUNTIMES[runtime]
    if kind.splits_backward and asked.compile:
        pytest.skip("blocks that are compiled cannot split their backward")
    stages = max(kind.least_stages, 2 if kind.most_stages != 1 else 1)
    # Layers that do not divide: stages are uneven.
    model = replace(load_model("llama3-8b"), layers=PP * stages * 3 + 2)
    plans = [*plans_of(schedule, stages=stages, sharded=asked.name == "torchtitan")]
    batch = 2 * stages * PP * GPUS // PP  # of every plan at least as many micro batches as stages
    scenario = Scenario(
        model=model,
        cluster=cluster("dgx-h100", GPUS),
        workload=Workload(seq_len=2048, global_batch_size=batch),
        runtime=asked,
    )
    columns, screening = plan_columns(plans), Screening(scenario)
    some = screening.plans(columns, screening.blocks(columns, ("none", "full")), np.arange(len(plans)))
    step_s = some.step_s()

    assert np.isfinite(step_s).all()
    assert (some.at_least_s() <= step_s).all()
    # Some of these plans are walked, the others bounded by the paths of those.
    assert (some.at_least_by_schedule_s() <= step_s).all()
