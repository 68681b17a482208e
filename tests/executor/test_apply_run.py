"""What is made of the records of ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from executor.launch.local_ranks import Failure, LaunchResult
from executor.launch.records import Recorder
from executor.launch.request import Request
from executor.run.apply import report, write_report
from executor.run.host_load import HostLoad
from executor.run.rank_records import RankRecords
from executor.run.step_summary import summarise_steps
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology.errors import PlannerError

MODEL = load_model("llama3-8b")
REQUEST = Request(
    plan=Plan(dp_shard=2),
    model=MODEL,
    workload=Workload(seq_len=8192, global_batch_size=2),
    runtime=Runtime(),
    device="cuda",
    steps=3,
    peak_flops=989e12,
    peak_flops_source="datasheet",
)
DONE = LaunchResult(outcome="finished", exit_code=0, seconds=9.0, failure=None, stdout_tail="", stderr_tail="")


def step(index: int, seconds: float, peak: int = 0) -> dict:
    return {
        "kind": "step",
        "index": index,
        "seconds": seconds,
        "loss": 5.0 - index,
        "gradient_norm": 1.0,
        "peak_allocated_bytes": peak,
    }


def summary(*ranks: list[dict]) -> dict:
    return summarise_steps(REQUEST, [RankRecords(tuple(records)) for records in ranks])


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    found = summary([step(0, 1.0), step(1, 2.0), step(2, 4.0)], [step(0, 3.0), step(1, 1.0), step(2, 1.0)])

    assert found["step_s"]["all"] == [3.0, 2.0, 4.0]
    assert found["step_s"]["median"] == 3.0
    assert found["tokens_per_s"] == pytest.approx(2 * 8192 / 3)
    assert found["losses"] == [5.0, 4.0, 3.0]


def test_the_time_by_device_events_is_told_beside_the_clocks() -> None:
    ranks = [[{**step(0, 1.0), "device_seconds": 0.9}], [{**step(0, 1.1), "device_seconds": 0.8}]]

    assert summary(*ranks)["device_step_s"] == 0.9
    assert summary([step(0, 1.0)], [step(0, 1.0)])["device_step_s"] is None


def test_of_hosts_that_others_use_the_busiest_is_told() -> None:
    idle = {"kind": "host", "cores": 32.0, "others": 0.5, "stolen": 0.0}
    busy = {"kind": "host", "cores": 16.0, "others": 3.0, "stolen": 2.0}

    assert summary([step(0, 1.0), idle], [step(0, 1.0), busy])["host"] == {"cores": 16.0, "others": 3.0, "stolen": 2.0}
    assert summary([step(0, 1.0)], [step(0, 1.0)])["host"] is None


def test_a_process_that_is_no_rank_counts_as_others(monkeypatch) -> None:
    """In two seconds others ran for 5, 2 more were its own, and one went to other machines."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    read = iter([(0.0, 100.0, 1.0, 10.0), (2.0, 107.0, 2.0, 12.0)])
    monkeypatch.setattr(HostLoad, "_read", staticmethod(lambda: next(read)))

    found = HostLoad().since()

    assert (found["others"], found["stolen"]) == (2.5, 0.5)


def test_mfu_counts_six_flops_a_weight_and_the_whole_square_of_attention() -> None:
    """Llama-3-8B: 7.5e9 matrix weights that a token meets, and 12 L h s of attention (arXiv 2204.02311, app. B)."""
    found = summary([step(0, 2.0)], [step(0, 2.0)])

    weights = 8_030_261_248 - 128_256 * 4096 - 65 * 4096  # all but the embedding and the norms
    flops = (6 * weights + 12 * 32 * 4096 * 8192) * 2 * 8192
    assert found["mfu"] == pytest.approx(flops / 2.0 / 2 / 989e12, rel=1e-6)
    assert found["mfu_denominator"] == {"peak_flops": 989e12, "source": "datasheet"}


def test_only_steps_that_all_ranks_took_count() -> None:
    found = summary([step(0, 1.0), step(1, 9.0)], [step(0, 1.5)])

    assert found["steps"] == 1
    assert found["step_s"]["all"] == [1.5]


def test_no_steps_give_no_time() -> None:
    found = summary([], [])

    assert found["step_s"] is None
    assert "mfu" not in found


def write(folder, rank: int, *entries: dict) -> None:
    recorder = Recorder(folder / f"rank{rank}.jsonl")
    for entry in entries:
        recorder.write(**entry)
    recorder.close()


