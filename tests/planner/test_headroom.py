"""How sure it is that a plan fits, and what would give it room: words from ranges, relatives from the same closed form."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest

from planner.question.question import default_runtime, question_of
from planner.search.headroom import find_headroom, memory_text
from planner.search.search import SearchOptions, suggest
from simulator.config.estimate import Fit, Interval, MemoryEstimate
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.legality.frameworks import TORCHTITAN
from tests.planner.conftest import make_cluster
from topology.cluster import Source

RUNTIME = default_runtime(TORCHTITAN)
WORKLOAD = Workload(seq_len=8192, global_batch_size=64)


@pytest.mark.parametrize(
    ("reserved", "fit"),
    [(50.0, Fit.YES), (72.0, Fit.YES), (73.0, Fit.LIKELY), (80.0, Fit.LIKELY), (88.0, Fit.UNLIKELY)],
)
def test_the_word_follows_from_the_range_and_the_limit(reserved, fit):
    """Of 80 bytes, predicted to -10 and +11 %: all of the range up to 72.1 fits, none of it from 88.9 on."""
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


@pytest.mark.parametrize(
    ("plan", "fit"),
    [
        (Plan(dp_shard=8, micro_batch_size=1, recompute="none", reshard_after_forward=True), Fit.LIKELY),
        (Plan(dp_shard=8, micro_batch_size=8, recompute="none", reshard_after_forward=False), Fit.NO),
        (Plan(dp_shard=8, micro_batch_size=1, recompute="full", reshard_after_forward=True), Fit.YES),
    ],
)
def test_room_is_given_by_the_quickest_relative_that_surely_fits(llama8b, plan, fit):
    cluster = make_cluster(1, 8)

    question = question_of(llama8b, cluster, WORKLOAD, framework=TORCHTITAN, runtime=RUNTIME)

    estimate = question.estimate([plan]).estimate(0)
    room = find_headroom(question, plan, estimate)
    relatives = [other for other in every_relative(plan) if question.legal(other)]
    table = question.estimate(relatives)
    sure = [table.estimate(row) for row in range(len(relatives)) if table.estimate(row).memory.fit is Fit.YES]

    assert estimate.memory.fit is fit
    if fit is Fit.YES:
        assert room is None
        return
    assert room.fit is Fit.YES
    assert room.step_s == pytest.approx(min(found.step_s.value for found in sure), rel=1e-12)
    again = question.estimate([room.plan]).estimate(0)
    assert room.headroom_bytes == again.memory.headroom_bytes > estimate.memory.headroom_bytes
    assert f"{room.change} leaves {room.headroom_bytes / 2**30:.1f} GiB" in memory_text(estimate, room)


def test_a_plan_that_nothing_helps_is_told_so(llama8b):
    """All recomputed, one sequence at a time, resharded: its room is another question."""
    cluster = make_cluster(1, 8, memory_gib=24)
    plan = Plan(dp_shard=8, micro_batch_size=1, recompute="full", reshard_after_forward=True)
    question = question_of(llama8b, cluster, WORKLOAD, framework=TORCHTITAN, runtime=RUNTIME)
    estimate = question.estimate([plan]).estimate(0)
    room = find_headroom(question, plan, estimate)

    assert estimate.memory.fit is not Fit.YES
    assert room is None
    assert "neither more recomputation nor smaller micro batches" in memory_text(estimate, room)


def test_an_answer_says_of_its_first_plan_what_would_give_room(llama8b):
    result = suggest(question_of(llama8b, make_cluster(1, 8), WORKLOAD), SearchOptions(simulate=False, top=3))
    first, *others = result.plans

    assert first.estimate.memory.fits
    assert first.estimate.memory.fit is Fit.LIKELY
    assert first.room.fit is Fit.YES
    assert [other.room for other in others] == [None, None]


def test_commands_say_how_sure_it_is(planner):
    flags = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", 8, "--seq-len", 8192)
    text = planner("estimate", *flags, "--dp-shard", 8, "--micro-batch", 1, "--recompute", "none").stdout
    document = json.loads(
        planner("estimate", *flags, "--dp-shard", 8, "--micro-batch", 1, "--recompute", "none", "--json").stdout
    )
    memory = document["estimate"]["memory"]

    assert "likely fits, but tight" in text
    assert "GiB" in text.split("likely fits")[1].split(";")[0]
    assert memory["fits"] is True
    assert memory["fit"] == "likely"
    assert (
        memory["reserved_low_bytes"]
        < memory["reserved_bytes"]
        < memory["capacity_bytes"]
        < memory["reserved_high_bytes"]
    )
    assert document["room"]["fit"] == "yes"


def test_a_plan_of_the_list_that_surely_fits_is_named_where_it_is_the_cheaper_way(planner):
    """Llama-2 13B on four nodes: to recompute costs the first plan more than another one of the list takes."""
    question = ("--model", "llama2-13b", "--cluster", "dgx-h100", "--gpus", 32, "--framework", "megatron-lm")
    document = json.loads(planner("suggest", *question, "--no-simulate", "--json").stdout)
    first, *others = document["plans"]
    sure = next(other for other in others if other["estimate"]["memory"]["fit"] == "yes")
    text = " ".join(planner("suggest", *question, "--no-simulate").stdout.split())

    assert first["estimate"]["memory"]["fit"] == "likely"
    assert sure["estimate"]["step_s"]["value"] < first["room"]["step_s"]
    assert f"; #{sure['rank']} leaves {sure['estimate']['memory']['headroom_bytes'] / 2**30:.1f} GiB" in text
