"""Adapters and frozen modules of the executor: what they compute, what they train, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executor.launch.legal import check
from simulator.config.adapter import Adapter
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology.errors import BadPlan

torch = pytest.importorskip("torch")

from executor.model.adapters import SCALING, AdaptedLinear, train_only  # noqa: E402 - after the skip
from executor.model.decoder import Decoder  # noqa: E402 - after the skip
from executor.verify.plans import run_one_process, small_model  # noqa: E402 - after the skip

ALONE = Plan()
MODEL = small_model(load_model("llama3-8b"), ALONE)
LORA = Adapter(rank=4, target_modules=("q_proj", "down_proj"))
WORK = Workload(seq_len=16, global_batch_size=2)


def test_an_adapted_layer_is_that_of_the_sum_of_both_weights() -> None:
    """LoRA, section 4.1: W + (alpha / r) B A; the frozen weight has no gradient, and the adapters have theirs."""
    torch.manual_seed(0)
    frozen = torch.nn.Linear(12, 8, bias=False, dtype=torch.float64).requires_grad_(requires_grad=False)
    layer = AdaptedLinear(frozen, 3)
    for parameter in (layer.lora_a, layer.lora_b):
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    merged = (layer.weight + SCALING * layer.lora_b @ layer.lora_a).detach().requires_grad_()

    out, whole = layer(x), x @ merged.T
    given = torch.randn_like(out)
    (mine,) = torch.autograd.grad(out, x, given, retain_graph=True)
    (theirs,) = torch.autograd.grad(whole, x, given, retain_graph=True)
    out.backward(given)
    (of_merged,) = torch.autograd.grad(whole, merged, given)

    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(mine, theirs)
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.lora_a.grad, SCALING * layer.lora_b.T @ of_merged)
    torch.testing.assert_close(layer.lora_b.grad, SCALING * of_merged @ layer.lora_a.T)


@pytest.mark.parametrize(
    ("adapter", "trained"),
    [
        (LORA, {"lora_a", "lora_b"}),
        (Adapter(kind="frozen", target_modules=("embed_tokens", "self_attn")), {"w1", "w2", "w3", "output", "norm"}),
    ],
)
def test_a_step_changes_what_is_trained_and_nothing_else(adapter: Adapter, trained: set[str]) -> None:
    known = {"device": torch.device("cpu"), "seed": 3, **dict.fromkeys(("drawn", "store", "compute"), torch.float32)}
    before = run_one_process(MODEL, WORK, steps=0, adapter=adapter, **known).parameters
    after = run_one_process(MODEL, WORK, steps=1, adapter=adapter, **known)

    changed = {name for name in before if not torch.equal(before[name], after.parameters[name])}
    assert changed == set(after.gradients)
    assert changed
    assert {word for name in changed for word in name.split(".") if word in trained} == trained
    if adapter is LORA:
        assert all(name.endswith(("lora_a", "lora_b")) for name in changed)


def test_trained_numbers_are_those_that_the_planner_counts() -> None:
    """On the whole network, on the meta device: 3,407,872 of Llama-3-8B with peft's defaults."""
    model = load_model("llama3-8b")
    with torch.device("meta"):
        decoder = train_only(Decoder(model), model, Adapter(rank=8, target_modules=("q_proj", "v_proj")))

    assert sum(p.numel() for p in decoder.parameters() if p.requires_grad) == 3_407_872


@pytest.mark.parametrize(
    ("plan", "adapter", "model", "why"),
    [
        (Plan(tp=2), LORA, "llama3-8b", "tp 2"),
        (ALONE, replace(LORA, base_weights="nf4"), "llama3-8b", "nf4"),
        (ALONE, replace(LORA, dropout=0.1), "llama3-8b", "dropout"),
        (ALONE, LORA, "qwen3-30b-a3b", "dense layers"),
        (ALONE, replace(LORA, kind="dora"), "llama3-8b", "dora"),
    ],
)
def test_what_the_executor_cannot_adapt_is_refused_by_name(plan, adapter, model, why) -> None:
    runtime = Runtime(name="meshwright", param_dtype="bfloat16", adapter=adapter)
    with pytest.raises(BadPlan) as refused:
        check(plan, load_model(model), Workload(seq_len=4096, global_batch_size=plan.data_parallel), runtime)

    assert why in str(refused.value.why)
