"""How many rows of tokens reach a rank with experts, against counting them out."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.collectives.times import NET_PEER
from simulator.columns.experts import busiest_load, places_visited
from simulator.columns.plan_table import axis_sizes, plan_table
from simulator.config.model import MixtureOfExperts, Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.runtimes.library import runtime_spec
from topology.catalog.cluster_file import load_cluster

MOE = MixtureOfExperts(experts=8, experts_per_token=3, ffn=1024)
MODEL = Model(
    name="m",
    family="mixtral",
    layers=4,
    hidden=2048,
    heads=16,
    kv_heads=16,
    head_dim=128,
    ffn=4096,
    vocab=32000,
    moe=MOE,
)
WORKLOAD = Workload(seq_len=4096, global_batch_size=8)
WHOLE = Plan(dp_replicate=2, tp=4, sequence_parallel=True, zero_stage=1, ep=2, etp=1)


def sizes(plan: Plan, workload: Workload = WORKLOAD, **how: object) -> dict[str, float]:
    table = plan_table([plan], workload, splits_experts="tp")
    return {name: float(size[0]) for name, size in axis_sizes(MODEL, workload, table, **how).items()}


@pytest.mark.parametrize("places", [1, 2, 4, 8])
def test_a_token_visits_as_many_places_as_all_choices_do_on_average(places: int) -> None:
    each = MOE.experts // places
    counted = [len({expert // each for expert in chosen}) for chosen in combinations(range(MOE.experts), 3)]

    assert places_visited(MOE, np.array([float(places)]))[0] == pytest.approx(np.mean(counted))


@pytest.mark.parametrize("etp", [1, 2, 4])
def test_splitting_experts_moves_rows_and_neither_work_nor_parameters(etp: int) -> None:
    split = replace(WHOLE, etp=etp)
    one, many = sizes(WHOLE), sizes(split)

    assert many["r"] * many["gfe"] == one["r"] * one["gfe"], "every row meets every column of its experts once"
    assert many["n"] == one["n"]
    held = [plan.ep * sizes(plan)["e"] for plan in (WHOLE, split)]
    assert held == [MOE.experts, MOE.experts]


def test_unstated_splits_are_those_of_tensor_parallelism() -> None:
    assert sizes(replace(WHOLE, etp=None)) == sizes(replace(WHOLE, etp=4))


def test_counts_of_a_router_give_the_busiest_rank() -> None:
    counts = (9, 1, 2, 4, 1, 3, 3, 1)  # two ranks: 16 and 8 of 24
    counted = sizes(WHOLE, replace(WORKLOAD, expert_counts=counts))

    assert counted["m"] / counted["n"] == pytest.approx(16 / 12)
    natural, forced = (
        sizes(WHOLE, replace(WORKLOAD, routing=word), expert_spread=0.2) for word in ("natural", "balanced")
    )
    assert natural["m"] > forced["m"] == forced["n"]


def test_a_router_that_nothing_evens_has_the_busiest_expert_that_was_measured() -> None:
    """Shazeer et al., arXiv 1701.06538, table 6: 17.8 times the mean of 256 experts without a loss for it."""
    spec = runtime_spec("megatron-bridge")

    assert busiest_load(np.array([256.0]), spec.unbalanced["gpt_oss"])[0] == pytest.approx(17.8, rel=0.02)


def test_a_token_crosses_a_network_to_no_more_nodes_than_its_groups() -> None:
    """DeepSeek-V3's limit (arXiv 2412.19437, section 2.1.2): of 8 groups a token visits 4, and as many of 8 nodes."""
    moe = MixtureOfExperts(experts=256, experts_per_token=8, ffn=1024, groups=8, groups_per_token=4)
    free = replace(moe, groups=1, groups_per_token=1)
    plan = Plan(dp_replicate=64, zero_stage=1, ep=64)
    table = plan_table([plan], Workload(seq_len=4096, global_batch_size=64))
    limited, all_over = (
        float(axis_sizes(replace(MODEL, moe=one), WORKLOAD, table, domain=8)["y"][0]) for one in (moe, free)
    )

    assert limited / all_over == pytest.approx(4 / places_visited(free, np.array([8.0]))[0])


@pytest.mark.parametrize(("ranks", "gbytes_per_s"), [(16, 43), (32, 58), (64, 51)])
def test_fused_dispatches_take_what_was_measured_across_nodes(ranks: int, gbytes_per_s: int) -> None:
    """DeepEP's docs/legacy.md: 4,096 tokens to 8 of 256 experts in 4 of 8 groups; copies to the own node count."""
    moe = MixtureOfExperts(experts=256, experts_per_token=8, ffn=1024, groups=8, groups_per_token=4)
    plan = Plan(dp_replicate=ranks, zero_stage=1, ep=ranks)
    table = plan_table([plan], Workload(seq_len=4096, global_batch_size=ranks))
    rows = float(axis_sizes(replace(MODEL, moe=moe), WORKLOAD, table, domain=8)["y"][0])
    nodes = ranks // 8
    visited = min(float(places_visited(moe, np.array([float(nodes)]))[0]), math.ceil(nodes / 2))
    tokens = float(axis_sizes(MODEL, WORKLOAD, table)["n"][0]) / MOE.experts_per_token

    taken = rows * (1 - 8 / ranks) / (NET_PEER * 50)
    assert taken == pytest.approx(tokens * visited / gbytes_per_s, rel=0.2)


def test_kernels_that_send_a_token_once_move_less_and_loops_over_experts_take_longer() -> None:
    def step_s(**runtime: str) -> float:
        scenario = Scenario(
            model=MODEL,
            cluster=load_cluster("dgx-h100"),
            workload=WORKLOAD,
            runtime=Runtime(name="megatron-lm", param_dtype="bfloat16", **runtime),
        )
        return float(estimate_plans(scenario, [Plan(dp_replicate=8, zero_stage=1, ep=4)]).step_s[0])

    usual = step_s()
    assert step_s(moe_dispatcher="hybridep") < step_s(moe_dispatcher="deepep")
    assert step_s(moe_dispatcher="hybridep") < usual < step_s(expert_products="loop")
