"""What users asked in public threads and what the answer had to be, with its numbers: the stories about training
plans.
"""

from __future__ import annotations

import pytest

from planner.explain.explain import memory_account
from planner.explain.waterfall import waterfall
from planner.question.case_runtime import resolve_runtime
from planner.question.question import question_of
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from tests.planner.every_plan import enumerate_candidates
from topology.catalog.clusters import cluster

TITAN = resolve_runtime({"name": "torchtitan"})[0]
GIB = 2.0**30


def test_s2_fit_and_its_range():
    """Llama-3 8B, FSDP over 8 H100: 16 bytes a parameter are 119.7 GiB, 15.0 a GPU; the rest by category, as a
    range.
    """
    model = load_model("llama3-8b")
    plan = Plan(dp_shard=8, recompute="selective")
    estimate = estimate_plans(
        Scenario(
            model=model,
            cluster=cluster("dgx-h100", 8),
            workload=Workload(seq_len=8192, global_batch_size=8),
            runtime=TITAN,
        ),
        [plan],
    ).estimate(0)
    memory = estimate.memory
    account = memory_account(estimate)

    assert 16 * model.parameters / GIB == pytest.approx(119.7, abs=0.1)
    assert account.state_bytes / GIB == pytest.approx(15.0, abs=0.1)
    assert memory.peak_bytes.low < memory.peak_bytes.value < memory.peak_bytes.high
    named = dict(account.omitted)
    logits = 8192 * model.vocab * 4
    assert named["loss_and_recompute"] >= logits  # sequence x vocabulary x 4 bytes
    assert named["gathered_parameters"] >= 2 * (model.parameters - 2 * model.vocab * model.hidden) / model.layers
    assert memory.reserved_bytes > memory.peak_bytes.value  # the allocator's slack is apart
    assert memory.verdict == "fits"
    assert memory.fit == "yes"


def test_s10_what_mfu_to_expect():
    """Llama-2 70B on 8 A100 at 20 TFLOP/s is 6.4% of 312; what is predicted there is several times that, by one
    peak.
    """
    model = load_model("llama2-70b")
    machine = cluster("dgx-a100", 8)
    plan = Plan(dp_replicate=1, tp=8, recompute="full", sequence_parallel=True, zero_stage=0)
    megatron = resolve_runtime({"name": "megatron-lm"})[0]
    estimate = estimate_plans(
        Scenario(model=model, cluster=machine, workload=Workload(seq_len=4096, global_batch_size=32), runtime=megatron),
        [plan],
    ).estimate(0)
    fall = waterfall(estimate)

    assert 20e12 / fall.peak_flops == pytest.approx(0.064, abs=0.001)
    assert fall.peak_flops == 312e12  # dense bfloat16, not the sparse 624
    assert estimate.mfu > 4 * 0.064
    assert fall.top_loss.name in {"compute inefficiency", "recompute", "exposed TP communication"}
    assert cluster("dgx-h100", 8).slowest_kind.peak_flops["bfloat16"] == pytest.approx(989e12, rel=0.001)  # not 1979


def test_s12_odd_counts():
    """64 heads and 8 key/value heads on 6 GPUs: tensor parallel 1 or 2; 3 and 6 divide no heads. 12 pipelines of 70B
    do.
    """
    model, workload = load_model("llama2-70b"), Workload(seq_len=4096, global_batch_size=24)
    for framework in ("torchtitan", "megatron-lm"):
        found = enumerate_candidates(question_of(model, cluster("dgx-h100", 6), workload, framework=framework))
        degrees = {(int(a), int(b)) for a, b in zip(found.columns.tp, found.columns.pp, strict=True)}
        assert {tp for tp, _ in degrees} == {1, 2}
        assert (1, 6) in degrees or framework == "megatron-lm"  # 80 layers on six stages are uneven
        assert found.rejected["heads"] > 0


def test_s12_sixteen_ways_is_legal_where_heads_are_copied():
    """Tp 16 over 8 key/value heads: torchtitan refuses, Megatron-LM copies heads."""
    model, workload = load_model("llama2-70b"), Workload(seq_len=4096, global_batch_size=16)
    from planner.search.plan_space.candidates import Bounds

    machine, bounds = cluster("dgx-h100", 16), Bounds(max_tp=16)
    titan = enumerate_candidates(question_of(model, machine, workload, framework="torchtitan"), bounds=bounds).columns
    megatron = enumerate_candidates(
        question_of(model, machine, workload, framework="megatron-lm"), bounds=bounds
    ).columns

    assert titan.tp.max() == 8
    assert megatron.tp.max() == 16


def test_s16_asynchronous_tensor_parallelism():
    """Llama-3 70B, 256 H100 at 500 W, FSDP 32 x TP 8, full recompute, compiled: published 597 to 652 tok/s/GPU, 1.09x.

    The predicted gain is between nothing and twice the published one; the rule without NVLink says that it does not
    pay.
    """
    from dataclasses import replace

    from simulator.legality.rule import Grade

    model = load_model("llama3-70b")
    machine = cluster("dgx-h100", 256)
    machine = replace(machine, gpu_kinds=tuple(replace(kind, power_w=500.0) for kind in machine.gpu_kinds))
    runtime = replace(TITAN, compile=True)
    plain = Plan(dp_shard=32, tp=8, sequence_parallel=True, recompute="full", micro_batch_size=16)
    workload = Workload(seq_len=8192, global_batch_size=512)
    table = estimate_plans(
        Scenario(model=model, cluster=machine, workload=workload, runtime=runtime),
        [plain, replace(plain, tp_overlap="async")],
    )
    gain = table.step_s[0] / table.step_s[1]

    assert 1.0 < gain < 1.18
    pcie = cluster("l40s-x8", 8)
    overlapped = Plan(dp_shard=2, tp=4, sequence_parallel=True, tp_overlap="async")
    problems = question_of(
        load_model("llama3-8b"),
        pcie,
        Workload(seq_len=4096, global_batch_size=16),
        framework="torchtitan",
        runtime=runtime,
    ).problems(overlapped)
    assert ("overlap-pcie", Grade.SLOW) in {(problem.rule, problem.grade) for problem in problems}


def test_s19_a_stale_plan_is_refused_with_the_difference(planner, tmp_path):
    """Made for eight GPUs, asked of four: exit 1, and the field that changed is named."""
    path = tmp_path / "plan.json"
    question = ("--gpus", "8", "--pp", "1", "--seq-len", "4096", "--global-batch", "16", "--no-simulate")
    assert planner("suggest", *question, "--out", path).returncode == 0
    stale = planner("estimate", "--plan", path, "--cluster", "dgx-h200")

    assert stale.returncode == 1
    assert "made for something else" in stale.stderr
    assert "name: dgx-h100, now dgx-h200" in stale.stderr
    assert "plan again" in stale.stderr


def test_s21_a_laptop_without_a_gpu(planner):
    done = planner("suggest", "--model", "llama3.2-1b", "--cluster", "dgx-h100", "--gpus", "2", "--global-batch", "8")

    assert done.returncode == 0
    assert "datasheet values, uncalibrated" in done.stdout
    assert "within -" in done.stdout
