"""How sure it is that a plan fits, and what would make it fit, cheapest first."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import product

import pytest

from planner.explain import plan_answer
from planner.io.figures import interval_text
from planner.question.cases import case_from_flags
from planner.question.flags import Flags
from planner.question.prediction import predict
from planner.question.question import default_runtime, question_of
from planner.search.finalists import Finalist
from planner.search.fixes import find_fixes, memory_text
from planner.search.other_batch import other_batch
from planner.search.plan_space.candidates import Bounds
from planner.search.search import SearchOptions, suggest
from simulator.config.estimate import SLIGHT, SURE, Fit, Interval, MemoryEstimate
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.legality.frameworks import TORCHTITAN
from simulator.legality.rules import legal_ones
from tests.planner.conftest import make_cluster
from topology.cluster import Source

RUNTIME = default_runtime(TORCHTITAN)
WORKLOAD = Workload(seq_len=8192, global_batch_size=64)


@pytest.mark.parametrize(
    ("reserved", "fit"),
    [(50.0, Fit.YES), (69.9, Fit.YES), (70.1, Fit.LIKELY), (80.0, Fit.LIKELY), (91.0, Fit.UNLIKELY)],
)
def test_the_word_follows_from_the_range_and_the_limit(reserved, fit):
    """Of 80 bytes, predicted to -10 and +11 % in 80 of 100 cases: 95 of 100 fit up to 80 / 1.11^(1.645/1.282) =
    69.97.
    """
    peak = Interval(value=0.9 * reserved, low=0.81 * reserved, high=0.9 * 1.11 * reserved, source=Source.DATASHEET)
    memory = MemoryEstimate(
        peak_bytes=peak, reserved_bytes=reserved, by_category={}, worst_rank=0, capacity_bytes=80.0, fits=reserved <= 80
    )
    worse = replace(memory, reserved_bytes=2 * reserved, fits=2 * reserved <= 80)

    assert memory.fit is fit
    assert memory.fits == (fit in {Fit.YES, Fit.LIKELY})
    assert (memory.reserved_low_bytes, memory.reserved_high_bytes) == pytest.approx((0.9 * reserved, 1.11 * reserved))
    assert memory.headroom_bytes == 80 - reserved
    assert worse.fit is Fit.NO  # derived anew, never carried over


def every_relative(plan):
    """Return all that recomputation, micro batches and resharding can make of a plan, itself included."""
    words = TORCHTITAN.recomputes[TORCHTITAN.recomputes.index(plan.recompute) :]
    sizes = [size for size in range(1, plan.micro_batch_size + 1) if plan.micro_batch_size % size == 0]
    reshards = (
        {plan.reshard_after_forward, True} if plan.reshard_after_forward is False else {plan.reshard_after_forward}
    )
    return [
        replace(plan, recompute=word, micro_batch_size=size, reshard_after_forward=reshard)
        for word, size, reshard in product(words, sizes, reshards)
    ]


def test_rules_say_of_many_plans_what_they_say_of_each(llama8b):
    question = question_of(llama8b, make_cluster(1, 8), WORKLOAD, framework=TORCHTITAN, runtime=RUNTIME)
    plans = every_relative(Plan(dp_shard=8, micro_batch_size=8, recompute="none", reshard_after_forward=False))
    plans += [replace(plan, tp=tp, dp_shard=8 // tp) for plan in plans for tp in (2, 3, 8)]
    plans += [replace(plans[0], dp_shard=0), replace(plans[0], placement=(0,) * 8), replace(plans[0], zero_stage=7)]
    one_by_one = [question.legal(plan) for plan in plans]

    assert legal_ones(plans, question.facts()) == one_by_one
    assert len(set(one_by_one)) == 2
    assert legal_ones([], question.facts()) == []


@pytest.mark.parametrize(
    ("plan", "fit"),
    [
        (Plan(dp_shard=8, micro_batch_size=1, recompute="none", reshard_after_forward=True), Fit.LIKELY),
        (Plan(dp_shard=8, micro_batch_size=8, recompute="none", reshard_after_forward=False), Fit.NO),
        (Plan(dp_shard=8, micro_batch_size=1, recompute="full", reshard_after_forward=True), Fit.YES),
    ],
)
def test_fixes_are_in_the_order_of_what_they_cost_and_none_is_cheaper(llama8b, plan, fit):
    """A person pays time on the same GPUs first, then GPUs, then precision. Every relative by recomputation, micro
    batch and resharding that surely fits takes at least as long as the first.
    """
    question = question_of(llama8b, make_cluster(1, 8), WORKLOAD, framework=TORCHTITAN, runtime=RUNTIME)
    estimate = predict(question, plan).estimate
    fixes = find_fixes(question, plan, estimate)

    assert find_fixes(question, plan, estimate, deadline=time.monotonic()) == ()
    relatives = [other for other in every_relative(plan) if question.legal(other)]
    table = question.estimate(relatives)
    sure = [one for one in map(table.estimate, range(len(relatives))) if one.memory.fit is Fit.YES]

    assert estimate.memory.fit is fit
    if fit is Fit.YES:
        assert fixes == ()
        return
    paid = [(one.param_dtype != RUNTIME.param_dtype, one.plan.gpus, one.step_s) for one in fixes]
    assert paid == sorted(paid)
    assert paid[0][:2] == (False, plan.gpus)
    assert {(True, plan.gpus), (False, 16)} <= {one[:2] for one in paid}
    assert all(one.fit_probability > 0.9 for one in fixes)
    assert fixes[0].step_s <= min(found.step_s.value for found in sure) * 1.02
    for one in fixes:
        runtime = replace(question.runtime, compile=one.compiled, param_dtype=one.param_dtype)
        asked = replace(question, runtime=runtime, gpus=one.plan.gpus)
        asked = replace(asked, cluster=make_cluster(max(1, one.plan.gpus // 8), 8))
        again = predict(asked, one.plan).estimate
        assert again.step_s.value == pytest.approx(one.step_s)
        assert one.longer == pytest.approx(one.step_s / estimate.step_s.value - 1)
        assert one.slower == pytest.approx((1 + one.longer) * one.plan.gpus / plan.gpus - 1)
        assert again.memory.headroom_bytes == one.headroom_bytes > estimate.memory.headroom_bytes
        assert one.change in memory_text(estimate, fixes, plan.gpus)


def test_another_node_is_offered_where_the_plan_has_to_change_for_it(llama8b):
    """From two nodes to three the degrees cannot grow by a whole factor: the plan there is the search's own."""
    question = question_of(llama8b, make_cluster(2, 8, memory_gib=24), Workload(seq_len=8192, global_batch_size=48))
    plan = Plan(dp_shard=16, recompute="none")
    estimate = predict(question, plan).estimate
    fixes = find_fixes(question, plan, estimate)
    more = next(one for one in fixes if one.plan.gpus > 16)

    assert estimate.memory.fit is Fit.NO
    assert more.plan.gpus == 24
    assert more.change.startswith("24 GPUs (")
    assert "throughput a GPU" in memory_text(estimate, fixes, 16)
    assert more.fit is Fit.YES


