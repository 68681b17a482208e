"""`planner apply` of serving plans: what is asked of the executor, what is refused, and both figures side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from planner.cli import app
from planner.serving.answer import answer_deployment
from planner.serving.candidates import deployments
from planner.serving.measured.asked_run import Step, all_steps, asked_run
from planner.serving.measured.samples import add_to_profile
from planner.serving.measured.side_by_side import load_rows, step_rows
from planner.serving.overrides import with_serving_flags
from planner.serving.plan_file import load_serving, serving_file
from planner.serving.question.from_flags import ServingFlags, serving_question
from simulator.serving.deployment import Pool
from simulator.serving.measured import MeasuredServing, MeasuredSteps, Ratio
from simulator.serving.server import serve
from topology import codec
from topology.errors import BadInput, BadPlan, UserError
from topology.profile.profile import read_profile

STEPS = (Step(phase="decode", batch=2, context=100), Step(phase="prefill", batch=1, context=200))


def question(**said):
    flags = {"model": "tiny-llama", "cluster": "h200x4", "gpus": 2, "engine": "meshwright", "concurrency": 2}
    return serving_question(ServingFlags(**(flags | {"isl": 50, "osl": 6} | said)))


def report(run, *, slower: float):
    """The executor's report of a run in which everything took `slower` times what was predicted."""
    asked = run.request(device="cpu")
    served = serve(run.question.model, run.question.cluster, run.deployment, run.question.traffic)
    answers = [
        {
            "arrival_s": 0.0,
            "first_s": slower * (one.first_s - one.arrival_s),
            "done_s": slower * (one.done_s - one.arrival_s),
            "tokens": one.tokens,
        }
        for one in served.answers
    ]
    steps = [
        {**step, "seconds": slower * seconds, "queued_s": seconds, "all_reduce": "own"}
        for step, seconds in zip(asked["steps"], asked["predicted"]["steps"], strict=True)
    ]
    load = {"name": "as asked", "complete": True, "answers": answers, "seconds": slower * served.seconds, "itl_s": []}
    return {"request": {**asked, "all_reduces": ["own", "nccl"]}, "steps": steps, "loads": [load]}


def test_errors_are_what_was_measured_is_slower_by() -> None:
    """A machine that takes 1.25 times the predicted time shows -20 % everywhere, and +25 % in throughput."""
    found = report(asked_run(question(), Pool(tp=2), steps=STEPS), slower=1.25)

    assert [row.error for row in step_rows(found)] == pytest.approx([-0.2, -0.2])
    rows = load_rows(found)["as asked"]
    assert [row.error for row in rows] == pytest.approx([-0.2] * 9 + [0.25])
    assert sum(abs(row.error) for row in rows[:9]) / 9 == pytest.approx(0.2)


def test_steps_with_another_all_reduce_are_shown_but_not_held_against_the_prediction() -> None:
    found = report(asked_run(question(), Pool(tp=2), steps=STEPS), slower=1.0)
    found["steps"] = [{**step, "all_reduce": "nccl"} for step in found["steps"]] + found["steps"]
    assert [(row.way, row.predicted_for) for row in step_rows(found)] == [("own", True)] * 2 + [("nccl", False)] * 2


def test_what_was_not_answered_whole_is_no_figure() -> None:
    found = report(asked_run(question(), Pool(tp=2)), slower=1.0)
    found["loads"][0]["complete"] = False
    assert load_rows(found) == {}


@pytest.mark.parametrize(
    ("said", "pool", "what"),
    [
        ({}, Pool(engines=2), "2 engines"),
        ({}, Pool(pp=2), "pipeline stages"),
        ({"weights": "float8"}, Pool(), "weights in float8"),
        ({"cached_prompt": 0.5}, Pool(), "prefix cache"),
    ],
)
def test_what_the_executor_does_not_serve_is_refused(said, pool, what) -> None:
    with pytest.raises(BadPlan, match=what):
        asked_run(question(**said), pool)


def saved(tmp_path, **said):
    asked = question(**said)
    path = tmp_path / "plan.json"
    path.write_text(codec.to_json(serving_file(asked, asked.deployment(Pool(tp=2)))))
    return path


