"""Logs of torchtitan, Megatron-LM and DeepSpeed: real lines are read as their tools wrote them, anything else is
refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.learn.logs import measured_in, read_runs
from topology.errors import BadInput, PlannerError

LOGS = Path(__file__).parents[1] / "data" / "logs"


@pytest.mark.parametrize(
    ("name", "global_batch", "measured"),
    [
        (
            "torchtitan",
            None,
            {"tokens_per_s_per_gpu": 10050, "peak_memory_gib": 66.91, "memory_is": "torch max reserved"},
        ),
        (
            "torchtitan_looped",
            None,
            {"tokens_per_s_per_gpu": 197367, "peak_memory_gib": 1.41, "memory_is": "torch max reserved"},
        ),
        (
            "megatron_lm",
            64,
            {
                "step_s": (0.2321 + 0.2292) / 2,
                "peak_memory_gib": 28404 / 1024,
                "memory_is": "torch max reserved",
                "memory_rank": 0,
            },
        ),
        ("megatron_llm", 1024, {"step_s": 89.4748}),
        (
            "deepspeed_earlier",
            128,
            {"step_s": 128 / 83.61223986736601, "peak_memory_gib": 9.02, "memory_is": "torch max allocated"},
        ),
        ("deepspeed_in_neox", 32, {"step_s": 4.1031, "peak_memory_gib": 63.31, "memory_is": "torch max allocated"}),
    ],
)
def test_real_lines_say_what_their_tools_measured(name, global_batch, measured) -> None:
    """The first two steps of a log with more do not count; what several ranks say of one step counts once."""
    found = measured_in((LOGS / f"{name}.log").read_text("utf-8"), where=name, global_batch=global_batch)

    assert {
        key: pytest.approx(value) if isinstance(value, float) else value for key, value in measured.items()
    } == found


def test_colors_and_a_terminals_prefixes_do_not_matter() -> None:
    line = (LOGS / "torchtitan.log").read_text("utf-8").splitlines()[0]
    colored = (
        line.replace("step:", "\x1b[31mstep:").replace("memory:", "\x1b[32m memory:").replace("tps:", "\x1b[34mtps:")
    )

    assert measured_in(f"0: {colored}\x1b[39m", where="x", global_batch=None)["tokens_per_s_per_gpu"] == 10050


@pytest.mark.parametrize("text", ["", "nothing here\n" * 3, "step: 3  loss: 1.0", "iteration 3/ 4 | elapsed"])
def test_a_text_without_steps_is_refused(text) -> None:
    with pytest.raises(BadInput, match="no step of a known log"):
        measured_in(text, where="x.log", global_batch=8)


def test_two_tools_in_one_log_are_refused() -> None:
    both = "".join((LOGS / f"{name}.log").read_text("utf-8") for name in ("torchtitan", "megatron_lm"))

    with pytest.raises(BadInput, match="torchtitan and megatron-lm"):
        measured_in(both, where="x.log", global_batch=8)


def test_samples_a_second_need_a_batch() -> None:
    with pytest.raises(BadInput, match="global_batch_size"):
        measured_in((LOGS / "deepspeed_earlier.log").read_text("utf-8"), where="x.log", global_batch=None)


@given(st.text(max_size=200), st.sampled_from(sorted(path.name for path in LOGS.glob("*.log"))), st.integers(0, 2000))
def test_damaged_logs_are_read_or_refused(noise, name, place) -> None:
    text = (LOGS / name).read_text("utf-8")
    try:
        found = measured_in(text[:place] + noise + text[place:], where=name, global_batch=8)
    except PlannerError:
        return

    assert all(
        value > 0 for key, value in found.items() if key in {"step_s", "tokens_per_s_per_gpu", "peak_memory_gib"}
    )


@pytest.fixture
def folder(tmp_path):
    shutil.copy(LOGS / "megatron_lm.log", tmp_path / "run.log")
    return tmp_path


def case(**measured) -> dict:
    return {"id": "one", "workload": {"global_batch_size": 64}, "measured": measured}


def test_a_case_or_a_table_names_the_log_of_its_run(folder) -> None:
    (folder / "runs.jsonl").write_text(json.dumps(case(log="run.log")) + "\n", encoding="utf-8")
    (folder / "runs.csv").write_text("id,workload.global_batch_size,measured.log\none,64,run.log\n", encoding="utf-8")

    (line,), (row,) = read_runs(folder / "runs.jsonl"), read_runs(folder / "runs.csv")

    assert line["measured"] == row["measured"]
    assert line["measured"]["step_s"] == pytest.approx(0.23065)


@pytest.mark.parametrize("name", ["../run.log", "/etc/hostname", "", 3, "away.log"])
def test_a_log_lies_beside_the_table(folder, name) -> None:
    (folder / "away.log").symlink_to("/etc/hostname")
    (folder / "runs.jsonl").write_text(json.dumps(case(log=name)) + "\n", encoding="utf-8")

    with pytest.raises(BadInput, match=r"measured\.log"):
        read_runs(folder / "runs.jsonl")


def test_what_is_measured_is_said_once(folder) -> None:
    (folder / "runs.jsonl").write_text(json.dumps(case(log="run.log", step_s=1.0)) + "\n", encoding="utf-8")

    with pytest.raises(BadInput, match="a log and step_s"):
        read_runs(folder / "runs.jsonl")
