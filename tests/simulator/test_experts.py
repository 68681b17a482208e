"""What torchtitan's experts run and keep besides their products."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.model import MixtureOfExperts, Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.kernels.operators import WorkKind, backward_work, forward_work
from simulator.kernels.roofline import Roofline
from simulator.runtimes.model_operators import operators_for
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


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_later_releases_neither_pad_rows_nor_weigh_tokens_first(family: str) -> None:
    """Torchtitan @b5bcd76c, models/common/token_dispatcher.py: one index there and one sum back; an index more each way
    with expert parallelism.
    """
    network = dataclasses.replace(model(2), family=family)
    operators = operators_for(network, Runtime(name="torchtitan", version="0.3")).moe_layer
    before, after = (
        ["permute", "dispatch", "expert_permute"],
        ["expert_restore", "combine", "expert_weigh", "unpermute"],
    )
    order = [*before, "expert_w1", *after]
    names = [one.name for one in operators if not {"compiled", "autocast"} & {*one.when}]

    assert [name for name in names if name in order] == order
    assert not [name for name in names if "pad" in name or "repeated" in name]
    assert {one.name for one in operators if one.matmul == one.collective == "" and "ep" in one.when} == {
        "counts_to_host",
        "expert_permute",
        "expert_restore",
    }


MEASURED = json.loads((Path(__file__).parents[2] / "examples" / "validation" / "experts.json").read_text("utf-8"))
LAYERS = [layer for layer in MEASURED["layers"] if layer["of"] == "torchtitan"]
DTYPE_BYTES_OF = {"compute": 2.0, "f32": 4.0}
PRODUCTS = {"aten::_grouped_mm", "aten::mm", "aten::topk"}  # what is left out of a description's sums, too
OTHERS = {"ffn_norm", "router", "top_k", "residual"}


def described_s(case: list[int], types: str) -> float:
    """Return the device time of what a layer of experts does besides its products, by torchtitan's description."""
    width, ffn, experts, chosen, tokens = case
    network = dataclasses.replace(
        DENSE, hidden=width, moe=MixtureOfExperts(experts=experts, experts_per_token=chosen, ffn=ffn)
    )
    mixed = types == "mixed"
    runtime = Runtime(name="torchtitan", param_dtype="float32" if mixed else "bfloat16", compute_dtype="bfloat16")
    held = {"autocast"} if mixed else {"!autocast"}
    counts = {
        "one": 1, "u": tokens, "t": tokens, "r": tokens * chosen, "e": experts, "E": experts, "h": width,
        "hr": 2 * width if mixed else width, "fe": ffn, "gfe": 2 * ffn, "x": tokens * chosen / experts,
    }  # fmt: skip
    sizes = {name: np.array([float(count)]) for name, count in counts.items()}
    roofline = Roofline(gpu=load_cluster("dgx-h100").slowest_kind)
    total = 0.0
    for operator in operators_for(network, runtime).moe_layer:
        begun = operator.name in {"permute", "expert_sort"} or total > 0.0
        if not begun or operator.name in OTHERS or not held >= {*operator.when} - {"!ep"}:
            continue
        for work in (
            *forward_work(operator, sizes, DTYPE_BYTES_OF.__getitem__),
            *backward_work(operator, sizes, DTYPE_BYTES_OF.__getitem__),
        ):
            if work.kind is WorkKind.MOVE:
                total += float(roofline.seconds(work)[0])
    return total


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer['case']} {layer['types']}")
def test_a_layer_does_beside_its_products_what_it_did_on_a_gpu(layer: dict[str, Any]) -> None:
    """Copies, casts, gradients of indices and weights of results, measured on one H100 (experts.md)."""
    seen = sum(seconds for name, _, _, seconds in layer["operators"] if name not in PRODUCTS)

    assert described_s(layer["case"], layer["types"]) == pytest.approx(seen, rel=0.12)


def test_padding_of_experts_costs_a_microsecond_a_row() -> None:
    """The gradient of the row of zeros adds 8 rows an expert, one after another, however wide they are."""
    few, many = (described_s([2048, 512, experts, 2, 4096], "bfloat16") for experts in (16, 144))

    assert many - few == pytest.approx(8 * 128 * 1.0e-6, rel=0.05)


def test_only_kernels_of_experts_are_launched_for_each_of_them():
    """The dense layers of a model with experts have activations of the same names."""
    operators = operators_for(model(2), Runtime(name="pytorch", expert_products="loop"))

    alone = {one.name for one in operators.moe_layer if one.one_by_one}
    assert alone == {"expert_w1", "silu", "expert_w3", "gate", "expert_w2"}
    assert not [one.name for one in operators.dense_layer if one.by_expert]
