"""What a nearly full GPU is expected to cost: nothing with room to spare, a flush a step without."""

import numpy as np
import pytest

from planner.question.prediction import predict
from planner.question.question import question_of
from simulator.calibration.intervals import replayed_memory_factors
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.memory.flushes import retry_probability
from topology.catalog.cluster_file import load_cluster

LEFT = np.array([138.3 * 2.0**30])


def test_a_flush_is_sure_without_room_and_unlikely_with_it() -> None:
    likely = retry_probability(np.array([0.5, 0.9, 1.0, 1.3]) * LEFT, LEFT, replayed_memory_factors())

    assert np.all(np.diff(likely) > 0)
    assert likely[0] < 0.01
    assert 0.9 < likely[-1] < 1


def test_how_likely_a_flush_is_follows_how_far_memory_lies_from_predictions() -> None:
    """Where the upper end of the range just fits, one in ten does not; where the lower end does, nine in ten."""
    low, high = replayed_memory_factors()

    likely = retry_probability(np.array([LEFT[0] / high, LEFT[0] / low]), LEFT, (low, high))

    assert likely == pytest.approx([0.1, 0.9], abs=0.01)


def test_a_full_gpu_makes_a_step_slower_than_the_same_with_more_memory() -> None:
    """What is expected of the allocator is a part of the step like any other."""
    model, machine = load_model("llama2-13b"), load_cluster("h200x4")
    full, spare = (
        predict(
            question_of(model, machine, Workload(seq_len=4096, global_batch_size=batch), framework="torchtitan"), plan
        ).estimate
        for batch, plan in ((8, Plan(dp_shard=4, micro_batch_size=2)), (4, Plan(dp_shard=4)))
    )

    assert sum(full.breakdown_s.values()) == pytest.approx(full.step_s.value)
    assert spare.breakdown_s["allocator"] < 0.1 * full.breakdown_s["allocator"]
    assert full.memory.reserved_bytes > spare.memory.reserved_bytes
    assert full.breakdown_s["allocator"] > spare.breakdown_s["allocator"]
