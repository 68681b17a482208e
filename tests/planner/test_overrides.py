"""Flags given with a saved plan or a case change it, and the answer says what they changed; or they are refused."""

from __future__ import annotations

import json

import pytest

from planner.cli import main

MACHINE = ("--cluster", "dgx-h100", "--gpus", "16", "--global-batch", "16")
CASE = {
    "id": "asked",
    "model": "llama3-8b",
    "cluster": "dgx-h100",
    "workload": {"seq_len": 4096, "global_batch_size": 64},
    "plan": {"dp_shard": 8, "micro_batch_size": 1, "recompute": "none"},
    "runtime": {"name": "torchtitan"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A plan of 16 GPUs, saved by suggest: full sharding alone."""
    path = tmp_path_factory.mktemp("plans") / "a.json"
    narrow = ("--max-tp", "1", "--dp-shard", "16", "--micro-batch", "1", "--recompute", "none", "--no-simulate")
    assert main(["suggest", *MACHINE, *narrow, "--out", str(path)]) == 0
    assert json.loads(path.read_text())["plan"]["dp_shard"] == 16
    return path


def asked(planner, *arguments):
    return json.loads(planner("estimate", *arguments, "--json").stdout)


def test_a_changed_plan_costs_what_the_same_plan_by_flags_costs(planner, saved):
    plain = asked(planner, "--plan", saved)
    changed = asked(planner, "--plan", saved, "--tp", "2", "--seq-len", "4096", "--recompute", "full")
    stated = ("--tp", "2", "--dp-shard", "8", "--micro-batch", "1", "--recompute", "full", "--reshard")
    by_flags = asked(planner, *MACHINE, "--seq-len", "4096", *stated)

    assert plain["changed"] == []
    assert {"tp 1 -> 2", "dp_shard 16 -> 8", "seq_len 8192 -> 4096", "recompute none -> full"} <= set(
        changed["changed"]
    )
    assert changed["estimate"]["breakdown_s"] != plain["estimate"]["breakdown_s"]
    assert changed["plan"] == by_flags["plan"]
    assert changed["estimate"] == by_flags["estimate"]


def test_what_is_said_again_changes_nothing(planner, saved):
    again = asked(planner, "--plan", saved, "--tp", "1", "--seq-len", "8192", "--runtime", "torchtitan")

    assert again["changed"] == []
    assert again["estimate"] == asked(planner, "--plan", saved)["estimate"]


def test_text_says_what_was_changed(planner, saved):
    assert "changed: seq_len 8192 -> 4096" in planner("estimate", "--plan", saved, "--seq-len", "4096").stdout


def test_a_pipeline_gets_a_schedule_and_loses_it(planner, saved, tmp_path):
    """What only fits the plan as it was follows, and is listed."""
    piped = asked(planner, "--plan", saved, "--pp", "2")
    assert {"pp 1 -> 2", "dp_shard 16 -> 8", "schedule none -> 1F1B"} <= set(piped["changed"])

    file = tmp_path / "case.json"
    file.write_text(json.dumps(CASE | {"plan": {"dp_shard": 2, "pp": 4, "virtual_stages": 2, "micro_batch_size": 1}}))
    flat = asked(planner, "--case", file, "--pp", "1")
    assert {"pp 4 -> 1", "virtual_stages 2 -> 1", "dp_shard 2 -> 8", "schedule Interleaved1F1B -> none"} <= set(
        flat["changed"]
    )
    assert not any(line.startswith("schedule") for line in flat["assumed"])


def test_every_case_of_a_list_is_changed(planner, tmp_path):
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([CASE, CASE | {"id": "other"}]))

    for answer in asked(planner, "--case", file, "--no-compile", "--global-batch", "32"):
        assert answer["changed"] == ["global_batch_size 64 -> 32"]
        assert answer["runtime"]["compile"] is False


def test_explain_and_trace_answer_the_changed_plan(planner, saved, tmp_path):
    small = ("--model", "tiny-llama", "--cluster", "dgx-h100", "--gpus", "4", "--global-batch", "4", "--dp-shard", "4")
    assert planner("suggest", *small, "--no-simulate", "--out", tmp_path / "small.json").returncode == 0
    fewer = json.loads(planner("explain", tmp_path / "small.json", "--gpus", "2", "--no-flips", "--json").stdout)
    assert fewer["question"]["gpus"] == 2
    assert fewer["changed"] == ["gpus 4 -> 2", "dp_shard 4 -> 2"]

    shorter = ("trace", "--plan", saved, "--seq-len", "1024", "--json")
    drawn = json.loads(planner(*shorter, "--out", tmp_path / "a.trace").stdout)
    assert drawn["changed"] == ["seq_len 8192 -> 1024"]
    assert drawn["step_s"] < asked(planner, "--plan", saved)["estimate"]["step_s"]["value"]


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--runtime", "megatron-lm"), 2, "cannot be changed to megatron-lm"),
        (("--model", "llama3-70b"), 1, "model"),
        (("--gpu", "h200-sxm"), 2, "--cluster"),
        (("--gpus", "20"), 2, "cannot be extended to 20"),
        (("--param-dtype", "float8"), 3, ""),
        (("--dp-shard", "4"), 3, ""),
    ],
)
def test_what_cannot_be_changed_is_refused(planner, saved, flags, code, words):
    done = planner("estimate", "--plan", saved, *flags)

    assert done.returncode == code, done.stderr
    assert words in done.stderr
