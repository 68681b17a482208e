"""A tuning whose trials the executor makes, two ranks on gloo: ranks are killed, stopped and starved, and it goes
on.
"""

import json
import os
import resource
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest

from executor.launch.local_ranks import TAG
from planner.question.question import question_of
from planner.runs import runs_store
from planner.tune.candidates import candidates_of
from planner.tune.loop import Limits, tune
from planner.tune.runners.executor_trials import ExecutorTrials
from planner.tune.trials import Chosen, Status
from simulator.config.hf_config import load_model
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology.catalog.cluster_file import load_cluster
from topology.catalog.platform import take_gpus
from topology.errors import BadPlan

pytest.importorskip("torch", reason="torch is not installed: plans cannot be run")
pytestmark = pytest.mark.slow

SMALL = replace(load_model("tiny-llama"), layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=32768)
LIMIT_S = 40.0


@pytest.fixture(scope="module")
def asked():
    """A small question on two GPUs, whose plans the CPU runs, and its candidates without pipelines."""
    question = question_of(
        SMALL,
        take_gpus(load_cluster("h200x4"), 2),
        Workload(seq_len=32, global_batch_size=4),
        framework="meshwright",
        runtime=Runtime(name="meshwright", param_dtype="float32", compute_dtype="float32"),
    )
    plans = candidates_of(question, fastest=40)
    return question, replace(plans, plans=tuple(one for one in plans.plans if one.plan.pp == 1))


def beat(folder, rank: int) -> dict:
    try:
        return json.loads((folder / "records" / f"rank{rank}.beat").read_text())
    except (OSError, ValueError):
        return {}


def harm(folder, phase: str, what, ended: threading.Event) -> threading.Thread:
    """Do something to rank 1 of a trial as soon as it is in a phase."""

    def watch() -> None:
        while not ended.is_set():
            found = beat(folder, 1)
            if "pid" in found and str(found.get("phase", "")).startswith(phase):
                what(int(found["pid"]))
                return
            time.sleep(0.01)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def starve(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))


def left(folder) -> list[int]:
    """Return processes that still live and were started for trials of this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if TAG in process.environ() and str(folder) in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


@pytest.mark.nightly
def test_ranks_that_are_killed_stopped_or_out_of_memory_end_a_trial_and_no_tuning(asked, tmp_path) -> None:
    question, plans = asked
    runner = ExecutorTrials(
        question=question,
        device="cpu",
        folder=tmp_path / "trials",
        limit_s=LIMIT_S,
        timed_steps=60,
        store=tmp_path / "runs.sqlite3",
    )
    ended = threading.Event()
    kill, stop = (lambda pid: os.kill(pid, signal.SIGKILL)), (lambda pid: os.kill(pid, signal.SIGSTOP))
    harmed = [
        harm(tmp_path / "trials" / f"trial-{number:03d}", "step", what, ended)
        for number, what in enumerate((kill, stop, starve), start=1)
    ]

    try:
        found = []
        for row in range(4):  # each in processes of its own
            chosen = Chosen(row=row, why="", predicted_s=(1.0, 1.0, 1.0))
            found += runner.run([(plans.plans[row], chosen)], 300.0)
    finally:
        ended.set()
        for thread in harmed:
            thread.join(5)

    assert [one.status for one in found[:1]] == [Status.FAILED]
    assert "SIGKILL" in found[0].cause
    assert found[1].status in {Status.FAILED, Status.TIMEOUT}  # by the collective's time-out, or the trial's
    assert found[1].cause
    assert found[2].status is Status.OUT_OF_MEMORY
    assert found[3].status is Status.FINISHED
    assert found[3].step_s > 0
    assert all(one.seconds < LIMIT_S + 30 for one in found)
    assert left(tmp_path) == []
    # Each is a run that planner runs lists.
    assert len(runs_store.list_runs(tmp_path / "runs.sqlite3")) == 4


def test_plans_of_one_mesh_share_a_start_and_a_tuning_ends_with_a_measured_plan(asked, tmp_path) -> None:
    question, plans = asked
    runner = ExecutorTrials(
        question=question,
        device="cpu",
        folder=tmp_path / "trials",
        timed_steps=3,
        store=tmp_path / "runs.sqlite3",
    )

    view = tune(plans, runner, Limits(budget_s=150.0, within=0.9), unknown_machine=True)

    assert view.best is not None
    assert view.best.step_s == min(trial.step_s for trial in view.trials if trial.step_s)
    assert {trial.status for trial in view.trials} == {Status.FINISHED}
    for trial in view.trials:
        report = json.loads((tmp_path / "trials" / trial.directory.rpartition("/")[2] / "run.json").read_text())
        assert report["verified"]["ok"]


def test_a_driver_that_still_counts_processes_is_waited_for(asked, tmp_path, monkeypatch) -> None:
    """Processes of others, from before the first trial, are not waited for."""
    from planner.tune.runners import executor_trials

    monkeypatch.setattr(executor_trials, "RELEASE_POLL_S", 0.0)
    seen = iter([{1, 2, 3}, {1, 2}, {1}])
    fields = {"question": asked[0], "device": "cuda", "folder": tmp_path, "others": {1}}

    assert ExecutorTrials(**fields, gpu_processes=lambda: next(seen))._released()
    monkeypatch.setattr(executor_trials, "RELEASE_S", 0.01)
    assert not ExecutorTrials(**fields, gpu_processes=lambda: {1, 9})._released()


def test_torchtitan_is_not_asked_for_ranks_on_other_gpus_than_its_own(asked) -> None:
    from executor.launch.request import Request
    from executor.measure.torchtitan import TitanTrainer

    question, plans = asked
    request = Request(
        plan=plans.plans[0].plan,
        model=question.model,
        workload=question.workload,
        runtime=question.runtime,
        gpus=(1, 0),
        trainer="torchtitan",
    )

    with pytest.raises(BadPlan, match="rank r on GPU r"):
        TitanTrainer(request, "cpu")
