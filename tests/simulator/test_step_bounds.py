"""Bounds of a step through a pipeline, over what pipelines are made of: neither is ever above the account."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.analytical import account
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
    "some in 16 bits": Runtime(name="megatron-lm", param_dtype="bfloat16", compute_dtype="float8", wide_layers=(0, 5)),
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
        yield Plan(**axes, dp_replicate=data)  # DDP, in buckets
        if data > 1:
            yield Plan(**axes, dp_replicate=2, dp_shard=data // 2, reshard_after_forward=True)


def drawn(data, schedule, rounds):
    """Return a scenario and plans of a schedule that have `rounds` times as many micro batches as ranks, and as stages
    where the schedule needs them.
    """
    kind = SCHEDULES[schedule]
    ways = [name for name, asked in RUNTIMES.items() if not (kind.splits_backward and asked.compile)]
    asked = RUNTIMES[data.draw(st.sampled_from(ways))]
    pp, gpus = data.draw(st.sampled_from(((4, 32), (2, 16), (8, 32), (4, 128))))
    stages = data.draw(st.integers(kind.least_stages, kind.most_stages or 3))
    each, more = data.draw(st.sampled_from((1, 2, 3, 9))), data.draw(st.integers(0, pp - 1))  # stages may be uneven
    model = replace(
        load_model(data.draw(st.sampled_from(("llama3-8b", "llama3-70b")))), layers=pp * stages * each + more
    )
    rounds *= stages if kind.every_stage else data.draw(st.sampled_from((1, stages)))
    scenario = Scenario(
        model=model,
        cluster=cluster("dgx-h100", gpus),
        workload=Workload(seq_len=data.draw(st.sampled_from((2048, 8192))), global_batch_size=rounds * gpus),
        runtime=asked,
    )
    common = {"pp": pp, "virtual_stages": stages, "schedule": schedule}
    return scenario, [*plans_of(common, gpus=gpus, sharded=asked.name == "torchtitan")]


def screened(scenario, plans):
    columns, screening = plan_columns(plans), Screening(scenario)
    return screening.plans(columns, screening.blocks(columns, ("none", "full")), np.arange(len(plans)))


def no_bound_is_above_the_account(some):
    step_s = some.step_s()
    assert np.isfinite(step_s).all()
    assert (some.at_least_s() <= step_s).all()
    # Some of these plans are walked, the others bounded by the paths of those.
    assert (some.at_least_by_schedule_s() <= step_s).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=2, deadline=None)
@given(st.data())
def test_no_bound_of_a_pipeline_is_above_its_account(schedule, data):
    no_bound_is_above_the_account(screened(*drawn(data, schedule, data.draw(st.sampled_from((1, 2, 4))))))


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=1, deadline=None)
@given(st.data())
def test_a_step_of_which_a_part_is_walked_takes_as_long_as_one_walked_whole(schedule, data):
    scenario, plans = drawn(data, schedule, 8)
    some = screened(scenario, plans)
    no_bound_is_above_the_account(some)

    with patch.object(account, "walked", lambda _name, _ranks, micro_batches, _stages: micro_batches):
        whole = screened(scenario, plans).step_s()
    # Where a device, host or wire has a lead that it loses slowly, more rounds would have to be walked to see it.
    assert some.step_s() == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize(
    ("schedule", "way", "pp", "gpus", "stages", "layers", "seq_len", "rounds"),
    [
        # The host has more work than the device in a round; the step waits for it when its lead is lost.
        ("Interleaved1F1B", "hosts ahead", 2, 16, 3, 55, 8192, 6),
        # The host's lead, which a long step wears away, is missing when the rank updates its parameters.
        ("GPipe", "hosts behind", 4, 128, 1, 11, 2048, 4),
        # The last rank copies its gradients while the last micro batch passes the others.
        ("ZBH1", "hosts behind", 8, 32, 1, 73, 2048, 1),
    ],
)
def test_hosts_that_fall_behind_in_a_long_step_are_not_faster_than_their_work(
    schedule, way, pp, gpus, stages, layers, seq_len, rounds
):
    scenario = Scenario(
        model=replace(load_model("llama3-8b"), layers=layers),
        cluster=cluster("dgx-h100", gpus),
        workload=Workload(seq_len=seq_len, global_batch_size=rounds * gpus),
        runtime=RUNTIMES[way],
    )
    common = {"pp": pp, "virtual_stages": stages, "schedule": schedule}
    no_bound_is_above_the_account(screened(scenario, [*plans_of(common, gpus=gpus, sharded=True)]))


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
