"""What Megatron-Core's experts run besides their products, by its source and by what its functions were seen to run."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from simulator.config.model import MixtureOfExperts, Model
from simulator.config.runtime import Runtime
from simulator.kernels.operators import OperatorSpec, WorkKind, backward_work, forward_work
from simulator.runtimes.model_operators import operators_for

EXPERTS = MixtureOfExperts(experts=16, experts_per_token=4, ffn=128)
MODEL = Model(
    name="m",
    family="qwen3_moe",
    layers=4,
    hidden=256,
    heads=4,
    kv_heads=4,
    head_dim=64,
    ffn=512,
    vocab=1024,
    moe=EXPERTS,
)
AXES = "one t u h E e n m r x g y z gfe fe qkv qkx q kv v b s S D P w j a d k"
SIZES = {name: np.full(1, 8.0) for name in AXES.split()}


def moe_layer(runtime: Runtime, model: Model = MODEL) -> list[OperatorSpec]:
    return [o for o in operators_for(model, runtime).moe_layer if o.over != "etp" and not o.attention]


@pytest.mark.parametrize(
    ("bias", "dispatcher", "top_k", "loss"),
    [(False, "deepep", (8, 4), (13, 7)), (True, "alltoall", (14, 12), (18, 14)), (False, "alltoall", (10, 6), (13, 7))],
)
def test_a_router_launches_what_megatrons_functions_run(
    bias: bool, dispatcher: str, top_k: tuple[int, int], loss: tuple[int, int]
) -> None:
    """`tests/tools/megatron_operators.py` saw these with Megatron-LM d98e8a64 (16-bit logits: two more where they are
    converted); a selection bias adds up its counts in two more.
    """
    network = dataclasses.replace(MODEL, moe=dataclasses.replace(EXPERTS, router_bias=bias))
    operators = {o.name: o for o in moe_layer(Runtime(name="megatron-lm", moe_dispatcher=dispatcher), network)}

    for name, counts in (("top_k", top_k), ("balance_loss", loss)):
        assert (operators[name].launches, operators[name].backward_launches) == counts


def test_weights_travel_in_exchanges_of_their_own_and_counts_have_no_gradient() -> None:
    """token_dispatcher.py: MoEAlltoAllTokenDispatcher exchanges tokens and probabilities, and gathers counts."""
    operators = moe_layer(Runtime(name="megatron-lm"))
    forward = Counter(
        (w.collective, w.over) for o in operators for w in forward_work(o, SIZES, lambda _: 2.0) if w.collective
    )
    backward = Counter(
        (w.collective, w.over) for o in operators for w in backward_work(o, SIZES, lambda _: 2.0) if w.collective
    )

    assert forward["all_to_all", "ep"] == backward["all_to_all", "ep"] == 3
    assert forward["all_gather", "etp_ep"] == 1
    assert backward["all_gather", "etp_ep"] == backward["reduce_scatter", "etp_ep"] == 0
    assert sum(w.kind is WorkKind.WAIT for o in operators for w in forward_work(o, SIZES, lambda _: 2.0)) == 1


def test_networks_without_a_loss_for_balance_have_none() -> None:
    """Megatron-Bridge's gpt_oss_bridge.py: moe_router_load_balancing_type "none"."""
    with_loss, without = (
        {o.name for o in moe_layer(Runtime(name="megatron-bridge"), dataclasses.replace(MODEL, family=family))}
        for family in ("qwen3_moe", "gpt_oss")
    )

    assert {"balance_loss", "balance_counts"} <= with_loss
    assert not {"balance_loss", "balance_counts"} & without


def test_biases_of_experts_are_added_one_by_one_after_a_second_wait() -> None:
    """experts.py: _apply_bias runs a product and a sum for each expert, whose backward pass is two products and two
    sums, and joins them; fused_bias_geglu.py copies a number from pageable memory.
    """
    network = dataclasses.replace(MODEL, family="gpt_oss", moe=dataclasses.replace(EXPERTS, expert_bias=True))
    operators = {o.name: o for o in moe_layer(Runtime(name="megatron-bridge"), network)}
    bias = operators["expert_fc2_bias"]
    more = [launches * bias.by_expert for launches in (bias.launches, bias.backward_launches)]

    assert more == [2, 4]
    assert [name for name, o in operators.items() if o.waits] == ["counts_to_host", "offset_to_device"]
    assert "expert_fc2_bias" not in {o.name for o in moe_layer(Runtime(name="megatron-bridge"))}
