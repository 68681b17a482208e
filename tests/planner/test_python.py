"""`planner` from Python: what the functions answer is what the commands print, and what they refuse says why."""

from __future__ import annotations

import doctest
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import planner as package
from planner import check, errors, estimate, load_plan, shard, suggest
from planner.requests.flag import flags_of, from_keywords, shell_line, value_of
from planner.requests.known import request_of
from simulator.config.plan import PLAN_FIELDS, Plan

ROOT = Path(__file__).parents[2]
SMALL = {"model": "tiny-llama", "cluster": "h200x4", "seq_len": 4096, "global_batch": 8}
DEFAULTS = {field.name: field.default for field in fields(Plan)}
COMMANDS = ("suggest", "estimate", "explain", "trace", "apply", "tune", "validate", "check", "shard", "calibrate")


def printed(run, command: str, *arguments: object, **flags: Any) -> Any:
    """Return the JSON that a command prints for the same flags."""
    words = [word for name, value in flags.items() for word in flags_of(request_of(command))[name].words(value)]
    return json.loads(run(command, *arguments, *words, "--json").stdout)


def plain(answer: Any) -> Any:
    """Return the document of an answer as JSON has it, without how long it took."""
    document = json.loads(json.dumps(answer.to_dict() if hasattr(answer, "to_dict") else answer))
    if "search" in document:
        document["search"]["seconds"] = None
    return document


def test_what_the_package_says_of_itself_is_true():
    assert doctest.testmod(package).failed == 0


@pytest.mark.parametrize(
    "flags", [{"tp": "1,2", "pp": 1, "simulate": False, "top": 3}, {"task": "serve", "isl": 64, "osl": 8}]
)
def test_suggest_is_the_command(planner, flags):
    about = SMALL if "task" not in flags else {"model": "llama3.2-1b", "cluster": "h200x4", "gpus": 1}

    assert plain(suggest(**about, **flags)) == plain(printed(planner, "suggest", **about, **flags))


def test_estimate_is_the_command(planner):
    flags = {**SMALL, "tp": 2, "micro_batch": 1, "recompute": "full", "runtime": "torchtitan@0.2.2"}

    assert plain(estimate(**flags)) == plain(printed(planner, "estimate", **flags))


def test_a_suggested_plan_stated_by_flags_is_estimated_as_it_was_listed():
    """Flags state all that distinguishes the listed plans: of two A10 the fastest keep gathered parameters."""
    about = {"model": "tiny-llama", "cluster": "2xA10", "seq_len": 512, "global_batch": 8}
    flags = {known.name: known.parameter for known in PLAN_FIELDS.values() if known.flag}
    narrow = {"dp_shard": 2, "recompute": "none", "micro_batch": "2,4", "all_variants": True, "simulate": False}
    listed = suggest(**about, framework="torchtitan", top=4, **narrow).result.plans

    assert {one.plan.reshard_after_forward for one in listed} >= {True, False}
    for one in listed:
        said = {flags[name]: value for name in flags if (value := getattr(one.plan, name)) != DEFAULTS[name]}
        again = estimate(**about, runtime="torchtitan", **{"recompute": "none", **said})

        assert again.figures.memory.reserved_bytes == one.estimate.memory.reserved_bytes
        assert again.figures.step_s.value == pytest.approx(
            one.estimate.step_s.value, rel=0.01
        )  # simulated, and counted


def test_check_and_shard_are_the_commands(planner):
    file, cases = ROOT / "examples/check/deepspeed_zero3_auto.json", ROOT / "examples/sharding/layer.json"
    line = "torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --bf16"
    flags = {"model": "qwen2.5-7b", "seq_len": 2048, "launch": line, "search": False}

    assert plain(check(file, **flags)) == plain(printed(planner, "check", file, **flags))
    assert plain(shard(cases)) == plain(printed(planner, "shard", cases))


def test_a_suggested_plan_is_saved_loaded_and_changed(tmp_path):
    path = tmp_path / "plan.json"
    found = suggest(**SMALL, tp=2, pp=1, simulate=False)
    found.save(path)

    assert isinstance(found.best.plan, Plan)
    assert load_plan(path).plan == found.best.plan == estimate(plan=path).plan
    assert estimate(plan=path, recompute="full").plan.recompute == "full"
    with pytest.raises(errors.BadInput, match="exists"):
        found.save(path)


