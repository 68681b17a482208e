"""Text for people: arithmetic, units, narrow terminals, and names that try to be clever."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from planner.explain.answer_text import print_search
from planner.explain.tables import flip_text
from planner.io.plan_words import approach_text, degrees_text, policy_text
from planner.io.printable import printable
from planner.question.question import question_of
from planner.search.flips import FlipPoint
from planner.search.search import SearchOptions, suggest
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from tests.planner.conftest import LLAMA8B, make_cluster


@pytest.fixture(scope="module")
def result():
    return suggest(
        question_of(
            replace(LLAMA8B, layers=8),
            make_cluster(2, 2),
            Workload(seq_len=4096, global_batch_size=8),
            framework="megatron-lm",
        ),
        SearchOptions(top=4),
    )


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(dp_shard=4, tp=8), "32 = dp 1 x fsdp 4 x tp 8 x pp 1"),
        (Plan(dp_replicate=4, zero_stage=1, tp=2, pp=2), "16 = dp 4 (ZeRO-1) x tp 2 x pp 2"),
        (Plan(dp_shard=2, cp=4), "8 = dp 1 x fsdp 2 x cp 4 x tp 1 x pp 1"),
        (Plan(dp_replicate=2, dp_shard=4, zero_stage=3), "8 = dp 2 (ZeRO-3) x fsdp 4 x tp 1 x pp 1"),
    ],
)
def test_the_label_is_the_product(plan, text):
    assert degrees_text(plan) == text


def test_the_policy_says_what_is_beside_the_degrees():
    plan = Plan(
        tp=2, pp=2, ep=4, schedule="Interleaved1F1B", virtual_stages=3, sequence_parallel=True, recompute="full"
    )

    assert policy_text(plan) == "ep 4, micro batch 1, recompute full, sp, Interleaved1F1B x3"


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(), "one GPU"),
        (Plan(dp_shard=8), "FSDP over 8 GPUs"),
        (Plan(dp_replicate=8, zero_stage=1), "ZeRO-1 over 8 GPUs"),
        (Plan(dp_replicate=8), "DDP over 8 GPUs"),
        (Plan(pp=4), "a pipeline of 4 stages on 4 GPUs"),
        (Plan(dp_replicate=2, dp_shard=4), "2 replicas of FSDP over 4 on 8 GPUs"),
        (
            Plan(dp_shard=64, tp=8, pp=4),
            "FSDP over 64 with tensor parallelism over 8 and a pipeline of 4 on 2,048 GPUs",
        ),
    ],
)
def test_a_plan_is_named_as_a_person_would(plan, text):
    assert approach_text(plan) == text


def test_flips_carry_decimal_rates_and_binary_memory():
    link = FlipPoint(quantity="network per GPU", now=50e9, at=31e9, unit="bytes_per_s", wins="below")
    memory = FlipPoint(quantity="memory per GPU", now=80 * 2.0**30, at=96 * 2.0**30, unit="bytes", wins="above")

    assert flip_text(link) == "beats #1 if network per GPU < 31 GB/s (now 50)"
    assert flip_text(memory) == "beats #1 if memory per GPU > 96 GiB (now 80)"


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_is_wider_than_the_terminal(result, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    print_search(result, out=None)
    lines = capsys.readouterr().out.splitlines()

    assert max(map(len, lines)) <= width
    assert sum(bool(re.match(r"[1-4] ", line)) for line in lines) == len(result.plans)
    assert "tok/s/GPU" in "".join(lines)
    assert "GiB" in "".join(lines)
    assert "\x1b" not in "".join(lines)


def test_odd_names_are_printed_not_obeyed(result, capsys, monkeypatch):
    """Markup, escape sequences and newlines in a model's name reach the terminal as text."""
    monkeypatch.setenv("COLUMNS", "200")
    name = '[red]"; rm -rf ~ #\x1b[2J\r[link=http://x]'
    print_search(
        replace(result, question=replace(result.question, model=replace(result.question.model, name=name))), out=None
    )
    out = capsys.readouterr().out

    assert "\x1b" not in out
    assert "\r" not in out
    assert '[red]"; rm -rf ~ #\\x1b[2J\\r[link=http://x]' in out


def test_printable_keeps_text_and_newlines():
    assert printable("a\nb\tc\x07\u202e") == "a\nb\\tc\\x07\\u202e"


@pytest.mark.parametrize("columns", [50, 60, 80])
def test_the_table_of_plans_says_its_plans_on_a_screen_of_any_width(result, monkeypatch, capsys, columns):
    """Fewer columns on a narrow screen, and none of them folded letter by letter."""
    monkeypatch.setenv("COLUMNS", str(columns))
    print_search(result, out=None)
    lines = capsys.readouterr().out.splitlines()
    number = next(number for number, line in enumerate(lines) if line.startswith("#"))

    assert max(map(len, lines)) <= columns
    assert "plan" in lines[number]
    assert "GiB" in lines[number]
    assert ("MFU" in lines[number]) == (columns >= 80)
    assert re.match(r"1 (= )?\s*(dp|tp|pp) \d", lines[number + 1])
