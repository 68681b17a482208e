"""Sentences of an answer against the plans that they are about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.explain.answer_text import may_fit_sentence
from planner.io.plan_words import differences_text
from planner.question.prediction import Method
from planner.question.question import question_of
from planner.search.result import MayFit, RankedPlan, places
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from tests.planner.conftest import LLAMA8B, make_cluster

PLAN = Plan(dp_shard=4, tp=2, pp=2, micro_batch_size=2, recompute="full", reshard_after_forward=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reshard_after_forward": False}, "no reshard after forward"),
        ({"micro_batch_size": 4}, "micro batch 4"),
        ({"recompute": "none"}, "recompute none"),
        ({"tp_overlap": "fused"}, "tp overlap fused"),
        ({"schedule": "GPipe"}, "GPipe schedule"),
        ({"placement": (*range(15, -1, -1),)}, "another order of GPUs"),
        ({"recompute": "none", "micro_batch_size": 1}, "micro batch 1, recompute none"),
    ],
)
def test_all_that_differs_is_named_and_nothing_else(changes, said):
    """What is said is computed from the two plans; the way back names the same fields with the first plan's values."""
    other = replace(PLAN, **changes)

    assert differences_text(PLAN, other) == said
    assert differences_text(other, PLAN) not in {"", said}
    assert differences_text(PLAN, PLAN) == differences_text(other, other) == ""


def test_a_faster_plan_that_may_fit_is_not_said_to_differ_where_it_does_not():
    """Both recompute nothing: resharding is what differs."""
    question = question_of(LLAMA8B, make_cluster(1, 2), Workload(seq_len=1024, global_batch_size=8))
    first, other = (Plan(dp_shard=2, reshard_after_forward=reshard) for reshard in (True, False))
    estimate = question.estimate([first]).estimate(0)
    best = RankedPlan(rank=1, plan=first, estimate=estimate, method=Method.ANALYTICAL, tie=1, fit_probability=1.0)
    found = MayFit(plan=other, estimate=estimate, method=Method.ANALYTICAL, fit_probability=0.7, faster=0.1)
    said = may_fit_sentence(found, best)

    assert said.startswith("The same with no reshard after forward would take 10% less time and is 70% likely to fit")
    assert "recompute" not in said


def test_ties_are_marked_where_they_begin_after_the_plan_before_them():
    question = question_of(LLAMA8B, make_cluster(1, 2), Workload(seq_len=1024, global_batch_size=8))
    estimate = question.estimate([Plan(dp_shard=2)]).estimate(0)
    ranked = [
        RankedPlan(rank=i, plan=PLAN, estimate=estimate, method=Method.ANALYTICAL, tie=tie, fit_probability=1.0)
        for i, tie in enumerate((1, 2, 2, 3), start=1)
    ]

    assert places(ranked) == ["1", "2", "3 =", "4"]


@pytest.mark.parametrize("flag", ["--model", "--cluster"])
@pytest.mark.parametrize("command", [("suggest",), ("suggest", "--task", "serve"), ("estimate",)])
def test_a_name_that_is_said_and_empty_is_no_default(planner, command, flag):
    refused = planner(*command, flag, "")

    assert refused.returncode == 2
    assert f"{flag} is empty" in refused.stderr


def test_an_estimate_says_on_which_gpus_its_ranks_run(planner):
    flags = ("--model", "llama3.2-1b", "--cluster", "dgx-h100", "--gpus", 2, "--global-batch", 2, "--seq-len", 1024)

    assert "order     ranks in the order of the GPUs" in planner("estimate", *flags).stdout


def test_retries_are_counted_in_words():
    memory = question_of(LLAMA8B, make_cluster(1, 2), Workload(seq_len=8192, global_batch_size=8)).estimate(
        [Plan(dp_shard=2, recompute="full")]
    )
    likely = replace(memory.estimate(0).memory, reserved_bytes=76 * 2.0**30, fits=True)

    assert "retried once a step" in replace(likely, retries_per_step=1).verdict
    assert "retried 3 times a step" in replace(likely, retries_per_step=3).verdict