@pytest.mark.parametrize(
    ("answer", "flags"),
    [
        (suggest, {**SMALL, "tp": 2, "pp": 1, "simulate": False}),
        (estimate, {**SMALL, "tp": 2, "micro_batch": 1}),
        (suggest, {"task": "serve", "model": "tiny-llama", "cluster": "h200x4", "gpus": 1, "isl": 64, "osl": 8}),
        (estimate, {"task": "serve", "model": "tiny-llama", "cluster": "h200x4", "gpus": 1, "isl": 64, "osl": 8}),
    ],
)
def test_a_file_that_is_asked_for_is_written_or_refused(tmp_path, answer, flags):
    """Every flag of a command that names a file, from Python."""
    asked = [flag.name for flag in flags_of(request_of(answer.__name__)).values() if flag.writes]
    assert "out" in asked
    for name in asked:
        path = tmp_path / f"{name}.json"
        if name != "out":  # drawn by the command
            with pytest.raises(errors.UserError, match=f"{name} is how the command prints"):
                answer(**flags, **{name: path})
            continue
        answer(**flags, **{name: path})

        assert estimate(plan=path).legal
        with pytest.raises(errors.UserError, match=r"exists|there already"):
            answer(**flags, **{name: path})


def test_a_list_of_cases_is_answered_one_by_one(tmp_path):
    case = {"model": "llama3.2-1b", "cluster": "h200x4", "workload": {"seq_len": 1024, "global_batch_size": 8}}
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([{**case, "id": "a", "plan": {"dp_shard": 4}}, {**case, "id": "b", "plan": {"tp": 0}}]))
    first, second = estimate(case=file)

    assert first.legal
    assert first.figures.step_s.low < first.figures.step_s.value < first.figures.step_s.high
    assert not second.legal
    assert "plan.tp" in second.error


def test_a_plan_that_is_not_legal_is_an_answer_that_says_why():
    answer = estimate(**SMALL, tp=3, dp_shard=1)

    assert answer.figures is None
    assert answer.problems
    with pytest.raises(errors.Infeasible, match="not legal"):
        answer.save("plan.json")


@pytest.mark.parametrize(
    ("flags", "kind", "what", "remedy"),
    [
        ({"modle": "llama3-8b"}, errors.UserError, "modle is no flag", "model"),
        ({"top": 0}, errors.UserError, "top is 0", "from 1 to 100"),
        ({"top": True}, errors.UserError, "top is True", "whole number"),
        ({"top": "many"}, errors.UserError, "top is 'many'", "whole number"),
        ({"objective": "speed"}, errors.UserError, "objective", "time"),
        ({"json": True}, errors.UserError, "json", "to_dict"),
        ({"svg": "cost.svg"}, errors.UserError, "svg", "planner suggest --svg"),
        ({"gpu_price": float("inf")}, errors.UserError, "gpu_price", "from 0 to 1e+09"),
        ({"model": "llama9-9z"}, errors.BadModel, "llama9", ""),
        ({"cluster": "dgx-x100"}, errors.BadCluster, "dgx-x100", ""),
        ({**SMALL, "tp": 3}, errors.Infeasible, "no legal plan", "--tp"),
    ],
)
def test_what_is_refused_says_why(flags, kind, what, remedy):
    with pytest.raises(kind, match=what) as raised:
        suggest(**flags)

    assert remedy in raised.value.remedy


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_a_command_is_a_keyword(command):
    request = request_of(command)
    flags = flags_of(request)
    needed = {name: "x" for name, flag in flags.items() if flag.required}
    for name, flag in flags.items():
        least = flag.least or 1
        value: Any = {bool: True, int: int(least), float: float(least), str: (*flag.choices, "2")[0]}[flag.kind]
        found = value_of(from_keywords(request, {**needed, name: value}), flag)

        assert str(getattr(found, "value", found)) == str([value] if flag.many else value) or flag.many


def test_a_line_of_a_shell_says_the_same(planner):
    flags = {**SMALL, "tp": "2", "pp": "1", "top": 1, "simulate": False}
    line = shell_line("suggest", from_keywords(request_of("suggest"), flags))

    assert plain(json.loads(planner(*line.split()[1:], "--json").stdout)) == plain(suggest(**flags))
