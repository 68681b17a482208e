"""A plan with other lengths and micro batches, and what frees memory: figures that the plan has by itself, and laws."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from planner.question.prediction import predict
from planner.question.question import question_of
from planner.search.fixes import LEAST_FREED_BYTES, find_savings
from planner.search.size_grid import size_grid
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from tests.planner.conftest import TINY, make_cluster

QUESTION = question_of(
    replace(TINY, layers=8), make_cluster(1, 4, memory_gib=8), Workload(seq_len=4096, global_batch_size=32)
)
PLAN = Plan(dp_shard=4, micro_batch_size=4, recompute="none", reshard_after_forward=False)
LENGTHS, SIZES = (2048, 4096, 8192), (1, 4, 8)


@cache
def known():
    return predict(QUESTION, PLAN).estimate


@cache
def cells():
    return {(one.seq_len, one.micro_batch_size): one for one in size_grid(QUESTION, PLAN, known(), LENGTHS, SIZES)}


def test_the_plan_as_it_is_has_its_own_figures():
    here = cells()[4096, 4]

    assert here.global_batch_size == 32
    assert here.step_s == pytest.approx(known().step_s.value)
    assert here.reserved_bytes == known().memory.reserved_bytes
    assert here.tokens_per_s_per_gpu == pytest.approx(32 * 4096 / known().step_s.value / 4)


def test_more_tokens_of_a_micro_batch_take_longer_and_hold_more():
    for (length, size), one in cells().items():
        for (longer, larger), other in cells().items():
            if (length, size) != (longer, larger) and longer >= length and larger >= size:
                assert other.step_s > one.step_s
                assert other.reserved_bytes > one.reserved_bytes
                assert other.fit_probability <= one.fit_probability
    assert len({one.fit for one in cells().values()}) > 1


def test_what_is_not_legal_says_why():
    sequences = replace(PLAN, dp_shard=2, tp=2, sequence_parallel=True)
    (one,) = size_grid(QUESTION, sequences, predict(QUESTION, sequences).estimate, (4095,), (1,))

    assert one.step_s is None
    assert "4095" in one.problem


def test_changes_that_free_memory_are_plans_of_their_own_and_differ_in_one_setting():
    found = find_savings(QUESTION, PLAN, known())
    held = [one.reserved_bytes for one in found]

    assert {"micro batch 2", "recompute full", "torch.compile"} <= {one.change for one in found}
    assert held == sorted(held)
    assert max(held) <= known().memory.reserved_bytes - LEAST_FREED_BYTES
    for one in found:
        assert " with " not in one.change
        asked = replace(QUESTION, runtime=replace(QUESTION.runtime, compile=one.compiled))
        alone = predict(asked, one.plan).estimate
        assert (one.step_s, one.reserved_bytes) == (alone.step_s.value, alone.memory.reserved_bytes)
        assert one.longer == pytest.approx(alone.step_s.value / known().step_s.value - 1)
