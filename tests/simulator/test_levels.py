"""One step predicted three times: kernel by kernel, layer by layer, and by the account. How finely is no property of
the plan.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.engine.simulate import simulate
from simulator.lowering import training
from simulator.lowering.block_code import Detail
from simulator.lowering.training import lower_training
from topology.catalog.clusters import cluster

TITAN, MEGATRON, COMPILED = (
    Runtime(name="torchtitan"),
    Runtime(name="megatron-lm", param_dtype="bfloat16"),
    Runtime(name="torchtitan", compile=True),
)
FLOAT8 = Runtime(name="megatron-lm", param_dtype="bfloat16", compute_dtype="float8", wide_layers=(1, 3))
SP = {"tp": 4, "sequence_parallel": True}
# (what is particular, runtime, plan, micro batches): one stratum each of what a step may be made of.
DENSE = [
    ("one GPU", TITAN, Plan(), 2),
    ("replicas", TITAN, Plan(dp_replicate=8), 2),
    ("shards", TITAN, Plan(dp_shard=8), 2),
    ("shards kept", TITAN, Plan(dp_shard=8, reshard_after_forward=False), 4),
    ("shards of two nodes", TITAN, Plan(dp_shard=16), 2),
    ("hybrid shards", TITAN, Plan(dp_replicate=2, dp_shard=8), 2),
    ("shards, again", TITAN, Plan(dp_shard=8, recompute="full"), 2),
    ("tensors", TITAN, Plan(**SP), 2),
    ("tensors, per operator again", TITAN, Plan(**SP, dp_shard=2, recompute="selective-op"), 4),
    ("tensors without sequences", MEGATRON, Plan(tp=4, dp_replicate=2, zero_stage=1), 2),
    ("tensors in slices", COMPILED, Plan(**SP, tp_overlap="chunked"), 2),
    ("pushed tensors", TITAN, Plan(**SP, dp_shard=2, tp_overlap="copy_engine"), 2),
    ("asynchronous tensors", COMPILED, Plan(**SP, dp_shard=2, tp_overlap="async"), 2),
    ("userbuffers", MEGATRON, Plan(**SP, dp_replicate=2, zero_stage=1, tp_overlap="userbuffers"), 2),
    ("a ring of keys", TITAN, Plan(cp=4, dp_shard=2, cp_method="ring"), 2),
    ("gathered keys", TITAN, Plan(cp=4, dp_shard=2, cp_method="all_gather"), 2),
    ("exchanged heads", MEGATRON, Plan(cp=4, dp_replicate=2, cp_method="all_to_all", zero_stage=1), 2),
    ("sharded optimizer", MEGATRON, Plan(dp_replicate=8, zero_stage=1), 2),
    ("sharded gradients", MEGATRON, Plan(dp_replicate=8, zero_stage=2), 2),
]
PIPELINES = [
    ("1F1B", TITAN, Plan(**SP, pp=2, schedule="1F1B"), 4),
    ("1F1B, long", TITAN, Plan(**SP, pp=2, schedule="1F1B"), 16),
    ("1F1B of shards", TITAN, Plan(dp_shard=2, pp=4, schedule="1F1B"), 8),
    ("1F1B again", MEGATRON, Plan(dp_replicate=2, pp=4, schedule="1F1B", recompute="full", zero_stage=1), 8),
    ("1F1B, some in 16 bits", FLOAT8, Plan(dp_replicate=4, pp=2, schedule="1F1B", zero_stage=1), 4),
    ("GPipe", TITAN, Plan(dp_shard=4, pp=2, schedule="GPipe"), 4),
    ("interleaved", MEGATRON, Plan(**SP, pp=2, virtual_stages=2, schedule="Interleaved1F1B", zero_stage=1), 8),
    ("interleaved shards", TITAN, Plan(dp_shard=4, pp=2, virtual_stages=2, schedule="Interleaved1F1B"), 8),
    ("breadth first", TITAN, Plan(dp_shard=4, pp=2, virtual_stages=2, schedule="LoopedBFS"), 4),
    ("split", TITAN, Plan(dp_shard=2, pp=4, schedule="ZBH1"), 8),
    ("split, interleaved", TITAN, Plan(dp_shard=4, pp=2, virtual_stages=2, schedule="InterleavedZeroBubble"), 8),
    ("a V", TITAN, Plan(dp_shard=2, pp=4, virtual_stages=2, schedule="ZBVZeroBubble"), 8),
    ("two directions", TITAN, Plan(dp_shard=2, pp=4, virtual_stages=2, schedule="DualPipeV"), 16),
]
EXPERTS = [
    ("experts", TITAN, Plan(dp_shard=8), 2),
    ("experts kept", TITAN, Plan(dp_shard=8, reshard_after_forward=False), 4),
    ("spread experts", TITAN, Plan(dp_shard=8, ep=8), 2),
    ("experts and tensors", TITAN, Plan(tp=2, sequence_parallel=True, dp_shard=4, recompute="selective-op"), 4),
    ("experts, again", COMPILED, Plan(dp_shard=8, ep=4, recompute="full"), 2),
    ("experts in a pipeline", MEGATRON, Plan(dp_replicate=4, ep=4, pp=2, schedule="1F1B", zero_stage=1), 8),
    ("a host late with experts", MEGATRON, Plan(pp=8, schedule="1F1B", recompute="full", zero_stage=1), 8),
    ("a host late with their weights", MEGATRON, Plan(dp_replicate=2, pp=4, schedule="ZBH1", zero_stage=1), 8),
]
STRATA = [
    pytest.param(model, *stratum, id=stratum[0])
    for model, strata in (("llama3-8b", DENSE), ("llama3-8b", PIPELINES), ("qwen3-30b-a3b", EXPERTS))
    for stratum in strata
]


@pytest.mark.parametrize(("name", "_", "runtime", "plan", "micro_batches"), STRATA)
def test_every_level_of_detail_tells_the_same_step(name: str, _: str, runtime: Runtime, plan: Plan, micro_batches: int):
    model = replace(load_model(name), layers=16)
    scenario = Scenario(
        model=model,
        cluster=cluster("dgx-h200", gpus=plan.gpus),
        workload=Workload(seq_len=2048, global_batch_size=micro_batches * plan.data_parallel),
        runtime=runtime,
    )
    table = estimate_plans(scenario, [plan])
    account_s = float(table.step_s[0] - table.breakdown_s["allocator"][0])
    kernel_s, layer_s = (
        simulate(lowered.program, lowered.costs, spans=False).step_s
        for lowered in (lower_training(scenario, plan, detail=detail) for detail in (Detail.KERNEL, Detail.LAYER))
    )

    assert layer_s == pytest.approx(kernel_s, rel=0.01)
    assert account_s == pytest.approx(kernel_s, rel=0.01)


def test_passes_of_more_kernels_than_a_queue_holds_wait_for_their_host() -> None:
    """Kernels about as long as their launches, and more of them in a pass than a host can be ahead: while a stage waits
    for its message, its host fills the queue and no more.
    """
    plan = Plan(cp=4, pp=4, schedule="1F1B", micro_batch_size=2)
    scenario = Scenario(
        model=load_model("qwen3-30b-a3b"),
        cluster=cluster("dgx-h200", gpus=plan.gpus),
        workload=Workload(seq_len=4096, global_batch_size=16),
        runtime=Runtime(name="torchtitan", param_dtype="bfloat16"),
    )
    table = estimate_plans(scenario, [plan])
    lowered = lower_training(scenario, plan, detail=Detail.LAYER)

    account_s = float(table.step_s[0] - table.breakdown_s["allocator"][0])
    assert account_s == pytest.approx(simulate(lowered.program, lowered.costs, spans=False).step_s, rel=0.01)


def test_copies_take_as_long_at_any_clocks() -> None:
    """Packing for FSDP is limited by memory; clocks are those of products."""
    plan = Plan(dp_shard=8)
    scenario = Scenario(
        model=load_model("llama3-8b"),
        cluster=cluster("dgx-h200"),
        workload=Workload(seq_len=2048, global_batch_size=8),
        runtime=TITAN,
    )
    copies_s = []
    for clocks in (1.0, 0.8):
        with patch.object(training, "working_clocks", lambda *_, at=clocks: np.array([at])):
            lowered = lower_training(scenario, plan, detail=Detail.LAYER)
        copied = [cost.seconds for key, (cost, _) in lowered.costs.kernels.items() if key[0].startswith("copy_")]
        copies_s.append(copied)

    assert len(copies_s[0]) > 4
    assert copies_s[1] == copies_s[0]
