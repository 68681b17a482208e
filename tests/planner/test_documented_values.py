"""Every value that `--help` names for a flag of a plan is in the plan that is judged, and a rule that refuses it says
why.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from planner.export.targets.registry import TARGETS
from planner.question.cases import case_from_flags
from planner.question.flags import flags_of_plan
from planner.requests.flag import flags_of, from_keywords
from planner.requests.tools import Export
from planner.requests.training import Estimate, Suggest
from simulator.config.overlap_sites import MODES
from simulator.config.plan import OFFLOADS
from simulator.legality.frameworks import FRAMEWORKS, framework_named
from simulator.legality.rule import Grade
from simulator.pipeline.schedules.registry import SCHEDULES

QUESTION = {"model": "llama3.2-1b", "cluster": "dgx-h100", "gpus": 8, "seq_len": 2048, "global_batch": 64}


def judged(**said: Any) -> tuple[Any, list[str]]:
    """Return the case of these flags, and why its plan is not legal."""
    case = case_from_flags(flags_of_plan(from_keywords(Estimate, {**QUESTION, **said}).stated))
    problems = case.question.problems(case.plan)
    return case, [problem.message for problem in problems if problem.grade is Grade.ILLEGAL]


def documented(request: type, name: str) -> str:
    """Return the help of a flag."""
    return str(flags_of(request)[name].help)


def test_every_target_of_an_export_is_named():
    named = set(re.findall(r"[a-z]+", documented(Export, "to").partition(";")[0]))
    assert named == {target.name for target in TARGETS}


@pytest.mark.parametrize("name", re.findall(r"[a-z-]+", documented(Suggest, "framework")))
def test_every_framework_has_its_rules(name):
    assert judged(runtime=name)[0].question.framework is framework_named(name)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("word", OFFLOADS)
def test_every_offload_is_judged(framework, word):
    stage = {"zero": 3} if FRAMEWORKS[framework].zero_stages else {}
    case, refused = judged(runtime=framework, offload=word, micro_batch=1, **stage)

    assert word in documented(Estimate, "offload")
    assert case.plan.offload == word
    assert word in FRAMEWORKS[framework].offloads or any("offload" in reason for reason in refused)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("word", ["none", "selective", "selective-op", "full"])
def test_every_recomputation_is_judged(framework, word):
    case, refused = judged(runtime=framework, recompute=word, micro_batch=1)
    chosen = FRAMEWORKS[framework]

    assert word in documented(Estimate, "recompute")
    assert case.plan.recompute == word
    assert word in chosen.recomputes or chosen.any_recompute or any(word in reason for reason in refused)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("mode", MODES)
def test_every_overlap_mode_is_judged(framework, mode):
    case, refused = judged(runtime=framework, tp=2, sequence_parallel=True, tp_overlap=mode, micro_batch=1)
    chosen = FRAMEWORKS[framework]
    known = mode in ("none", *chosen.overlaps) or chosen.any_recompute

    assert case.plan.tp_overlap == mode
    assert known or any(mode in reason for reason in refused)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_judged(framework, name):
    stages = SCHEDULES[name].least_stages
    case, refused = judged(runtime=framework, pp=2, schedule=name.lower(), virtual_stages=stages, micro_batch=1)

    assert case.plan.schedule == name
    assert name in FRAMEWORKS[framework].schedules or refused


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_zero_stage_is_judged(framework, stage):
    case, refused = judged(runtime=framework, zero=stage, dp_replicate=8, micro_batch=1)

    if stage == 0 and not FRAMEWORKS[framework].zero_stages:  # replicas, which these frameworks do not call a stage
        assert (case.plan.zero_stage, case.plan.dp_replicate, case.plan.dp_shard) == (None, 8, 1)
    else:
        assert case.plan.zero_stage == stage
    assert stage in FRAMEWORKS[framework].zero_stages or stage == 0 or any("ZeRO" in reason for reason in refused)


@pytest.mark.parametrize("dtype", re.findall(r"b?float\d+", documented(Estimate, "param_dtype")))
def test_every_type_of_parameters_is_predicted_or_refused_by_name(dtype):
    for framework in ("pytorch", "torchtitan"):
        case, refused = judged(runtime=framework, param_dtype=dtype, micro_batch=1)
        known = FRAMEWORKS[framework].dtypes

        assert case.question.runtime.param_dtype == dtype
        assert (not refused) if not known or dtype in known else any(f"no type {dtype}" in one for one in refused)
        assert refused or case.question.estimate([case.plan]).step_s[0] > 0
