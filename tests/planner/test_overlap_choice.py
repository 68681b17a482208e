"""Overlap modes by communication against all 1,296 ways to choose them, and what each is said to be worth."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from planner.explain.explain import overlap_by_site
from planner.question.question import question_of
from planner.search.plan_space.candidates import Bounds
from planner.search.search import SearchOptions, suggest
from simulator.analytical import account
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.overlap_sites import MODES, NONE, SITES, modes_by_site, written
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.legality.rule import Grade
from simulator.runtimes.stated import resolve
from tests.planner.conftest import make_cluster

EVERY = sorted({written(dict(zip(SITES, modes, strict=True))) for modes in itertools.product(MODES, repeat=4)})


@pytest.mark.parametrize(
    ("name", "gpus", "length", "memory_gib", "stages"),
    [
        ("llama3-8b", 4, 4096, 44.0, 1),
        pytest.param("llama3-8b", 4, 4096, 44.0, 2, marks=pytest.mark.nightly),
        pytest.param("mixtral-8x7b", 8, 8192, 141.0, 2, marks=pytest.mark.nightly),
    ],
)
def test_no_other_choice_of_modes_is_better(name, gpus, length, memory_gib, stages):
    """Memory or length asks for tensor parallelism; its modes are those that costing every text says."""
    model = load_model(name)
    machine = make_cluster(-(-gpus // 8), min(gpus, 8), memory_gib=memory_gib)
    workload = Workload(seq_len=length, global_batch_size=2 * gpus)
    answer = suggest(
        question_of(model, machine, workload, framework="meshwright"),
        SearchOptions(top=8, simulate=False, bounds=Bounds(max_micro_batch=1, max_cp=1, max_pp=stages)),
    )
    cut = [ranked for ranked in answer.plans if ranked.plan.tp > 1][:2]
    assert any(ranked.plan.tp_overlap != NONE for ranked in cut)
    for ranked in cut:
        table = estimate_plans(
            Scenario(model=model, cluster=machine, workload=workload, runtime=answer.question.runtime),
            [replace(ranked.plan, tp_overlap=text) for text in EVERY],
        )
        account_s = ranked.estimate.step_s.value - ranked.estimate.breakdown_s["allocator"]
        assert account_s == pytest.approx(table.step_s.min(), rel=1e-9)


def test_what_modes_hide_adds_up_to_the_plan(monkeypatch):
    """Sites apart and together: at the same clocks the same seconds hidden, since no product is alongside two of
    them.
    """
    monkeypatch.setattr(account, "working_clocks", lambda *inputs: np.ones(len(inputs[-1].table)))
    model, machine, workload = load_model("llama3-8b"), make_cluster(1, 4), Workload(seq_len=4096, global_batch_size=8)
    runtime = resolve({"name": "meshwright"})[0]

    def cost(plans):
        return estimate_plans(Scenario(model=model, cluster=machine, workload=workload, runtime=runtime), plans)

    for text in ("attention_in=fused,attention_out=async,mlp_in=chunked,mlp_out=none", "fused"):
        plan = Plan(tp=4, sequence_parallel=True, tp_overlap=text)
        found = overlap_by_site(plan, cost)
        table = cost([replace(plan, tp_overlap=NONE), plan])

        assert [site.mode for site in found][:4] == list(modes_by_site(text))
        assert sum(site.hides_s for site in found) == pytest.approx(
            table.exposed_by_axis_s["tp"][0] - table.exposed_by_axis_s["tp"][1]
        )
    assert overlap_by_site(replace(plan, tp_overlap=NONE), cost) == ()


def test_modes_by_site_are_for_the_executor_that_has_them():
    """It runs them eagerly; compiled, or before latent attention, they are refused."""
    model, machine, workload = load_model("llama3-8b"), make_cluster(1, 4), Workload(seq_len=4096, global_batch_size=8)
    runtime = resolve({"name": "meshwright"})[0]
    plan = Plan(tp=4, sequence_parallel=True, tp_overlap="attention_in=fused,mlp_out=chunked")

    def illegal(model, runtime):
        problems = question_of(model, machine, workload, framework="meshwright", runtime=runtime).problems(plan)
        return {problem.rule for problem in problems if problem.grade is Grade.ILLEGAL}

    assert illegal(model, runtime) == set()
    assert "overlap-compile" in illegal(model, replace(runtime, compile=True))
    assert "overlap-latent" in illegal(load_model("deepseek-v3"), runtime)
