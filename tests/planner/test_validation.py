"""Predicted against measured: signs, conventions, intervals, and rows that cannot be compared."""

from __future__ import annotations

import copy
import json

import pytest

from planner.question.cases import load_case
from planner.validate.validation import measured_step_s, summarise, validate_case
from tests.planner.conftest import CASES

GIB = 2.0**30
RUN = {
    "id": "run",
    "model": "llama3-8b",
    "cluster": "dgx-h100",
    "workload": {"seq_len": 8192, "global_batch_size": 64},
    "plan": {"dp_shard": 8, "micro_batch_size": 1, "recompute": "full"},
    "runtime": {"name": "torchtitan", "compile": False},
    "measured": {},
    "outcome": "ok",
}


def run(measured, **changes):
    case = copy.deepcopy(RUN) | {"measured": measured}
    for name, value in changes.items():
        case[name] = {**case[name], **value} if isinstance(value, dict) else value
    return case


def test_errors_are_signed_fractions_of_the_measurement():
    """A measurement at twice the prediction is an error of -50%; at the prediction, zero."""
    predicted = validate_case(run({}))["predicted"]
    slow = validate_case(run({"step_s": 2 * predicted["step_s"], "peak_memory_gib": predicted["reserved_bytes"] / GIB}))

    assert slow["error"]["step"] == pytest.approx(-0.5)
    assert slow["error"]["memory"] == pytest.approx(0.0)
    assert slow["within"] == {"step": False, "memory": True}
    assert slow["within_interval"] is False


def test_throughput_and_flops_imply_the_step_time():
    """Two statements of one run give one step time: tokens/s/GPU and model TFLOP/s/GPU."""
    predicted = validate_case(run({}))["predicted"]
    by_tokens = validate_case(run({"tokens_per_s_per_gpu": predicted["tokens_per_s_per_gpu"]}))
    by_flops = validate_case(run({"tflops_per_gpu": predicted["tflops_per_gpu"]}))

    assert by_tokens["error"]["step"] == pytest.approx(0.0, abs=1e-9)
    assert by_flops["error"]["step"] == pytest.approx(0.0, abs=1e-9)
    assert "model FLOPs" in by_flops["convention"]


def test_hardware_flops_are_read_by_the_published_formula():
    """Narayanan et al. 2021, section 5.1: F = 96 B s l h^2 (1 + s/6h + V/16lh) for a GPT with full recompute."""
    data = json.loads((CASES / "megatron_sc21.json").read_text())[0]
    case = load_case(data)
    step, convention = measured_step_s(case)
    b, s = data["workload"]["global_batch_size"], data["workload"]["seq_len"]
    layers, h, v = (data["model"][k] for k in ("num_hidden_layers", "hidden_size", "vocab_size"))
    flops = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))

    assert "hardware" in convention
    assert step == pytest.approx(flops / (data["measured"]["tflops_per_gpu"] * 1e12 * case.plan.gpus), rel=0.01)


def test_memory_is_compared_as_the_source_counts_it():
    """Torchtitan logs reserved memory; a stated convention decides elsewhere."""
    assert "reserved" in validate_case(run({"peak_memory_gib": 50.0}))["memory_is"]
    assert "reserved" in validate_case(run({"peak_memory_gib": 50.0, "memory_is": "peak memory per GPU"}))["memory_is"]
    allocated = validate_case(run({"peak_memory_gib": 50.0, "memory_is": "torch max allocated"}))
    assert allocated["predicted"]["peak_memory_bytes"] == allocated["predicted"]["allocated_bytes"]
    reserved = validate_case(run({"peak_memory_gib": 50.0, "memory_is": "torch max reserved"}))
    assert reserved["predicted"]["peak_memory_bytes"] == reserved["predicted"]["reserved_bytes"]


def test_an_out_of_memory_run_is_right_when_it_is_predicted():
    oom = validate_case(run({}, plan={"dp_shard": 8, "micro_batch_size": 8, "recompute": "none"}, outcome="oom"))
    fine = validate_case(run({}, outcome="oom"))

    assert oom["outcome_right"] is True
    assert oom["predicted"]["fits"] is False
    assert fine["outcome_right"] is False
    assert oom["skipped"] is None
    assert (
        validate_case(run({"peak_memory_gib": 150.0}, outcome="ok"))["outcome_right"] is None
    )  # of 80 GB: not run there


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (run({"step_s": 1.0}, plan={"dp_shard": 7}), "not legal"),
        (run({"step_s": 1.0}, model="no-such-model"), "no-such-model"),
        (run({"step_s": 1.0}, workload={"seq_len": None, "global_batch_size": 8}), "seq_len is missing"),
        (run({"step_s": float("inf")}, outcome=None), "nothing to compare"),
        (run({"step_s": 1e-3}, outcome=None), "the peak of h100-sxm is 989"),
        ({"id": 3}, "model is missing"),
    ],
)
def test_rows_that_cannot_be_compared_say_why(data, reason):
    row = validate_case(data)

    assert reason in row["skipped"]
    assert summarise([row])["skipped"] == 1


def test_bugs_surface(monkeypatch):
    """Only errors of ours become a skipped row."""

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("planner.validate.validation._compare", broken)
    with pytest.raises(ZeroDivisionError):
        validate_case(run({"step_s": 1.0}))


def test_the_summary_counts_by_hand():
    def row(error, held, right):
        return {
            "id": f"row {error}",
            "skipped": None,
            "error": {"step": error, "memory": None},
            "within": {"step": held, "memory": None},
            "outcome_right": right,
        }

    summary = summarise([row(0.1, True, True), row(-0.3, False, False), {**row(9.0, True, None), "skipped": "no"}])

    assert summary["step"] == {
        "rows": 2,
        "mean_abs": pytest.approx(0.2),
        "bias": pytest.approx(-0.1),
        "worst": -0.3,
        "worst_id": "row -0.3",
        "coverage": 0.5,
    }
    assert summary["memory"] is None
    assert summary["outcomes"] == {"right": 1, "wrong": 1}
    assert (summary["rows"], summary["compared"], summary["skipped"]) == (3, 2, 1)


def test_the_first_row_of_every_file_is_predicted():
    """All rows are read in test_cases.py, and costed in test_intervals.py."""
    for path in sorted(CASES.glob("*.json")):
        row = validate_case(json.loads(path.read_text())[0])

        assert row["skipped"] is None, row
        assert row["predicted"]["step_s"] > 0


def test_a_tolerance_holds_nothing_where_nothing_was_compared(tmp_path, capsys) -> None:
    """No measurement, no verdict: neither success nor failure of the prediction."""
    from planner.cli import main

    path = tmp_path / "cases.json"
    case = json.loads((CASES / "torchtitan_h200x4.json").read_text())[0]
    path.write_text(json.dumps([{**case, "measured": {}}]))

    assert main(["validate", str(path), "--tolerance", "5"]) == 2
    assert "nothing could be compared" in capsys.readouterr().err
