"""Sequences packed of documents: attention stays inside each, by the kernel that the runtime has for that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.kernels.efficiency import efficiency
from simulator.lowering.simulation import simulate_plan
from simulator.runtimes.library import attention_kernel, recompute_stops_early
from simulator.runtimes.stated import resolve
from topology.catalog.clusters import cluster

PLAN = Plan(dp_shard=8)


def scenario(*, seq_len: int, documents: int = 0, batch: int = 8, runtime: str = "llm-foundry") -> Scenario:
    return Scenario(
        model=load_model("llama3-8b"),
        cluster=cluster("dgx-h100"),
        workload=Workload(seq_len=seq_len, global_batch_size=batch, document_len=documents),
        runtime=resolve({"name": runtime})[0],
    )


def step_s(asked: Scenario, plan: Plan = PLAN) -> float:
    return float(estimate_plans(asked, [plan]).step_s[0])


def test_packed_documents_cost_what_as_many_short_sequences_do():
    """One sequence of eight documents, and eight sequences: the same products, and the same attention."""
    packed = step_s(scenario(seq_len=8192, documents=1024))
    apart = step_s(scenario(seq_len=1024, batch=64), replace(PLAN, micro_batch_size=8))

    assert packed == pytest.approx(apart, rel=0.01)
    assert packed < 0.95 * step_s(scenario(seq_len=8192))


@pytest.mark.parametrize("documents", [0, 8192, 100_000])
def test_one_document_is_a_plain_sequence(documents):
    assert step_s(scenario(seq_len=8192, documents=documents)) == step_s(scenario(seq_len=8192))


def test_account_and_simulation_agree():
    asked = scenario(seq_len=8192, documents=512, runtime="torchtune")

    assert step_s(asked) == pytest.approx(simulate_plan(asked, PLAN).estimate.step_s.value, rel=0.03)


def test_masks_of_documents_and_sinks_run_other_kernels_where_a_runtime_has_them():
    tune, auto = Runtime(name="torchtune"), Runtime(name="nemo-automodel")

    assert attention_kernel(tune, "hopper", documents=True) == "flex" != attention_kernel(tune, "hopper")
    assert attention_kernel(auto, "hopper", sinks=True) == "flex" != attention_kernel(auto, "hopper")
    assert attention_kernel(auto, "hopper", documents=True) == attention_kernel(auto, "hopper")


def test_flex_attention_is_as_quick_as_published():
    """pytorch/pytorch, pull request 137036: H100, 16,384 tokens, 4 x 16 heads of 64, causal: 6.46 and 20.92 ms."""
    flops = 4 * 4 * 16 * 16384**2 * 64 / 2
    curve = efficiency("Hopper").attention["flex"]
    for fraction, times, seconds in ((curve.forward, 1.0, 6.46e-3), (curve.backward, 2.5, 20.92e-3)):
        reached = fraction * curve.head_dim_64 * 16384 / (16384 + curve.ramp_s)
        assert times * flops / (989e12 * reached) == pytest.approx(seconds, rel=0.03)


def test_a_layer_that_is_compiled_before_it_is_wrapped_runs_again_whole():
    """Torchtune compiles layers and wraps them afterwards (recipes/full_finetune_single_device.py: _setup_model)."""
    assert recompute_stops_early(Runtime(name="torchtune", compile=False))
    assert not recompute_stops_early(Runtime(name="torchtune", compile=True))
