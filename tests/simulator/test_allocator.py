"""What a nearly full GPU is expected to cost: nothing with room to spare, a flush a step without."""

import numpy as np
import pytest

from simulator.calibration.intervals import memory_factors
from simulator.closed_form.allocator import COMMUNICATOR_BYTES, FLUSH_S_PER_BYTE, communicators, flush_s
from simulator.closed_form.estimates import estimate_plans
from simulator.closed_form.scenario import Scenario
from simulator.columns.plan_table import plan_table
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology.catalog.cluster_file import load_cluster

GIB = 2.0**30
WORKLOAD = Workload(seq_len=4096, global_batch_size=8)


def test_every_group_of_a_plan_is_counted() -> None:
    plans = [Plan(), Plan(tp=2, sequence_parallel=True), Plan(dp_shard=2, cp=2), Plan(dp_replicate=2, dp_shard=2, pp=2)]

    found = communicators(plan_table(plans, WORKLOAD))

    assert found.tolist() == [0, 2, 3, 4], "the world, and one for each axis; shards and context share parameters"


def test_a_flush_costs_what_it_costs_where_it_is_sure_and_nothing_where_there_is_room() -> None:
    table = plan_table([Plan(dp_shard=2)] * 4, WORKLOAD)
    capacity = 138.3 * GIB
    left = capacity - 2 * COMMUNICATOR_BYTES

    seconds = flush_s(table, np.array([0.5, 0.9, 1.0, 1.3]) * left, capacity)

    assert np.all(np.diff(seconds) > 0)
    assert seconds[0] < 0.01 * capacity * FLUSH_S_PER_BYTE
    assert 0.9 * capacity * FLUSH_S_PER_BYTE < seconds[-1] < capacity * FLUSH_S_PER_BYTE


def test_how_likely_a_flush_is_follows_how_far_memory_lies_from_predictions() -> None:
    """Where the upper end of the range just fits, one in ten does not; where the lower end does, nine in ten."""
    table = plan_table([Plan(dp_shard=2)] * 2, WORKLOAD)
    capacity = 138.3 * GIB
    left = capacity - 2 * COMMUNICATOR_BYTES
    low, high = memory_factors()

    likely = flush_s(table, np.array([left / high, left / low]), capacity) / (capacity * FLUSH_S_PER_BYTE)

    assert likely == pytest.approx([0.1, 0.9], abs=0.01)


def test_a_full_gpu_makes_a_step_slower_than_the_same_with_more_memory() -> None:
    """What is expected of the allocator is a part of the step like any other."""
    model, runtime, machine = load_model("llama2-13b"), Runtime(), load_cluster("h200x4")
    full, spare = (
        estimate_plans(
            Scenario(
                model=model, cluster=machine, workload=Workload(seq_len=4096, global_batch_size=batch), runtime=runtime
            ),
            [plan],
        ).estimate(0)
        for batch, plan in ((8, Plan(dp_shard=4, micro_batch_size=2)), (4, Plan(dp_shard=4)))
    )

    assert sum(full.breakdown_s.values()) == pytest.approx(full.step_s.value)
    assert spare.breakdown_s["allocator"] < 0.1 * full.breakdown_s["allocator"]
    assert full.memory.reserved_bytes > spare.memory.reserved_bytes
    assert full.breakdown_s["allocator"] > spare.breakdown_s["allocator"]
