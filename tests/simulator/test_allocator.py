"""What a nearly full GPU is expected to cost: nothing with room to spare, a flush a step without."""

import numpy as np
import pytest

from simulator.allocator import COMMUNICATOR_BYTES, FLUSH_S_PER_BYTE, communicators, flush_s
from simulator.closed_form import estimate_plans
from simulator.hf_config import load_model
from simulator.plan import Plan
from simulator.plan_table import plan_table
from simulator.runtime import Runtime
from simulator.workload import Workload
from topology.cluster_file import load_cluster

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
    assert seconds[0] < 1e-6
    assert seconds[-1] == pytest.approx(capacity * FLUSH_S_PER_BYTE, rel=1e-3)


def test_a_full_gpu_makes_a_step_slower_than_the_same_with_more_memory() -> None:
    """What is expected of the allocator is a part of the step like any other."""
    model, runtime, machine = load_model("llama2-13b"), Runtime(), load_cluster("h200x4")
    full, spare = (
        estimate_plans(model, machine, Workload(seq_len=4096, global_batch_size=batch), [plan], runtime).estimate(0)
        for batch, plan in ((8, Plan(dp_shard=4, micro_batch_size=2)), (4, Plan(dp_shard=4)))
    )

    assert sum(full.breakdown_s.values()) == pytest.approx(full.step_s.value)
    assert spare.breakdown_s["allocator"] < 1e-4
    assert full.memory.reserved_bytes > spare.memory.reserved_bytes
    assert full.breakdown_s["allocator"] > spare.breakdown_s["allocator"]