def test_a_full_memory_is_told_with_its_rank_and_its_table(tmp_path) -> None:
    write(tmp_path, 0, step(0, 1.0, 10))
    full = {"kind": "out_of_memory", "phase": "step 1", "peak_allocated_bytes": 99, "message": "CUDA out of memory"}
    write(tmp_path, 1, step(0, 1.0, 20), full)
    failed = LaunchResult(
        outcome="failed",
        exit_code=1,
        seconds=3.0,
        failure=Failure(rank=0, exit_code=1, signal=None, message="peer is gone"),
        stdout_tail="",
        stderr_tail="",
    )

    found = report(REQUEST, failed, tmp_path, [])

    assert (found["status"], found["exit_code"], found["complete"]) == ("out_of_memory", 4, False)
    assert found["failure"]["rank"] == 1
    assert found["failure"]["memory"][1]["phase"] == "step 1"
    assert found["measured"]["steps"] == 1


def verified(**found: object) -> dict:
    plain = {"kind": "verified", "ok": False, "dtype": "float64", "loss": 0.5, "gradient": 0.5, "worst": ""}
    return {**plain, **found}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (verified(loss=None, gradient=None), "which is no number"),
        (verified(kind="verified_types", dtype="bfloat16"), "in bfloat16"),
        ({"kind": "not_finite", "index": 4}, "step 4 is no number"),
        ({"kind": "kernel", "name": "ring attention", "ok": False}, "ring attention"),
    ],
)
def test_wrong_numbers_of_every_kind_are_told(tmp_path, entry: dict, words: str) -> None:
    write(tmp_path, 1, entry)

    found = report(REQUEST, DONE, tmp_path, [])

    assert (found["status"], found["exit_code"]) == ("wrong_numbers", 1)
    assert words in found["failure"]["message"]


def test_wrong_numbers_are_told_and_not_timed(tmp_path) -> None:
    write(tmp_path, 0, verified(worst="layers.0.attention.wq.weight"))

    found = report(REQUEST, DONE, tmp_path, [])

    assert (found["status"], found["exit_code"]) == ("wrong_numbers", 1)
    assert "layers.0.attention.wq.weight" in found["failure"]["message"]
    assert found["measured"]["step_s"] is None


def test_a_report_is_json_and_says_what_was_asked(tmp_path) -> None:
    write(tmp_path, 0, step(0, 1.0), {"kind": "timed"}, {"kind": "done"})
    write(tmp_path, 1, step(0, 1.0), {"kind": "timed"}, {"kind": "done"})

    found = json.loads(json.dumps(report(REQUEST, DONE, tmp_path, ["--x"])))

    assert found["complete"] is True
    assert found["plan"]["dp_shard"] == 2
    assert found["mesh"]["requested"] == [[[[[0]], [[1]]]]]
    assert found["command"][-1] == "--x"


def test_ranks_that_are_done_but_slow_to_leave_have_finished(tmp_path) -> None:
    for rank in range(2):
        write(tmp_path, rank, step(0, 1.0), {"kind": "timed"}, {"kind": "done"})

    assert report(REQUEST, replace(DONE, outcome="timeout"), tmp_path, [])["status"] == "finished"
    assert report(REQUEST, replace(DONE, outcome="timeout", survivors=(7,)), tmp_path, [])["status"] == "timeout"


def test_a_run_that_dies_while_a_step_is_profiled_has_measured_its_steps(tmp_path) -> None:
    for rank in range(2):
        write(tmp_path, rank, step(0, 1.0), {"kind": "timed"})
    crashed = replace(DONE, outcome="failed", failure=Failure(rank=1, exit_code=1, signal=None, message="no counters"))

    found = report(REQUEST, crashed, tmp_path, [])

    assert (found["status"], found["complete"]) == ("finished", True)
    assert found["missing"] == ["profile: a rank ended while a step was profiled"]


def test_ranks_that_ended_early_without_a_word_have_failed(tmp_path) -> None:
    write(tmp_path, 0, step(0, 1.0), {"kind": "timed"}, {"kind": "done"})
    write(tmp_path, 1, step(0, 1.0))

    found = report(REQUEST, DONE, tmp_path, [])

    assert (found["status"], found["exit_code"]) == ("failed", 1)


def test_a_report_that_cannot_be_written_is_told_in_short(tmp_path) -> None:
    """A disk that is full takes no report; what was found is said all the same, and it is no fault of the plan."""
    for rank in range(2):
        write(tmp_path, rank, step(0, 1.5), {"kind": "timed"}, {"kind": "done"})
    document = report(REQUEST, DONE, tmp_path, [])

    with pytest.raises(PlannerError, match="cannot write") as caught:
        write_report(document, Path("/proc/self/run.json"))

    assert caught.value.exit_code == 1
    assert "finished, 1 steps of 1.5 s (median)" in str(caught.value)
