"""Bounds of a step through a pipeline, over what pipelines are made of: neither is ever above the account."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def plans_of(common, *, gpus, sharded):
    """Return pipelines with replicas, shards or both, on one node and on two: kept, gathered anew, or updated on the
    host.
    """
    for tp, recompute in ((1, "none"), (4, "full")):
        data = gpus // common["pp"] // tp
        axes = {**common, "tp": tp, "sequence_parallel": tp > 1, "recompute": recompute}
        if not sharded:
            yield Plan(**axes, dp_replicate=data, zero_stage=1)
            continue
        for reshard in (True, False):
            yield Plan(**axes, dp_shard=data, reshard_after_forward=reshard)
        yield Plan(**axes, dp_shard=data, offload="optimizer")
        if data > 1:
            yield Plan(**axes, dp_replicate=2, dp_shard=data // 2, reshard_after_forward=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=3, deadline=None)
@given(st.data())
def test_no_bound_of_a_pipeline_is_above_its_account(schedule, data):
    kind = SCHEDULES[schedule]
    ways = [name for name, asked in RUNTIMES.items() if not (kind.splits_backward and asked.compile)]
    asked = RUNTIMES[data.draw(st.sampled_from(ways))]
    pp, gpus = data.draw(st.sampled_from(((4, 32), (2, 16), (8, 32), (4, 128))))
    stages = data.draw(st.integers(kind.least_stages, kind.most_stages or 3))
    each, more = data.draw(st.sampled_from((1, 2, 3, 9))), data.draw(st.integers(0, pp - 1))  # stages may be uneven
    model = replace(
        load_model(data.draw(st.sampled_from(("llama3-8b", "llama3-70b")))), layers=pp * stages * each + more
    )
    common = {"pp": pp, "virtual_stages": stages, "schedule": schedule}
    plans = [*plans_of(common, gpus=gpus, sharded=asked.name == "torchtitan")]
    # Of every plan at least as many micro batches as ranks, and as stages where the schedule needs them.
    rounds = data.draw(st.sampled_from((1, 2, 4))) * (
        stages if kind.every_stage else data.draw(st.sampled_from((1, stages)))
    )
    batch = rounds * pp * gpus // pp
    scenario = Scenario(
        model=model,
        cluster=cluster("dgx-h100", gpus),
        workload=Workload(seq_len=data.draw(st.sampled_from((2048, 8192))), global_batch_size=batch),
        runtime=asked,
    )
    columns, screening = plan_columns(plans), Screening(scenario)
    some = screening.plans(columns, screening.blocks(columns, ("none", "full")), np.arange(len(plans)))
    step_s = some.step_s()

    assert np.isfinite(step_s).all()
    assert (some.at_least_s() <= step_s).all()
    # Some of these plans are walked, the others bounded by the paths of those.
    assert (some.at_least_by_schedule_s() <= step_s).all()


def test_a_host_that_is_slower_by_little_holds_up_a_long_step():
    """One rank ends last in few rounds; in many, the host of another does, which has an embedding more."""
    plan = Plan(
        pp=4,
        tp=8,
        dp_shard=1,
        virtual_stages=3,
        schedule="InterleavedZeroBubble",
        recompute="full",
        reshard_after_forward=False,
        sequence_parallel=True,
    )
    scenario = Scenario(
        model=replace(load_model("llama3-70b"), layers=27),
        cluster=cluster("dgx-h100", 32),
        workload=Workload(seq_len=2048, global_batch_size=192),
        runtime=RUNTIMES["hosts behind"],
    )
    screening, columns = Screening(scenario), plan_columns([plan])
    some = screening.plans(columns, screening.blocks(columns, ("full",)), np.arange(1))

    assert some.at_least_s()[0] <= some.step_s()[0]
