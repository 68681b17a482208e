"""Whole exports read back by `planner check`: the same plan, workload and runtime, but for what `UNSAID` names."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from planner.configs.asked import ask
from planner.configs.formats.configuration import CheckFlags
from planner.export.job import ExportJob
from planner.export.targets.registry import export, find_target
from planner.io.inputs import read_cluster
from planner.question.question import Question, question_of
from planner.search.plan_space.candidates import Bounds
from simulator.columns.plan_columns import PlanColumns
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.legality.rule import Grade
from simulator.legality.rules import is_legal
from simulator.pipeline.stages import stage_layers
from simulator.runtimes.library import spec_for
from tests.examples import examples
from tests.planner.every_plan import enumerate_candidates
from topology.errors import Infeasible

README = Path(__file__).resolve().parents[2] / "examples" / "check" / "README.md"
FRAMEWORKS = {
    "torchtitan@0.2.2": "torchtitan",
    "torchtitan@0.3.0": "torchtitan",
    "megatron": "megatron-lm",
    "deepspeed": "deepspeed",
    "accelerate": "pytorch",
}
# Of every family, with tied embeddings and without, dense, sparse and with latent attention.
MODELS = ("llama3-8b", "llama3.2-1b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite", "gpt3-175b", "gemma2-9b")
# What a kind of file has no key for, and why; examples/check/README.md has the same table.
UNSAID = {
    "torchtitan@0.2.2": {"placement": "the start script's CUDA_VISIBLE_DEVICES"},
    "torchtitan@0.3.0": {
        "placement": "the start script's CUDA_VISIBLE_DEVICES",
        "cp_method": "keys and values are gathered, whatever was planned",
        "recompute": "operators are selected, not every second block",
    },
    "megatron": {"placement": "the start script's CUDA_VISIBLE_DEVICES"},
    "deepspeed": {"placement": "the launcher's host and GPU lists"},
    "accelerate": {
        "placement": "the launcher's host and GPU lists",
        "recompute": "whole blocks or nothing, and that for FSDP alone: replicas need a call in the model's code",
        "reduce_dtype": "an argument of the program's FSDP plugin",
        "sequence_parallel": "the model's own tensor-parallel plan",
        "tp_overlap": "there is none",
    },
}


@cache
def space(framework: str, model: str, gpus: int) -> tuple[Question, PlanColumns]:
    """All legal plans of a framework for a model."""
    machine = read_cluster("dgx-h100", gpus)
    question = question_of(
        load_model(model), machine, Workload(seq_len=4096, global_batch_size=32), framework=framework
    )
    bounds = Bounds(
        max_micro_batch=4,
        max_virtual_stages=4,
        max_pp=1 if framework == "pytorch" else None,  # accelerate has no pipelines
        stated={"offload": ("none", "optimizer", "parameters")},
    )
    return question, enumerate_candidates(question, bounds=bounds).columns


@st.composite
def jobs(draw, target: str, framework: str = "") -> ExportJob:
    """A legal plan of a framework, by default the target's, in a runtime that may be configured otherwise."""
    model = draw(st.sampled_from(MODELS))
    question, columns = space(framework or FRAMEWORKS[target], model, draw(st.sampled_from((4, 8, 16))))
    assume(len(columns) > 0)
    plan = columns.plan(draw(st.integers(0, len(columns) - 1)))
    compiled = draw(st.booleans()) if target not in {"megatron", "deepspeed"} else False
    runtime = replace(question.runtime, compile=compiled or plan.tp_overlap == "async")
    routing = draw(st.sampled_from(("", "balanced"))) if question.model.moe else ""
    workload = replace(
        question.workload,
        seq_len=draw(st.sampled_from((2048, 4096))),
        document_len=draw(st.sampled_from((0, 512))),
        routing=routing,
    )
    question = replace(question, runtime=runtime, workload=workload)
    if plan.gpus <= 8 and draw(st.booleans()):
        plan = plan.with_(placement=tuple(reversed(range(plan.gpus))))
    if plan.pp > 1 and draw(st.booleans()):
        counts = list(stage_layers(question.model.layers, plan, spec_for(runtime).pipeline))
        counts[0], counts[-1] = counts[0] - 1, counts[-1] + 1
        uneven = plan.with_(layers_per_stage=tuple(counts))
        plan = uneven if counts[0] > 0 and is_legal(question.problems(uneven)) else plan
    return ExportJob(name="a run", plan=plan, question=question)


def said(plan: Plan, workload: Workload, runtime: Runtime) -> dict[str, object]:
    """Every field of the three, but for the version, which is the file's. What was left open is what
    the runtime does.
    """
    found = {
        field.name: getattr(one, field.name)
        for one in (plan, workload, runtime)
        for field in fields(one)
        if field.name not in {"name", "version"}
    }
    if plan.cp > 1 and plan.cp_method is None:
        found["cp_method"] = spec_for(runtime).context_parallel
    if plan.pp == 1 and plan.reshard_after_forward is None:
        found["reshard_after_forward"] = True
    return found


@pytest.mark.parametrize("target", FRAMEWORKS)
@given(st.data())
@examples(60)
def test_an_export_read_back_is_the_same_plan(target: str, data) -> None:
    job = data.draw(jobs(target))
    question = job.question
    try:
        done = export(job, find_target(target))
    except Infeasible as refused:
        event(f"refused: {refused.what}")
        return
    event("written")
    found = ask(done.text, find_target(target).file_name, CheckFlags(cluster="dgx-h100"))

    assert found.configuration.unknown == ()
    assert found.case is not None, (found.problems, found.questions)
    back = found.case.question
    before = said(job.plan, question.workload, question.runtime)
    after = said(found.case.plan, back.workload, back.runtime)
    assert {name: value for name, value in after.items() if name not in UNSAID[target]} == {
        name: value for name, value in before.items() if name not in UNSAID[target]
    }
    assert replace(back.model, assumed=()) == replace(question.model, assumed=())
    assert back.runtime.name == question.runtime.name


@pytest.mark.parametrize("target", FRAMEWORKS)
@given(st.data())
@examples(30)
def test_a_plan_of_another_framework_is_legal_where_it_is_written(target: str, data) -> None:
    others = sorted({*FRAMEWORKS.values(), "any", "meshwright", "megatron-deepspeed"} - {FRAMEWORKS[target]})
    job = data.draw(jobs(target, data.draw(st.sampled_from(others))))
    try:
        done = export(job, find_target(target))
    except Infeasible as refused:
        event(f"refused: {refused.what}")
        return
    event("written")
    found = ask(done.text, find_target(target).file_name, CheckFlags(cluster="dgx-h100"))

    assert found.case is not None, (found.problems, found.questions)
    illegal = [one.message for one in found.case.question.problems(found.case.plan) if one.grade is Grade.ILLEGAL]
    assert illegal == []
    assert found.case.plan.gpus == job.plan.gpus
    assert found.case.question.workload == job.question.workload


def test_what_a_file_cannot_say_is_documented() -> None:
    text = README.read_text()

    for target, facts in UNSAID.items():
        for fact, why in facts.items():
            assert f"| {target} | `{fact}` | {why} |" in text
