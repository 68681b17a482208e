"""What torchtitan's experts run and keep besides their products."""

from __future__ import annotations

import dataclasses

import pytest

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.model import MixtureOfExperts, Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.runtimes.library import operators_for
from topology.catalog.cluster_file import load_cluster

DENSE = Model(
    name="m", family="qwen3_moe", layers=4, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=4096, vocab=32000
)


def model(chosen: int) -> Model:
    return dataclasses.replace(DENSE, moe=MixtureOfExperts(experts=16, experts_per_token=chosen, ffn=1024))


def activations(chosen: int) -> float:
    scenario = Scenario(
        model=model(chosen),
        cluster=load_cluster("h200x4"),
        workload=Workload(seq_len=4096, global_batch_size=1),
        runtime=Runtime(name="torchtitan", param_dtype="bfloat16"),
    )
    return estimate_plans(scenario, [Plan()]).estimate(0).memory.by_category["activations"]


def test_every_copy_of_a_token_is_kept_in_float32_once() -> None:
    """models/moe/moe.py with `score_before_experts=False`, as models/qwen3 has it: the float32 copy of every expert's
    result is kept for the scores' gradient, the result itself is not.

    Counted by hand, a copy keeps 4 bytes of each of its numbers there and 2 before the experts, alongside four tensors
    of an expert's width in 16 bits and its score.
    """
    one_more = (activations(3) - activations(2)) / (4 * 4096)

    assert one_more >= 4 * 2048 + 2 * 2048 + 4 * 2 * 1024
    assert one_more < 4 * 2048 + 3 * 2 * 2048 + 6 * 2 * 1024


@pytest.mark.parametrize(("family", "first"), [("qwen3_moe", False), ("llama", True)])
def test_rows_are_padded_and_written_back_around_the_products(family: str, first: bool) -> None:
    """Scores weigh tokens before the experts, or their results afterwards."""
    network = dataclasses.replace(model(2), family=family)
    names = [operator.name for operator in operators_for(network, Runtime(name="torchtitan")).moe_layer]
    order = ["dispatch", "expert_pad", "expert_w1", "expert_w2", "expert_unpad", "combine", "unpermute"]

    assert [name for name in names if name in order] == order
    assert (names.index("expert_weigh") < names.index("dispatch")) == first
    assert (names.index("expert_weigh") > names.index("unpermute")) == (not first)
