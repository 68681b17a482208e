"""DeepSpeed as it allocates and sends, compared with what ran: its own defaults, its own source, three runs on two
H200.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.lowering.simulation import simulate_plan
from simulator.lowering.training import lower_training
from simulator.memory.replay import MemoryReplay
from simulator.program.program import Collective
from simulator.runtimes.stated import resolve
from topology.catalog.clusters import cluster

BUCKET = 500_000_000  # deepspeed/runtime/zero/config.py: reduce_bucket_size

# Plan, model, global batch, bytes reserved: DeepSpeed 0.19.8 around transformers 5.17's Llama, sequences of 4,096
# tokens, reduced in float32 (examples/validation/exports_2xH200.md).
RAN = [
    (Plan(dp_replicate=2, zero_stage=2, micro_batch_size=2), "llama3.2-1b", 8, 44_627_394_560),
    (Plan(tp=2, zero_stage=0, micro_batch_size=2, sequence_parallel=False), "llama3.2-1b", 8, 27_910_995_968),
    (Plan(dp_replicate=2, zero_stage=3, micro_batch_size=2, recompute="full"), "llama3-8b", 4, 96_374_620_160),
]


def scenario(model: str = "llama3-8b", *, batch: int = 16, gpus: int = 8, reduce_dtype: str = "bfloat16") -> Scenario:
    return Scenario(
        model=load_model(model),
        cluster=cluster("dgx-h200", gpus),
        workload=Workload(seq_len=4096, global_batch_size=batch),
        runtime=resolve({"name": "deepspeed", "reduce_dtype": reduce_dtype})[0],
    )


@pytest.mark.parametrize(("plan", "model", "batch", "reserved"), RAN)
def test_replayed_memory_is_within_a_sixteenth_of_what_was_reserved(plan, model, batch, reserved):
    asked = scenario(model, batch=batch, gpus=2, reduce_dtype="float32")

    assert MemoryReplay(asked, plan).rank(0).reserved_bytes == pytest.approx(reserved, rel=1 / 16)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("batch", [8, 32])
def test_account_and_simulation_agree(stage, batch, recompute):
    asked = scenario(batch=batch)
    plan = Plan(dp_replicate=8, zero_stage=stage, recompute=recompute)
    simulated = simulate_plan(asked, plan).estimate
    counted = estimate_plans(asked, [plan])

    assert counted.step_s[0] == pytest.approx(simulated.step_s.value, rel=0.03)
    assert counted.peak_bytes[0] == pytest.approx(simulated.memory.peak_bytes.value, rel=0.02)


def test_even_a_short_network_goes_through_whole_buckets():
    """With two layers of it, activations are small alongside two buckets of half a billion numbers of 16 bits."""
    asked = scenario("llama3.2-1b", batch=2, gpus=2)
    short = Scenario(
        model=replace(asked.model, layers=2, vocab=8192),
        cluster=asked.cluster,
        workload=Workload(seq_len=128, global_batch_size=2),
        runtime=asked.runtime,
    )
    plain, scattered = (
        simulate_plan(short, Plan(dp_replicate=2, zero_stage=stage)).estimate.memory.peak_bytes.value
        for stage in (0, 2)
    )
    owned = short.model.parameters / 2

    assert scattered + owned * (12 + 2) - plain == pytest.approx(2 * 2 * BUCKET, rel=0.25)


def test_gradients_are_summed_whole_on_every_rank():
    """use_multi_rank_bucket_allreduce: an all-reduce in the place of a reduction to each owner, twice the traffic."""
    asked = scenario(batch=8)
    for stage in (1, 2):
        program = lower_training(asked, Plan(dp_replicate=8, zero_stage=stage, recompute="full")).program
        sent = [one for code in program.codes for one in code.instructions if isinstance(one, Collective)]
        large = {one.op for one in sent if one.nbytes > 1e6}

        assert large == {"all_reduce", "all_gather"}


def megatron(dtype: str, release: str = "2022-02") -> Scenario:
    """Return 96 layers of 12,288 in 12 stages on 48 nodes, as BLOOM's first trials had them."""
    model = replace(load_model("gpt3-175b"), layers=96, hidden=12288)
    stated = {"name": "megatron-deepspeed", "release": release, "param_dtype": dtype, "compute_dtype": dtype}
    return Scenario(
        model=model,
        cluster=cluster("dgx-a100", 384),
        workload=Workload(seq_len=2048, global_batch_size=2048),
        runtime=resolve(stated)[0],
    )


def test_bfloat16_has_whole_float32_sums_besides_its_gradients():
    """bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md: with its bfloat16 optimizer four more
    bytes a parameter, which are not sharded, and steps 5 % longer (110.96 and 116.54 s of one plan); float16 adds up
    and reduces gradients in float16.
    """
    plan = Plan(dp_replicate=8, zero_stage=1, tp=4, pp=12, micro_batch_size=2, schedule="1F1B", sequence_parallel=False)
    plan = replace(plan, recompute="full")
    half, brain = (estimate_plans(megatron(dtype), [plan]) for dtype in ("float16", "bfloat16"))
    layers = 8 * 12 * 12288**2 / 4  # of a middle stage; the first has the embedding as well

    assert megatron("float16").runtime.reduce_dtype == "float16"
    assert megatron("bfloat16").runtime.reduce_dtype == "float32"
    more = brain.peak_bytes[0] - half.peak_bytes[0]
    assert 4 * layers < more < 4 * (layers + (50257 + 2048) * 12288 / 4 + 1e9)
    assert brain.step_s[0] / half.step_s[0] == pytest.approx(116.54 / 110.96, abs=0.03)


def test_flat_gradients_at_the_end_of_a_step_take_fixed_segments_of_their_own():
    """Before torch 2.1 a tensor lies within one segment, and no segment of a middle stage is as large as what
    DeepSpeed's ZeRO-1 flattens: a bucket, its copy, what a rank owns, and that in float32.
    """
    plan = Plan(dp_replicate=8, zero_stage=1, tp=4, pp=12, micro_batch_size=2, schedule="1F1B", sequence_parallel=False)
    plan = replace(plan, recompute="full")
    then, now = MemoryReplay(megatron("float16"), plan), MemoryReplay(megatron("float16", "2024-06"), plan)
    middle = [unit for stage in then.schedule.stages_of(5) for unit in then.tensors.stages[stage]]
    layers = 8 * 12 * 12288**2 / 4  # without biases and norms
    reduced, updated = then.tensors.flattened_at_end(middle)
    replayed, growing = then.rank(5), now.rank(5)

    assert reduced == [2 * BUCKET, 2 * BUCKET]
    assert updated == pytest.approx([2 * layers / 8, 4 * layers / 8], rel=1e-3)
    assert replayed.allocated_bytes == growing.allocated_bytes
    assert replayed.reserved_bytes - growing.reserved_bytes > sum(reduced)
