"""Rank to coordinates: one mapping, and what columns of plans say about groups and sharding."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.columns.experts import busiest_load
from simulator.columns.plan_table import axis_sizes, plan_table
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan, rank_grid
from simulator.config.workload import Workload
from simulator.runtimes.library import runtime_spec

degrees = st.sampled_from([1, 2, 3, 4])


@given(degrees, degrees, degrees, degrees, degrees)
def test_rank_grid_is_a_bijection_with_tensor_parallel_innermost(pp: int, dr: int, ds: int, cp: int, tp: int) -> None:
    """Every rank appears once, and rank = ((((pp dr) ds) cp) tp) in mixed radix."""
    plan = Plan(pp=pp, dp_replicate=dr, dp_shard=ds, cp=cp, tp=tp)
    grid = rank_grid(plan)

    assert sorted(grid.ravel()) == list(range(plan.gpus))
    for index in np.ndindex(grid.shape):
        rank = 0
        for size, position in zip(grid.shape, index, strict=True):
            rank = rank * size + position
        assert grid[index] == rank


def test_micro_batches_must_divide() -> None:
    plan = Plan(dp_shard=4, micro_batch_size=3)

    assert plan.micro_batches(24) == 2
    with pytest.raises(ValueError, match="not a multiple"):
        plan.micro_batches(25)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan(dp_shard=8), (8, 8, 8)),  # FSDP2 shards everything
        (Plan(dp_replicate=8), (1, 1, 1)),  # DDP nothing
        (Plan(dp_replicate=8, zero_stage=1), (1, 1, 8)),
        (Plan(dp_replicate=8, zero_stage=2), (1, 8, 8)),
        (Plan(dp_replicate=8, zero_stage=3), (8, 8, 8)),
        (Plan(dp_shard=4, cp=2), (8, 8, 8)),  # context-parallel ranks hold the same parameters: they shard too
        (Plan(dp_replicate=2, dp_shard=4), (4, 4, 4)),  # HSDP
    ],
)
def test_what_is_sharded_over_how_many(plan: Plan, expected: tuple[int, int, int]) -> None:
    shard = plan_table([plan], Workload(seq_len=128, global_batch_size=8)).state_shard

    assert tuple(int(shard[k][0]) for k in ("parameters", "gradients", "optimizer")) == expected


def test_axes_of_llama3_8b_under_tensor_and_context_parallelism() -> None:
    """By hand: 32 query heads and 8 key/value heads of 128 over 4 ranks, 8192 tokens over 2."""
    table = plan_table([Plan(tp=4, cp=2, sequence_parallel=True)], Workload(seq_len=8192, global_batch_size=1))
    sizes = {
        name: float(value[0])
        for name, value in axis_sizes(
            load_model("llama3-8b"), Workload(seq_len=8192, global_batch_size=1), table
        ).items()
    }

    assert (sizes["a"], sizes["k"], sizes["q"], sizes["kv"], sizes["qkv"]) == (8, 2, 1024, 256, 1536)
    assert (sizes["t"], sizes["u"], sizes["s"], sizes["S"]) == (4096, 1024, 4096, 8192)
    assert (sizes["f"], sizes["gf"], sizes["v"]) == (3584, 7168, 32064)
    assert math.isclose(sizes["j"], 8193 / 2)


def test_experts_split_over_ranks_keep_the_routed_rows() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts per token; with ep 8 a rank holds 16 experts and still 8 rows per token."""
    workload = Workload(seq_len=1024, global_batch_size=8)
    table = plan_table([Plan(dp_shard=8, ep=8)], workload)
    sizes = {k: float(v[0]) for k, v in axis_sizes(load_model("qwen3-30b-a3b"), workload, table).items()}

    assert (sizes["E"], sizes["e"], sizes["r"]) == (128, 16, 8 * 1024)
    assert sizes["e"] * sizes["x"] == sizes["r"]


@pytest.mark.parametrize(
    ("plan", "wrapped"),
    [
        (Plan(tp=2, sequence_parallel=True), True),
        (Plan(pp=2), True),
        (Plan(dp_replicate=2, tp=2), True),
        (Plan(dp_replicate=2), False),  # autocast sees to the types
        (Plan(), False),
        (Plan(dp_shard=2), True),
        (Plan(dp_replicate=2, zero_stage=0, tp=2), False),  # a runtime that speaks of ZeRO has no such wrapper
    ],
)
def test_plans_that_shard_nothing_are_wrapped_for_their_types(plan: Plan, wrapped: bool) -> None:
    workload = Workload(seq_len=128, global_batch_size=8)

    assert bool(plan_table([plan], workload, wraps_one="always").fully_sharded[0]) is wrapped
    assert bool(plan_table([plan], workload).fully_sharded[0]) is (plan.dp_shard > 1)


def test_the_busiest_rank_of_random_loads_is_what_drawing_shows() -> None:
    """Loads of 64 experts that scatter by 0.6 and add up to all tokens, 100,000 draws, put on ranks."""
    random, ranks = np.random.default_rng(3), (2, 4, 8)
    loads = random.standard_normal((100_000, 64), dtype=np.float32)
    loads = 1.0 + 0.6 * (loads - loads.mean(1, keepdims=True)) / np.sqrt(63 / 64)
    busiest = [loads.reshape(len(loads), count, -1).mean(-1).max(1).mean() for count in ranks]

    found = busiest_load(np.array([1.0, *map(float, ranks)]), spread=0.6 / np.sqrt(63))

    assert found[0] == 1.0
    assert found[1:] == pytest.approx(busiest, rel=0.005)


def test_only_a_router_that_nothing_evens_fills_ranks_unevenly() -> None:
    model, plan = load_model("mixtral-8x7b"), Plan(dp_shard=2, ep=2)
    workload = Workload(seq_len=4096, global_batch_size=8)
    table = plan_table([plan, Plan(dp_shard=2)], workload)
    even = axis_sizes(model, workload, table)["r"]

    uneven = axis_sizes(model, workload, table, expert_spread=0.24)["r"]
    stated = axis_sizes(model, replace(workload, expert_imbalance=1.5), table, expert_spread=0.24)["r"]

    np.testing.assert_allclose(uneven / even, [1.2, 1.0], atol=0.01)
    np.testing.assert_allclose(stated / even, [1.5, 1.0])
    assert runtime_spec("meshwright").expert_spread > 0.0 == runtime_spec("torchtitan").expert_spread