def test_the_number_is_told_before_what_would_make_it_fit_is_looked_for(monkeypatch):
    said = []

    def looked_for(_question, _plan, estimate, _deadline):
        (line,) = said
        assert line.startswith(f"{interval_text(estimate.step_s)} a step, does not fit: ")
        return ()

    monkeypatch.setattr(plan_answer, "find_fixes", looked_for)
    flags = Flags(model="llama3-8b", cluster="dgx-h100", plan={"dp_shard": 8, "micro_batch_size": 8}, global_batch=64)
    found = plan_answer.answer_plan(case_from_flags(flags), progress=said.append)

    assert found.estimate.memory.fit is Fit.NO
    assert len(said) == 1


def test_a_plan_that_nothing_helps_is_told_so(llama8b):
    """A model of 8B on one GPU of 24 GiB: its state alone is five times as much."""
    question = question_of(llama8b, make_cluster(1, 1, memory_gib=24), Workload(seq_len=512, global_batch_size=1))
    plan = Plan(micro_batch_size=1, recompute="full")
    estimate = predict(question, plan).estimate
    fixes = find_fixes(question, plan, estimate)

    assert estimate.memory.fit is Fit.NO
    assert not any(one.fit is Fit.YES for one in fixes)
    assert "nothing tried" in memory_text(estimate, fixes, plan.gpus)


def test_the_first_plan_surely_fits_and_what_a_faster_one_would_gain_is_said(llama8b):
    options = SearchOptions(top=3, bounds=Bounds(max_pp=1))
    result = suggest(question_of(llama8b, make_cluster(1, 8), WORKLOAD), options)
    first, may_fit = result.plans[0], result.may_fit

    assert first.fit_probability >= SURE
    assert first.fixes == ()
    assert SLIGHT <= may_fit.fit_probability < SURE
    assert may_fit.estimate.step_s.value == pytest.approx(first.estimate.step_s.value * (1 - may_fit.faster))
    assert may_fit.faster > 0


def test_a_batch_that_the_gpus_divide_is_named_where_it_is_faster():
    """Asked for, the named batch has the named plan and gain, and nothing more to gain."""
    bounds = Bounds(max_tp=1, max_cp=1, max_pp=1, max_micro_batch=1)
    workload = Workload(seq_len=2048, global_batch_size=16)
    question = question_of(load_model("llama3.2-1b"), make_cluster(1, 6), workload)
    piped = Plan(dp_shard=2, pp=3)
    best = Finalist(plan=piped, estimate=predict(question, piped).estimate)
    named = other_batch(question, bounds, best, None)
    other = replace(question, workload=replace(workload, global_batch_size=named.global_batch_size))
    first = suggest(other, SearchOptions(top=1, bounds=bounds, reasons=False)).plans[0]
    faster = Finalist(plan=first.plan, estimate=first.estimate)

    assert named.global_batch_size == 18
    assert named.plan == first.plan
    rates = [one.tokens_per_s_per_gpu for one in (first.estimate, best.estimate)]
    assert named.gain == pytest.approx(rates[0] / rates[1] - 1)
    assert other_batch(other, bounds, faster, None) is None


def test_commands_say_how_sure_it_is(planner):
    flags = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", 8, "--seq-len", 8192)
    text = planner("estimate", *flags, "--dp-shard", 8, "--micro-batch", 1, "--recompute", "none").stdout
    document = json.loads(
        planner("estimate", *flags, "--dp-shard", 8, "--micro-batch", 1, "--recompute", "none", "--json").stdout
    )
    memory = document["estimate"]["memory"]

    probability = document["fit_probability"]

    assert f"{5 * round(20 * probability)}% likely to fit" in text
    assert memory["fits"] is True
    assert memory["fit"] == "likely"
    assert (
        memory["reserved_low_bytes"]
        < memory["reserved_bytes"]
        < memory["capacity_bytes"]
        < memory["reserved_high_bytes"]
    )
    assert 0.5 < probability < SURE
    assert "yes" in {one["fit"] for one in document["fixes"]}
