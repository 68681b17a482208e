"""Offloading as people meet it: asked for, refused where a framework has none of it, offered where memory lacks,
exported.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from planner.question.question import question_of
from planner.search.fixes import find_fixes
from planner.search.plan_space.candidates import Bounds
from planner.search.search import SearchOptions, suggest
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.legality.frameworks import DEEPSPEED, FRAMEWORKS, LLM_FOUNDRY, MEGATRON, MESHWRIGHT, PYTORCH, TORCHTITAN
from tests.planner.conftest import make_cluster

WORKLOAD = Workload(seq_len=4096, global_batch_size=64)


@pytest.mark.parametrize(
    ("framework", "words"),
    [
        (TORCHTITAN, ("none", "parameters")),
        (PYTORCH, ("none", "parameters")),
        (DEEPSPEED, ("none", "optimizer", "parameters")),
        (MEGATRON, ("none", "optimizer")),
        (LLM_FOUNDRY, ("none",)),
        (MESHWRIGHT, ("none",)),
    ],
)
def test_each_framework_offloads_what_it_can(framework, words):
    assert framework.offloads == words


@pytest.mark.parametrize(
    ("name", "plan", "because"),
    [
        ("torchtitan", Plan(dp_shard=8, offload="parameters"), ""),
        ("torchtitan", Plan(dp_shard=8, offload="optimizer"), "keeps nothing of that in host memory"),
        ("torchtitan", Plan(dp_replicate=8, offload="parameters"), "needs sharded parameters"),
        ("pytorch", Plan(dp_replicate=8, dp_shard=1, offload="parameters"), "needs sharded parameters"),  # DDP
        ("pytorch", Plan(dp_replicate=4, dp_shard=1, tp=2, offload="parameters"), ""),
        ("deepspeed", Plan(dp_replicate=8, zero_stage=1, offload="optimizer"), ""),
        ("deepspeed", Plan(dp_replicate=8, zero_stage=0, offload="optimizer"), "needs a sharded optimizer"),
        ("deepspeed", Plan(dp_replicate=8, zero_stage=2, offload="parameters"), "needs sharded parameters"),
        ("megatron-lm", Plan(dp_replicate=8, zero_stage=1, offload="optimizer"), ""),
        ("megatron-lm", Plan(dp_replicate=8, zero_stage=3, offload="optimizer"), "needs a sharded optimizer"),
    ],
)
def test_legality_says_why(llama8b, name, plan, because):
    question = question_of(llama8b, make_cluster(1, 8), WORKLOAD, framework=FRAMEWORKS[name])
    messages = [problem.message for problem in question.problems(plan) if problem.rule.startswith("offload")]

    assert question.legal(plan) == (not because)
    assert bool(because) == any(because in message for message in messages if because)


def test_a_search_offloads_only_when_asked(llama8b):
    question = question_of(replace(llama8b, layers=8), make_cluster(1, 2), WORKLOAD)
    few = Bounds(max_pp=1, max_cp=1, max_micro_batch=2)
    plain, asked, either = (
        suggest(
            question, SearchOptions(bounds=replace(few, stated={"offload": words}), all_variants=True, simulate=False)
        )
        for words in (None, ("parameters",), ("none", "parameters"))
    )

    assert {one.plan.offload for one in plain.plans} == {"none"}
    assert {one.plan.offload for one in asked.plans} == {"parameters"}
    assert either.plans[0].plan == plain.plans[0].plan
    assert asked.plans[0].estimate.step_s.value > plain.plans[0].estimate.step_s.value


def test_offloading_is_offered_where_memory_lacks_at_what_it_costs(llama8b):
    """8B in float32 on 2 GPUs of 48 GiB: 64 GB of state a GPU."""
    question = question_of(llama8b, make_cluster(1, 2, memory_gib=48), WORKLOAD, framework=PYTORCH)
    plan = Plan(dp_shard=2, recompute="full")
    estimate = question.estimate([plan]).estimate(0)
    fixes = find_fixes(question, plan, estimate)
    offered = [one for one in fixes if one.plan.offload == "parameters"]

    assert len(offered) == 1
    assert "offload parameters" in offered[0].change
    assert offered[0].slower > 0.1
    same_gpus = [one for one in fixes if one.plan.gpus == plan.gpus and one.param_dtype == question.runtime.param_dtype]
    assert list(fixes[: len(same_gpus)]) == sorted(same_gpus, key=lambda one: one.step_s)


def test_commands_take_it_refuse_it_and_say_what_it_needs(planner, tmp_path):
    flags = ("--model", "llama3-70b", "--cluster", "dgx-h100", "--gpus", 8, "--seq-len", 4096, "--pp", 1, "--cp", 1)
    flags = (*flags, "--global-batch", 8, "--top", 1)
    found = json.loads(
        planner("suggest", *flags, "--offload", "parameters", "--json", "--out", tmp_path / "p.json").stdout
    )
    best = found["plans"][0]
    explained = planner("estimate", "--plan", tmp_path / "p.json")

    assert best["plan"]["offload"] == "parameters"
    assert best["estimate"]["memory"]["host_bytes"] == pytest.approx(70.55e9 * 16 / 8, rel=0.02)
    assert any("host's memory bandwidth" in line for line in found["assumed"])
    assert "of host memory for each GPU" in " ".join(explained.stdout.split())
    assert "offload optimizer -> none" in planner(
        "estimate", "--plan", _deepspeed(planner, tmp_path), "--offload", "none"
    ).stdout.replace("\n", " ")
    assert "nvme" in planner("suggest", *flags, "--offload", "nvme").stderr


def _deepspeed(planner, folder):
    path = folder / "zero.json"
    flags = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", 8, "--runtime", "deepspeed", "--zero", 2)
    planner("estimate", *flags, "--micro-batch", 1, "--recompute", "full", "--offload", "optimizer", "--out", path)
    return path


@pytest.mark.parametrize(
    ("framework", "target", "word", "written"),
    [
        ("torchtitan", "torchtitan@0.2.2", "parameters", "enable_cpu_offload = true"),
        ("torchtitan", "torchtitan@0.3.0", "parameters", "--training.enable_cpu_offload"),
        ("pytorch", "accelerate", "parameters", "fsdp_offload_params: true"),
        ("deepspeed", "deepspeed", "parameters", '"offload_param": {\n      "device": "cpu"'),
        ("deepspeed", "deepspeed", "optimizer", '"offload_optimizer": {\n      "device": "cpu"'),
        ("megatron-lm", "megatron", "optimizer", "--optimizer-cpu-offload"),
    ],
)
def test_exports_write_it(planner, tmp_path, framework, target, word, written):
    path = tmp_path / "plan.json"
    stage = {"deepspeed": ("--zero", 3), "megatron-lm": ("--zero", 1)}.get(framework, ())
    flags = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", 8, "--runtime", framework, *stage)
    planner("estimate", *flags, "--micro-batch", 1, "--recompute", "full", "--offload", word, "--out", path)

    assert written in planner("export", path, "--to", target).stdout


@pytest.mark.parametrize("framework", ["deepspeed", pytest.param("pytorch", marks=pytest.mark.nightly)])
def test_one_gpu_can_offload_what_it_has_nothing_to_share(planner, framework):
    """8B on one card of 24 GiB; the advice without offloading says what a search with it finds."""
    flags = (
        "--model",
        "llama3-8b",
        "--cluster",
        "rtx4090-x8",
        "--gpus",
        1,
        "--seq-len",
        2048,
        "--framework",
        framework,
    )
    found = json.loads(planner("suggest", *flags, "--offload", "parameters", "--top", 1, "--json").stdout)["plans"][0]
    advice = " ".join(planner("suggest", *flags).stderr.split())
    offered = re.search(
        r"--offload parameters \(about ([\d,]+) tokens/s/GPU, ([\d,]+) GiB of host memory a GPU", advice
    )

    assert found["plan"]["zero_stage"] == (3 if framework == "deepspeed" else None)
    assert found["fit_probability"] > 0.95
    assert offered is not None
    assert float(offered[1].replace(",", "")) == pytest.approx(found["estimate"]["tokens_per_s_per_gpu"], rel=0.1)
    host_bytes = found["estimate"]["memory"]["host_bytes"]
    assert float(offered[2].replace(",", "")) == pytest.approx(host_bytes / 2**30, rel=0.05)


def test_explain_and_trace_speak_of_the_same_step(planner, tmp_path):
    """8B on 2 GPUs of 24 GB, which without offloading has no plan at all."""
    path = tmp_path / "plan.json"
    flags = ("--model", "llama3-8b", "--cluster", "rtx4090-x8", "--gpus", 2, "--seq-len", 2048, "--global-batch", 2)
    planner("estimate", *flags, "--micro-batch", 1, "--recompute", "full", "--offload", "parameters", "--out", path)
    explained = json.loads(planner("explain", path, "--no-flips", "--json").stdout)
    traced = planner("trace", "--plan", path, "--out", tmp_path / "trace.json").stdout
    step_s = float(re.search(r"a step of ([\d.]+) s", traced)[1])

    assert explained["estimate"]["step_s"]["value"] == pytest.approx(step_s, rel=0.03)
    assert explained["memory"]["host_bytes"] == pytest.approx(8.03e9 * 16 / 2, rel=0.02)
    assert explained["behind_s"] <= 0.2 * step_s


def test_a_deployment_refuses_what_only_training_has(planner):
    done = planner("suggest", "--task", "serve", "--isl", 512, "--osl", 64, "--offload", "parameters")

    assert done.returncode == 2
    assert "--offload" in done.stderr
