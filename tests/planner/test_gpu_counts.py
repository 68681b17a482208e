"""How many GPUs: several compared, the fewest that fit, and what stands in the way where none do."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache

import pytest

from planner.question.case_runtime import resolve_runtime
from planner.question.flags import Flags
from planner.question.goal import Goal
from planner.question.question import question_of
from planner.search import infeasible
from planner.search.answer import answer
from planner.search.deadline import NOT_SIMULATED, NOT_TRIED
from planner.search.gpu_counts import best_gpu_count, cost_per_million_tokens
from planner.search.infeasible import (
    ConstrainedQuestion,
    conflicting_constraints,
    minimal_gpus,
    relaxations,
)
from planner.search.plan_space import judged
from planner.search.plan_space.candidates import Bounds
from planner.search.search import SearchOptions, suggest
from planner.search.sizes import min_gpus_for_state, said_with_nodes
from planner.search.whole_run import RunAnswer, answer_run
from simulator.analytical.scenario import Scenario
from simulator.bounds.screening import Screening
from simulator.config.estimate import SURE, chance
from simulator.config.hf_config import load_model
from simulator.config.workload import Workload
from simulator.legality.frameworks import MEGATRON, TORCHTITAN
from tests.planner.conftest import LLAMA8B, make_cluster
from tests.planner.every_plan import leanest_gap
from topology.catalog.cluster_file import load_cluster
from topology.errors import Infeasible

TITAN = resolve_runtime({"name": "torchtitan"})[0]


def grown(n, **options):
    return make_cluster(1, n, **options) if n < 8 else make_cluster(n // 8, 8, **options)


def test_time_takes_more_gpus_and_cost_takes_those_that_pay():
    workload, model = Workload(seq_len=4096, global_batch_size=32), replace(LLAMA8B, layers=8)

    @cache
    def run(n):
        return suggest(
            question_of(model, grown(n), workload, gpus=n),
            SearchOptions(top=1, simulate=False, gpu_price_per_hour=2.0, bounds=Bounds(max_virtual_stages=1)),
        )

    quick = best_gpu_count(run, (2, 4, 8), objective="time")
    cheap = best_gpu_count(run, (2, 4, 8), objective="cost", gpu_price_per_hour=2.0)
    rows = {row.gpus: row for row in cheap.by_gpus}

    assert quick.plans[0].plan.gpus == min(rows.values(), key=lambda row: row.step_s).gpus
    assert cheap.plans[0].plan.gpus == min(rows.values(), key=lambda row: row.cost_per_million_tokens).gpus
    for row in rows.values():  # 2.0 an hour for each GPU, over the tokens of an hour
        tokens_per_hour = workload.tokens_per_step / row.step_s * 3600
        assert row.cost_per_million_tokens == pytest.approx(2.0 * row.gpus / tokens_per_hour * 1e6)
    assert cost_per_million_tokens(cheap.plans[0].estimate, None) is None


def test_when_the_time_is_over_one_count_has_been_tried_and_nothing_is_simulated(monkeypatch):
    monkeypatch.setattr(judged, "GRACE_S", 100.0)
    asked = []

    def run(n):
        asked.append(n)
        question = question_of(LLAMA8B, grown(n), Workload(seq_len=4096, global_batch_size=32), gpus=n)
        return suggest(question, SearchOptions(top=1, time_limit_s=0.0))

    found = best_gpu_count(run, (8, 16, 32), objective="time", deadline=0.0)

    assert asked == [8]
    assert [row.problem for row in found.by_gpus] == ["", NOT_TRIED, NOT_TRIED]
    assert found.search.simulated == 0
    assert NOT_SIMULATED in found.assumed


def test_a_count_without_a_plan_is_a_row_with_its_reason():
    def run(n):
        machine = grown(n, memory_gib=24)
        return suggest(
            question_of(LLAMA8B, machine, Workload(seq_len=4096, global_batch_size=8), gpus=n),
            SearchOptions(top=1, simulate=False, bounds=Bounds(max_pp=1, max_cp=1)),
        )

    found = best_gpu_count(run, (1, 8), objective="time")

    assert found.plans[0].plan.gpus == 8
    assert "does not fit" in found.by_gpus[0].problem
    with pytest.raises(Infeasible):
        best_gpu_count(run, (1, 2), objective="time")


@pytest.mark.parametrize("gib", [12, 24, 40, 80])
def test_the_fewest_are_the_fewest_of_all_counts(gib):
    """Every smaller number of GPUs is asked, not bisected: whether a count fits need not be monotone."""
    workload = Workload(seq_len=4096, global_batch_size=24)
    count, machine, proof = minimal_gpus(
        question_of(LLAMA8B, make_cluster(1, 8, memory_gib=gib), workload, framework=TORCHTITAN, runtime=TITAN),
        grow=lambda n: grown(n, memory_gib=gib),
    )

    assert machine.gpu_count == count
    assert leanest_gap(question_of(LLAMA8B, machine, workload, framework=TORCHTITAN, runtime=TITAN, gpus=count)) <= 0
    for fewer in [n for n in range(1, count) if n < 8 or n % 8 == 0]:
        assert (
            leanest_gap(
                question_of(
                    LLAMA8B, grown(fewer, memory_gib=gib), workload, framework=TORCHTITAN, runtime=TITAN, gpus=fewer
                )
            )
            > 0
        )
    assert proof


def test_the_fewest_surely_fit_and_fewer_are_said_with_their_chance():
    """On every smaller number of GPUs the search itself finds no plan, or none that surely fits."""
    bounds = Bounds(max_virtual_stages=1).fixing(pp=((1, 1),), cp=((1, 1),))
    options = SearchOptions(top=1, bounds=bounds, simulate=False)
    flags = Flags(model="llama3-8b", cluster="dgx-h100", gpus=(), seq_len=8192, global_batch=24)
    found = answer(flags, "torchtitan", options)
    fewest = found.plans[0].plan.gpus
    rows = {row.gpus: row for row in found.by_gpus}

    assert found.plans[0].fit_probability >= SURE
    assert rows.pop(fewest).fit_probability == found.plans[0].fit_probability
    assert any(row.fit_probability for row in rows.values())
    for fewer in range(1, fewest):
        try:
            alone = answer(replace(flags, gpus=(fewer,)), "torchtitan", replace(options, reasons=False)).plans[0]
        except Infeasible:
            assert fewer not in rows or rows[fewer].problem
        else:
            assert alone.fit_probability < SURE
            assert rows[fewer].fit_probability == alone.fit_probability
            said = f"{fewer} GPUs may do, {chance(alone.fit_probability)} likely"
            assert any(said in line for line in found.assumed)


def test_a_cluster_that_states_its_nodes_has_no_more_of_them():
    """Its fewest are among its own GPUs, what is missing on all of them is said, and a larger one that fits."""
    options = SearchOptions(top=1, simulate=False, flips=False)
    flags = Flags(model="llama3-8b", cluster="2xA100-40GB", gpus=(), seq_len=4096, global_batch=16)
    with pytest.raises(Infeasible) as of_fewest:
        answer(flags, "torchtitan", options)
    with pytest.raises(Infeasible) as of_all:
        answer(replace(flags, gpus=(2,)), "torchtitan", options)
    larger = re.search(r"--cluster (\S+),", str(of_fewest.value.remedy))

    assert (of_fewest.value.what, of_fewest.value.why) == (of_all.value.what, of_all.value.why)
    assert larger is not None
    assert answer(replace(flags, cluster=larger[1], gpus=None), "torchtitan", options).plans[0].fit_probability > 0
    with pytest.raises(Infeasible, match="takes 64 GPUs"):
        seek("8xA100-40GB", deadline_s=30 * 86400.0)
    assert max(run.gpus for run in seek("3x2xA100", budget=1e9, gpu_price_per_hour=2.0).curve) == 6


def seek(cluster: str, **goal: float) -> RunAnswer:
    """Return the number of GPUs for 1T tokens."""
    bounds = Bounds(max_virtual_stages=1, max_micro_batch=1).fixing(pp=((1, 1),), cp=((1, 1),))
    flags = Flags(model="llama3-8b", cluster=cluster)
    wanted = Goal(tokens=1e12, **goal)
    return answer_run(flags, "torchtitan", SearchOptions(top=1, bounds=bounds, simulate=False, reasons=False), wanted)


def test_state_alone_needs_as_many_gpus_as_its_bytes_say():
    """405B at 12 bytes a parameter (float32 and two moments) over 78.5 GiB a GPU: 58.2, so 59 (hand calculation)."""
    model = load_model("llama3-405b")
    screening = Screening(
        Scenario(
            model=model, cluster=make_cluster(1, 8), workload=Workload(seq_len=8192, global_batch_size=8), runtime=TITAN
        )
    )

    assert min_gpus_for_state(screening) == -(-model.parameters * 12 // (78.5 * 2**30)) == 58


def asked(model, gib, workload, framework=TORCHTITAN, bounds=None, gpus=8, runtime=TITAN):
    machine = make_cluster(1, gpus, memory_gib=gib)
    question = question_of(model, machine, workload, framework=framework, runtime=runtime)
    return ConstrainedQuestion(question=question, bounds=bounds or Bounds())


def test_a_constraint_is_in_conflict_if_there_is_a_plan_without_it():
    """Recomputation ruled out by a flag is what stands in the way, and the way out; the sequence is not."""
    question = asked(
        LLAMA8B,
        24,
        Workload(seq_len=8192, global_batch_size=8),
        bounds=Bounds(stated={"recompute": ("none",)}, max_tp=1),
    )
    kept = conflicting_constraints(question)

    assert question.gap() > 0
    assert "the limits given by flags" in kept
    assert kept[:2] == ["8 GPUs", "24.0 GiB on each"]
    offers = list(relaxations(question, None))
    assert offers
    assert not any("--gpus" in offer for offer in offers if "nearest" not in offer)


def test_advice_ends_with_the_time_limit(monkeypatch):
    """What is missing is said all the same, and that no more was tried."""
    monkeypatch.setattr(infeasible, "LEAST_ADVICE_S", 0.0)
    bounds = Bounds(max_pp=1, max_cp=1)
    question = asked(LLAMA8B, 24, Workload(seq_len=4096, global_batch_size=2), bounds=bounds, gpus=2)
    nodes = question.nodes()
    late, whole = (
        infeasible.no_fitting_plan(question.question, nodes, bounds, deadline=deadline) for deadline in (0.0, None)
    )

    assert "the time limit ended before more was tried" in late.remedy
    assert "time limit" not in whole.remedy
    assert late.why.partition("In conflict")[0] == whole.why.partition("In conflict")[0]


def test_state_too_large_leaves_gpus_and_memory_in_conflict():
    question = asked(load_model("llama3-405b"), 80, Workload(seq_len=4096, global_batch_size=8))

    assert conflicting_constraints(question) == ["8 GPUs", "80.0 GiB on each"]


def test_sharding_is_offered_where_the_framework_has_more_of_it():
    """Megatron-LM searched with its distributed optimizer: ZeRO-3 of the same framework fits where that does not."""
    megatron = resolve_runtime({"name": "megatron-lm"})[0]
    alone = replace(MEGATRON, axes=frozenset())  # data parallel and nothing else
    question = asked(LLAMA8B, 40, Workload(seq_len=512, global_batch_size=8), framework=alone, runtime=megatron)
    offers = " ".join(relaxations(question, None))

    assert question.gap() > 0
    assert "sharding of parameters and gradients" in offers


def test_the_command_compares_counts(planner):
    question = ("suggest", "--seq-len", "4096", "--model", "llama3-8b", "--pp", "1", "--no-simulate", "--top", "1")
    document = json.loads(
        planner(*question, "--gpus", "4,8", "--gpu-price", "2.5", "--objective", "cost", "--json").stdout
    )

    assert [row["gpus"] for row in document["by_gpus"]] == [4, 8]
    assert document["plans"][0]["cost_per_million_tokens"] == min(
        r["cost_per_million_tokens"] for r in document["by_gpus"]
    )
    text = planner(*question, "--gpus", "4,8", "--gpu-price", "2.5").stdout
    assert "cost / M tokens" in text
    assert planner(*question, "--gpus", "4,").returncode == 2
    assert planner("suggest", "--task", "finetune").returncode == 2


def test_flags_that_pin_a_policy_hold(planner):
    policies = ("--micro-batch", "2", "--recompute", "full")
    document = json.loads(planner("suggest", *policies, "--gpus", "8", "--pp", "1", "--no-simulate", "--json").stdout)

    assert {(p["plan"]["micro_batch_size"], p["plan"]["recompute"]) for p in document["plans"]} == {(2, "full")}
    wrong = planner("suggest", "--recompute", "everything", "--gpus", "8")
    assert wrong.returncode in {2, 3}


@pytest.mark.parametrize(
    "said", ["2x8xa100-sxm-80gb", "2x8xh100-sxm@100GbE", "2x4xl40s@2x25GbE-TCP", "2x8xh100-sxm@4x200G", "2xaws-p5"]
)
def test_a_larger_cluster_is_said_in_the_same_words(said):
    """The words of a remedy are read as the same machines with the same network."""
    grown = said_with_nodes(load_cluster(said), 3)
    now, then = load_cluster(said), load_cluster(grown)

    assert grown.startswith("3x")
    assert (then.node_count, then.fabric) == (3, now.fabric)
    assert replace(then.groups[0].node, name="") == replace(now.groups[0].node, name="")


def test_no_words_say_more_of_a_machine_that_was_probed():
    assert said_with_nodes(load_cluster("h200x4"), 2) == ""
