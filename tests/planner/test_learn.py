"""A runtime learned from runs: what made simulated runs is found in them, files are read as they are said, and answers
use it.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from planner.learn.fit import FACTOR_SPREAD, HOST_SPREAD, LEAST_S, PredictedCases, Runs, fit, measured_of, usual_values
from planner.learn.logs import read_runs
from planner.learn.next_runs import ask_next
from planner.question.cases import load_case
from planner.question.learned_runtime import LearnedCalibrations, in_place, read_learned
from simulator.analytical.memory import STATE
from simulator.fitting.calibrations import UNMEASURED
from topology.errors import BadInput
from topology.units import GIB

TRUTH = {"kernel_factor": 1.3, "collective_factor": 1.6, "memory_factor": 1.15, "tp_layer_s": 6e-3, "launch_s": 60e-6}
MODELS = [
    {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": 16,
     "num_key_value_heads": 16, "intermediate_size": 4 * hidden, "vocab_size": 32000}
    for layers, hidden in ((8, 2048), (16, 4096))
]  # fmt: skip
DEGREES = [(8, 1), (4, 2), (1, 8)]


def case(model: dict, dp: int, tp: int, micro_batch: int) -> dict:
    name = f"{model['num_hidden_layers']} dp{dp} tp{tp} mb{micro_batch}"
    return {
        "id": name,
        "model": model,
        "cluster": {"gpu": "h100-sxm", "gpus_per_node": 8, "nodes": 1, "interconnect": "nvswitch"},
        "workload": {"task": "train", "seq_len": 2048, "global_batch_size": 32},
        "plan": {
            "dp_replicate": dp,
            "tp": tp,
            "micro_batch_size": micro_batch,
            "zero_stage": 1,
            "sequence_parallel": tp > 1,
        },
        "runtime": {"name": "megatron-lm", "param_dtype": "bfloat16", "compute_dtype": "bfloat16"},
    }


def measured(data: dict) -> dict:
    """Return a case with what a runtime of TRUTH would have taken."""
    loaded = load_case(data)
    described = loaded.question.runtime.name
    assert described == "megatron-lm"
    found = PredictedCases([loaded]).predicted({"step_s": 1e-3, "rest_s": 3e-3, **TRUTH}, compiled=False)[0]
    memory = {"peak_memory_gib": found.memory.peak_bytes.value / GIB, "memory_is": "allocated"}
    return {**data, "measured": {"step_s": found.step_s.value, **memory}}


@pytest.fixture(scope="module")
def twins() -> list[dict]:
    return [measured(case(model, dp, tp, mb)) for model in MODELS for dp, tp in DEGREES for mb in (2,)]


@pytest.fixture(scope="module")
def learned(twins):
    runs = [measured_of(load_case(data)) for data in twins]
    return runs, fit(runs, "megatron-lm")


def test_what_made_the_runs_is_found_in_them(learned) -> None:
    runs, found = learned
    values = found.fitted()

    assert values["kernel_factor"].value == pytest.approx(TRUTH["kernel_factor"], rel=0.1)
    assert values["memory_factor"].value == pytest.approx(TRUTH["memory_factor"], rel=0.02)
    assert values["tp_layer_s"].value == pytest.approx(TRUTH["tp_layer_s"], rel=0.5)
    assert all(one.low <= one.value <= one.high for one in values.values())
    assert abs(Runs(runs).logs({"step_s": 0.0, **found.values}, compiled=False)).max() < 0.1
    assert abs(Runs(runs).logs({}, compiled=False)).max() > 0.25


def test_a_run_that_stood_still_does_not_decide(twins, learned) -> None:
    stalled = json.loads(json.dumps(twins[:5]))
    stalled[3]["measured"]["step_s"] *= 20
    whole = learned[1].values["kernel_factor"]

    found = fit([measured_of(load_case(data)) for data in stalled], "megatron-lm").values["kernel_factor"]

    assert found == pytest.approx(whole, rel=0.1)


@pytest.mark.nightly
def test_hosts_that_pay_for_every_tensor_parallel_rank_of_a_pipeline_and_crossings_of_nodes_are_found() -> None:
    """Runs on two nodes, made by costs that no description has: both come out, and steps with them."""
    truth = {"tp_rank_layer_s": 3e-3, "crossing_s": 4e-4}
    runs = []
    for dp, tp, pp in ((16, 1, 1), (2, 8, 1), (1, 16, 1), (4, 2, 2), (2, 4, 2), (1, 8, 2), (2, 2, 4)):
        data = case(MODELS[0], dp, tp, 1)
        data["cluster"]["nodes"] = 2
        data["plan"]["pp"] = pp
        run = measured_of(load_case(data))
        (made,) = PredictedCases([run.case]).predicted(truth, compiled=False)
        runs.append(dataclasses.replace(run, step_s=made.step_s.value))

    found = fit(runs, "megatron-lm")

    assert found.values["tp_rank_layer_s"] == pytest.approx(truth["tp_rank_layer_s"], rel=0.2)
    assert found.values["crossing_s"] > 2 * LEAST_S["crossing_s"]
    assert abs(Runs(runs).logs({"step_s": 0.0, **found.values}, compiled=False)[:, 0]).max() < 0.1
    assert abs(Runs(runs).logs({}, compiled=False)[:, 0]).max() > 0.3


def test_the_first_run_asked_for_is_of_the_kind_that_is_least_sure(twins) -> None:
    """From runs without tensor parallelism, a run with it teaches more than another without."""
    without = [measured_of(load_case(data)) for data in twins if data["plan"]["tp"] == 1]
    candidates = [load_case(case(MODELS[0], dp, tp, 4)) for dp, tp in ((8, 1), (1, 8))]

    asked = ask_next(without, candidates, fit(without, "megatron-lm"), "megatron-lm", compiled=False)

    assert asked[0]["plan"]["tp"] == 8
    assert asked[0]["step_unsure"] > asked[1]["step_unsure"]


def test_runs_asked_for_leave_all_candidates_alike_to_one_of_them(twins) -> None:
    """The first two by brute force, from predictions with one cost moved at a time."""
    runs = [measured_of(load_case(data)) for data in twins[:3]]
    candidates = [load_case(case(model, dp, tp, 1)) for model in MODELS for dp, tp in DEGREES]
    found = fit([], "megatron-lm").with_costs_of([run.case for run in runs] + candidates, "megatron-lm")
    usual, together = usual_values("megatron-lm"), [*candidates, *(run.case for run in runs)]

    def steps(**moved):
        asked = PredictedCases(together).predicted(usual | moved, compiled=False)
        return np.log([one.step_s.value for one in asked])

    moves = [
        (steps(**{name: usual[name] * 1.01}) - steps()) / 0.01 * FACTOR_SPREAD.get(name, HOST_SPREAD)
        for name in found.of_steps
    ]
    far = sum((move[:, None] - move[None]) ** 2 for move in moves) ** 0.5
    n = len(candidates)
    nearest = far[:n, n:].min(axis=1)

    asked = ask_next(runs, candidates, found, "megatron-lm", compiled=False)

    for one in asked[:2]:
        left = [np.minimum(nearest, far[:n, place]).sum() for place in range(n)]
        best = int(np.argmin(left))
        assert one["id"] == candidates[best].id
        nearest = np.minimum(nearest, far[:n, best])


def test_a_full_gpu_shows_what_its_flushes_take_and_nothing_else(twins, learned) -> None:
    """A run that filled its GPU and took a second more in each of its two micro batches."""
    full = json.loads(json.dumps(twins[0]))
    whole = load_case(full).question.cluster.gpu_memory_bytes
    full["id"], full["measured"]["peak_memory_gib"] = "full", whole / GIB
    full["measured"]["step_s"] += 2.0
    runs = [measured_of(load_case(data)) for data in [*twins, full]]

    found = fit(runs, "megatron-lm")

    assert runs[-1].fills
    assert not any(run.fills for run in runs[:-1])
    micro_batches = 32 // 8 // 2
    assert found.values["flush_s"] == pytest.approx(2.0 / micro_batches, rel=0.3)
    assert found.values["kernel_factor"] == pytest.approx(learned[1].values["kernel_factor"], rel=0.05)


def test_a_plan_that_flushes_pays_in_every_micro_batch() -> None:
    loaded = load_case(case(MODELS[1], 8, 1, 4))
    asked = PredictedCases([loaded])
    (plain,) = asked.predicted({}, compiled=False, replayed=True)
    over = 1.3 * plain.memory.capacity_bytes / plain.memory.reserved_bytes

    (free,), (paying,) = (
        asked.predicted({"memory_factor": over, "flush_s": cost}, compiled=False, replayed=True) for cost in (0.0, 0.7)
    )

    assert paying.step_s.value == pytest.approx(free.step_s.value + 0.7 * (32 // 8 // 4))
    (fits,) = asked.predicted({"flush_s": 0.7}, compiled=False, replayed=True)
    assert fits.breakdown_s["allocator"] == 0.0


def test_what_passes_save_and_what_stays_have_a_factor_each() -> None:
    """Twice the activations and half the rest, by hand from the described categories."""
    loaded = load_case(case(MODELS[1], 8, 1, 4))
    asked = PredictedCases([loaded])
    (plain,) = asked.predicted({}, compiled=False)

    (found,) = asked.predicted({"memory_factor": 0.5, "activation_factor": 4.0}, compiled=False)

    state = sum(plain.memory.by_category[name] for name in STATE)
    assert found.memory.reserved_bytes == pytest.approx(0.5 * state + 2.0 * (plain.memory.reserved_bytes - state))
    assert sum(found.memory.by_category.values()) == pytest.approx(
        0.5 * state + 2.0 * (sum(plain.memory.by_category.values()) - state)
    )


def test_learn_writes_a_runtime_that_validate_estimate_and_suggest_take(planner, twins, tmp_path) -> None:
    rows, file = tmp_path / "runs.jsonl", tmp_path / "mine.json"
    rows.write_text("\n".join(json.dumps(data) for data in twins))

    done = planner("learn", rows, "--runtime", "mine", "--out", file, "--json")
    answer = json.loads(done.stdout)

    assert done.returncode == 0
    assert {"rows", "fitted", "left_out", "ask_next"} <= answer.keys()
    assert answer["rows"] == len(twins)
    assert answer["ask_next"]
    assert not {"network_factor", "crossing_s", "flush_s", "cp_layer_s"} & answer["fitted"].keys()  # no run shows them
    assert answer["left_out"]["step"] < 0.12
    assert answer["left_out"]["memory"] < 0.05
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps(twins))
    before, after = (
        json.loads(planner("validate", cases, *more, "--json").stdout)["summary"]["step"]["mean_abs"]
        for more in ((), ("--runtime", file))
    )
    assert after < 0.05 < before
    assert planner("estimate", "--case", cases, "--runtime", file, "--json").returncode == 0
    small = ("--model", "tiny-llama", "--gpus", "2", "--pp", "1", "--global-batch", "8")
    found = planner("suggest", "--runtime", file, *small, "--json")
    assert found.returncode == 0, found.stderr
    assert planner("learn", rows, "--runtime", "mine", "--out", file).returncode == 2  # it is there already


def test_before_there_are_runs_the_twenty_to_make_first_are_said(planner, tmp_path) -> None:
    """Of 24 that could be made, none twice, tensor parallelism and models of both sizes among the first five."""
    rows, file = tmp_path / "runs.jsonl", tmp_path / "mine.json"
    possible = [case(model, dp, tp, mb) for model in MODELS for dp, tp in [*DEGREES, (2, 4)] for mb in (1, 2, 4)]
    rows.write_text("\n".join(json.dumps(data) for data in possible))

    done = planner("learn", rows, "--runtime", "mine", "--out", file, "--json")
    asked = json.loads(done.stdout)["ask_next"]

    assert done.returncode == 0, done.stderr
    assert not file.exists()
    assert len({run["id"] for run in asked}) == len(asked) == 20
    assert {1, 8} <= {run["plan"]["tp"] for run in asked[:5]}
    assert len({run["id"].split()[0] for run in asked[:5]}) == 2


def test_a_table_says_the_same_as_cases(twins, tmp_path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(
        "model,plan.tp,plan.sequence_parallel,runtime.name,measured.step_s\nllama3-8b,2,true,megatron-lm,1.5\n"
    )

    (row,) = read_runs(table)

    assert row["plan"] == {"tp": 2, "sequence_parallel": True}
    assert (row["model"], row["runtime"]["name"], row["measured"]["step_s"]) == ("llama3-8b", "megatron-lm", 1.5)


def test_a_learned_file_is_checked(tmp_path) -> None:
    file = tmp_path / "mine.json"
    good = {
        "name": "mine",
        "like": "megatron-lm",
        "rows": 3,
        "fitted": {"kernel_factor": {"value": 1.2, "low": 1, "high": 2}},
    }
    file.write_text(json.dumps(good))
    known = LearnedCalibrations(UNMEASURED, read_learned(file))
    data = in_place(case(MODELS[0], 8, 1, 1), known.learned)

    slower = load_case(data, known)
    plain = load_case(data)

    assert slower.question.estimate([slower.plan]).step_s[0] > plain.question.estimate([plain.plan]).step_s[0]
    for wrong in ({"cheese": {"value": 1, "low": 1, "high": 1}}, {"kernel_factor": {"value": -1, "low": 0, "high": 1}}):
        file.write_text(json.dumps({**good, "fitted": wrong}))
        with pytest.raises(BadInput):
            read_learned(file)
    assert dataclasses.replace(known.learned).costs().kernel_factor == 1.2
