"""Exports, built by the tool's own code on a fake process group: what was built is what the plan says.

For interpreters named in MESHWRIGHT_EXPORT_PYTHONS (`torchtitan@0.2.2=PYTHON,deepspeed=PYTHON,...`), as the gate makes
them (`.ci/tools`); skipped without.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from planner.export.targets.registry import export, find_target
from simulator.config.plan import Plan
from simulator.pipeline.stages import stage_layers
from simulator.runtimes.library import is_later_version, runtime_spec
from tests.planner.test_export import FSDP, HYBRID, JOBS, TP, job

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = dict(pair.split("=", 1) for pair in os.environ.get("MESHWRIGHT_EXPORT_PYTHONS", "").split(",") if "=" in pair)
# A model that torchtitan ships, shapes that it builds of our flavor, tied embeddings, experts, replicas of shards.
TITAN = {
    "fsdp": JOBS["fsdp"],
    "tp": JOBS["tp"],
    "uneven": JOBS["uneven"],
    "cp": JOBS["cp"],
    "hybrid": job(HYBRID, nodes=2, model="llama2-7b"),
    "tied": job(FSDP, model="llama3.2-1b"),
    "experts": job(FSDP.with_(ep=8), model="mixtral-8x7b"),
}
ZERO = {"zero2": JOBS["zero2"], "tp": JOBS["tp"], "cp": JOBS["cp"], "moe": JOBS["moe"]}
MEGATRON = {
    "zero": JOBS["zero"],
    "experts": JOBS["moe"],
    "latent": job(Plan(dp_replicate=8, zero_stage=1, ep=8), model="deepseek-v3", framework="megatron-lm"),
    "cp": job(Plan(dp_replicate=4, cp=2, zero_stage=1, recompute="full"), framework="megatron-lm"),
    "pp": job(Plan(dp_replicate=2, pp=4, zero_stage=1, schedule="1F1B", micro_batch_size=2), framework="megatron-lm"),
    "interleaved": job(
        Plan(dp_replicate=2, pp=4, zero_stage=1, schedule="Interleaved1F1B", virtual_stages=2), framework="megatron-lm"
    ),
}
MESH = {
    "fsdp": JOBS["fsdp"],
    "tp": job(TP.with_(reshard_after_forward=False)),
    "cp": JOBS["cp"],
    "hybrid": JOBS["hybrid"],
}


def built(target: str, jobs) -> dict:
    """What the tool's own code made of each job's file."""
    if target not in PYTHONS:
        pytest.skip(f"no interpreter with {target} is named in MESHWRIGHT_EXPORT_PYTHONS")
    files = []
    for one in jobs.values():
        done = export(one, find_target(target))
        files.append({"text": done.text, "files": done.files, "world": one.plan.gpus})
    asked = Path(os.environ.get("TMPDIR", "/tmp"), f"meshwright-builds-{os.getpid()}.json")  # noqa: S108 - its own name
    asked.write_text(json.dumps(files))
    try:
        run = subprocess.run(
            [PYTHONS[target], "-W", "ignore", str(ROOT / "tests" / "tools" / "export_builders.py"), target, str(asked)],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    finally:
        asked.unlink()
    assert run.returncode == 0, run.stderr[-2000:]
    answers = dict(zip(jobs, json.loads(run.stdout.splitlines()[-1]), strict=True))
    assert not {name: answer["error"] for name, answer in answers.items() if "error" in answer}
    return {name: answer["built"] for name, answer in answers.items()}


@pytest.mark.parametrize("target", ["torchtitan@0.2.2", "torchtitan@0.3.0"])
def test_torchtitan_builds_the_plan(target: str) -> None:
    shared = {name: TITAN[name] for name in ("fsdp", "tp", "cp", "hybrid", "tied")}
    jobs = TITAN if target.endswith("0.2.2") else {**shared, "in pieces": job(FSDP, version="0.3.0")}
    for name, found in built(target, jobs).items():
        one = jobs[name]
        plan, model, workload = one.plan, one.question.model, one.question.workload
        axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")

        assert {axis: found[axis] for axis in axes} == {axis: getattr(plan, axis) for axis in axes}, name
        assert found["global_batch"] == workload.global_batch_size
        assert found["seq_len"] == workload.seq_len
        in_a_pass = one.micro_batches if plan.pp > 1 else 1
        assert found["local_batch"] == plan.micro_batch_size * in_a_pass
        assert found["accumulated"] * in_a_pass == one.micro_batches
        assert found.get("micro_batches", in_a_pass) == in_a_pass
        stages = stage_layers(model.layers, plan, runtime_spec("torchtitan").pipeline)
        assert [len(layers) for layers in found["layers"]] == [stages[0]]  # of the first pipeline rank
        held = stages[0] if plan.recompute != "none" else 0
        assert found["recomputed"] == held, name
        assert found["compiled"] is one.question.runtime.compile
        assert found.get("loss_pieces", 1) == (8 if is_later_version(one.question.runtime) else 1)
        assert found["param_dtype"] == ["float32"]
        assert (found["compute_dtype"], found["reduce_dtype"]) == ("bfloat16", "float32")
        shards = plan.dp_shard * plan.cp * plan.tp
        if plan.pp == 1:
            bias = model.moe.experts * model.moe_layers if model.moe and model.moe.router_bias else 0
            assert found["parameters"] == model.parameters - bias, name
        assert found["local_parameters"] == pytest.approx(found["parameters"] / shards, rel=2e-3), name


def test_deepspeed_initializes_the_plan() -> None:
    for name, found in built("deepspeed", ZERO).items():
        one = ZERO[name]
        plan = one.plan
        stage = 3 if plan.zero_stage is None else plan.zero_stage

        assert (found["dp"], found["tp"], found["cp"]) == (plan.data_parallel, plan.tp, plan.cp), name
        assert found["zero_stage"] == stage
        assert found["micro_batch"] == plan.micro_batch_size
        assert found["micro_batch"] * found["accumulated"] * found["dp"] == one.question.workload.global_batch_size
        assert found["param_dtype"] == ["bfloat16"]
        assert found["reduce_dtype"] == one.question.runtime.reduce_dtype
        assert (found["local_parameters"] < found["parameters"]) is (stage == 3 or plan.tp > 1)


def test_megatron_builds_the_plan() -> None:
    for name, found in built("megatron", MEGATRON).items():
        one = MEGATRON[name]
        plan, model, workload = one.plan, one.question.model, one.question.workload

        assert {axis: found[axis] for axis in ("tp", "pp", "cp", "ep")} == {
            axis: getattr(plan, axis) for axis in ("tp", "pp", "cp", "ep")
        }, name
        assert found["dp"] == plan.data_parallel
        assert found["micro_batch"] == plan.micro_batch_size
        assert found["micro_batches"] == one.micro_batches
        assert found["seq_len"] == workload.seq_len
        assert found["distributed_optimizer"] is (plan.zero_stage != 0)
        assert found["sequence_parallel"] is plan.sequence_parallel
        assert found["recompute"] == (None if plan.recompute == "none" else plan.recompute)
        stages = stage_layers(model.layers, plan, runtime_spec("megatron-lm").pipeline)
        chunks = [stages[chunk * plan.pp] for chunk in range(plan.virtual_stages)]  # of the first pipeline rank
        assert found["layers"] == chunks, name
        assert found["param_dtype"] == ["bfloat16"]
        if plan.pp == plan.tp == plan.ep == 1:
            assert found["parameters"] == model.parameters, name


def test_accelerate_hands_its_ranks_the_plan() -> None:
    for name, found in built("accelerate", MESH).items():
        one = MESH[name]
        plan = one.plan

        assert found["world"] == found["mesh"] == plan.gpus, name
        assert {axis: found[axis] for axis in ("dp_replicate", "dp_shard", "tp", "cp")} == {
            axis: getattr(plan, axis) for axis in ("dp_replicate", "dp_shard", "tp", "cp")
        }
        assert found["reshard"] is (plan.reshard_after_forward is not False)
        assert found["recompute"] is (plan.recompute != "none")
        # Without the policy that the header advises, gradients would be reduced in bfloat16.
        assert (found["reduce_dtype"], found["reduce_dtype_alone"]) == ("float32", "bfloat16")
        assert any("reduce_dtype=torch.float32" in line for line in export(one, find_target("accelerate")).needed)