def test_a_plan_for_another_engine_is_predicted_anew_and_that_is_said(tmp_path) -> None:
    found = CliRunner().invoke(
        app, ["apply", str(saved(tmp_path, engine="vllm")), "--dry-run", "--json", "--out", str(tmp_path / "r")]
    )

    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert "not vLLM" in found.stderr
    assert document["request"]["tp"] == 2
    assert document["request"]["predicted"]["loads"]["as asked"]["requests_per_s"] > 0
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("option", [["--steps", "3"], ["--own-table"], ["--tolerance", "0.1"], ["--allow-busy"]])
def test_options_of_training_are_refused_not_dropped(tmp_path, option) -> None:
    found = CliRunner().invoke(app, ["apply", str(saved(tmp_path)), "--dry-run", *option])
    assert isinstance(found.exception, UserError)
    assert option[0] in str(found.exception)


def test_only_what_the_executor_serves_is_suggested_for_it() -> None:
    """Tensor parallelism by divisors of the key/value heads, four here; the reasons against the others are given."""
    found, rejected = deployments(question(gpus=8, cluster="dgx-h100"))
    assert {(one.pool.tp, one.pool.pp) for one in found} == {(1, 1), (2, 1), (4, 1)}
    assert any("does not divide key/value heads of 4" in reason for reason in rejected)
    assert any("tensor parallelism alone" in reason for reason in rejected)


def test_what_a_run_measured_feeds_a_profile_that_estimates_use(tmp_path: Path) -> None:
    """Every step a fifth slower than priced: what clients of that engine see is estimated a fifth slower."""
    said = {"model": "llama3-8b", "isl": 500, "osl": 50}
    measured = report(asked_run(question(**said), Pool(tp=2), steps=all_steps()), slower=1.2)
    measured["steps"] = [step | {"queued_s": step["seconds"]} for step in measured["steps"]]
    measured["notes"] = [{"kind": "versions", "torch": "2.11.0", "device": "NVIDIA H200"}]
    measured["sums"] = [{"tp": 2, "all_reduce": way, "tokens": 1, "seconds": 5e-6} for way in ("own", "nccl")]
    profile = tmp_path / "profile.json"

    count = add_to_profile(measured, profile)
    again = add_to_profile(measured, profile)

    kept = read_profile(profile)
    assert count == again == len(all_steps()) + 3
    assert len(kept.serving) == len(all_steps()) + 2  # the same on the same software: the newer ones
    assert [(sample.op, sample.ranks) for sample in kept.collectives] == [("all_reduce", 2)]
    plain, with_it = (question(**said, profile=path) for path in (None, profile))
    answers = [answer_deployment(one, one.deployment(Pool(tp=2))).estimate for one in (plain, with_it)]
    assert answers[1].tpot_s.value == pytest.approx(1.2 * answers[0].tpot_s.value, rel=0.1)
    assert answers[1].ttft_s.value == pytest.approx(1.2 * answers[0].ttft_s.value, rel=0.1)
    assert [answer.tpot_s.source for answer in answers] == ["datasheet", "fitted"]
    assert any("no steps of vllm" in line for line in question(engine="vllm", profile=profile).assumed)


def test_a_plan_keeps_what_was_measured_and_a_flag_replaces_it(tmp_path: Path) -> None:
    """A saved plan answers as it did; under another engine the measurement of this one is gone, and that is said."""
    found = question()
    steps = MeasuredSteps(tp=2, by_tokens=(Ratio(1.0, 1.5),), host_step_s=1e-3)
    found = replace(found, measured=MeasuredServing(steps=(steps,)))
    path = tmp_path / "plan.json"
    codec.write_text(path, codec.to_json(serving_file(found, found.deployment(Pool(tp=2)))) + "\n")

    kept, deployment, changed = with_serving_flags(load_serving(path), ServingFlags())
    assert (kept.measured, deployment.measured, changed) == (found.measured, found.measured, ())
    other, _, changed = with_serving_flags(load_serving(path), ServingFlags(engine="vllm"))
    assert other.measured is None
    assert any(line.startswith("measured") for line in changed)


def test_a_profile_of_no_gpu_is_not_made(tmp_path: Path) -> None:
    found = report(asked_run(question(), Pool(tp=2), steps=STEPS), slower=1.0)
    with pytest.raises(BadInput, match="no GPU"):
        add_to_profile({**found, "notes": [{"kind": "versions", "torch": "2.11.0", "device": "cpu"}]}, tmp_path / "p")
