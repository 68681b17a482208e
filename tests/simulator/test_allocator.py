"""What a nearly full GPU is expected to cost: nothing with room to spare, a flush a step without."""

import numpy as np
import pytest

from simulator.analytical.allocator import FLUSH_S_PER_BYTE, flush_s
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.calibration.intervals import memory_factors
from simulator.collectives.buffers import communicator_bytes
from simulator.collectives.cost import CollectiveModel
from simulator.collectives.group_times import GroupTimes
from simulator.columns.plan_table import plan_table
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology.catalog.cluster_file import load_cluster

GIB = 2.0**30
WORKLOAD = Workload(seq_len=4096, global_batch_size=8)
MACHINE = load_cluster("h200x4")


def two_shards(rows: int) -> GroupTimes:
    return GroupTimes(MACHINE, plan_table([Plan(dp_shard=2)] * rows, WORKLOAD), CollectiveModel(MACHINE))


def test_a_flush_costs_what_it_costs_where_it_is_sure_and_nothing_where_there_is_room() -> None:
    groups, capacity = two_shards(4), 138.3 * GIB
    left = capacity - communicator_bytes(groups)

    reserved = np.array([0.5, 0.9, 1.0, 1.3]) * left
    seconds = flush_s(groups, reserved, capacity)
    whole = reserved * FLUSH_S_PER_BYTE

    assert np.all(np.diff(seconds) > 0)
    assert seconds[0] < 0.01 * whole[0]
    assert 0.9 * whole[-1] < seconds[-1] < whole[-1]
    larger = [flush_s(groups, reserved, factor * capacity) for factor in (1.0, 1.1, 1.5, 2.0, 8.0)]
    assert np.all(np.diff(larger, axis=0) <= 0)  # more memory never costs time


def test_how_likely_a_flush_is_follows_how_far_memory_lies_from_predictions() -> None:
    """Where the upper end of the range just fits, one in ten does not; where the lower end does, nine in ten."""
    groups, capacity = two_shards(2), 138.3 * GIB
    left = capacity - communicator_bytes(groups)[0]
    low, high = memory_factors()

    reserved = np.array([left / high, left / low])
    likely = flush_s(groups, reserved, capacity) / (reserved * FLUSH_S_PER_BYTE)

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
