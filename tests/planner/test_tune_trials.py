"""Trials by a command: what is read of its output, and that no way of ending keeps a tuning from going on."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.question.question import question_of
from planner.tune.candidates import candidates_of
from planner.tune.loop import Limits, tune
from planner.tune.runners import executor_trials
from planner.tune.runners.command_trials import CommandTrials, command_words, metric_of
from planner.tune.trials import Chosen, Status, Trial
from simulator.config.hf_config import load_model
from simulator.config.workload import Workload
from tests.planner.conftest import ROOT, make_cluster
from topology.errors import UserError

# A trainer that does what it is asked by the name of the trial that runs it, and has a child as torchrun has workers.
TRAINER = """
import os, subprocess, sys, time
from pathlib import Path
config = Path(sys.argv[1])
assert "[parallelism]" in config.read_text()
number = int(config.parent.name.rpartition("-")[2])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "left-over"], start_new_session=True)
(config.parent / "child").write_text(str(child.pid))
what = sys.argv[2].split(",")[(number - 1) % len(sys.argv[2].split(","))]
for step in range(1, 400):
    if what == "hang":
        time.sleep(600)
    if what == "memory":
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if what == "crash":
        raise ValueError("mesh of 3")
    if what == "kill" and step == 3:
        os.kill(os.getpid(), 9)
    if what == "mean":
        print("step: 1  memory: 1.00GiB  tps: 3,000")
        sys.exit(0)
    print(f"step: {step}  memory:  1.50GiB(2%)  tps: {1000 * number:,}  tflops: 1.00", flush=True)
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def small():
    workload = Workload(seq_len=512, global_batch_size=16)
    question = question_of(load_model("tiny-llama"), make_cluster(gpus_per_node=4), workload, framework="torchtitan")
    return question, candidates_of(question, fastest=20)


@pytest.fixture
def runner(small, tmp_path):
    """Return a function that makes trials of which each does what it is asked."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    question, _ = small

    def make(what: str, **more) -> CommandTrials:
        words = (sys.executable, str(tmp_path / "trainer.py"), "{config}", what)
        metric = metric_of("torchtitan", tokens_per_step=16 * 512, gpus=4)
        fields = {"question": question, "words": words, "metric": metric, "target": "torchtitan@0.2.2"}
        return CommandTrials(**fields, folder=tmp_path / "trials", timed_steps=4, **more)

    return make


def nothing_is_left(folder) -> bool:
    """Return whether every child that a trial had started has ended."""
    left = []
    for path in folder.glob("trials/*/child"):
        with suppress(psutil.Error):
            process = psutil.Process(int(path.read_text()))
            left += [process] if "left-over" in process.cmdline() else []
    return not left


def test_every_way_of_ending_is_recorded_with_its_cause_and_the_next_trial_runs(small, runner, tmp_path) -> None:
    _, plans = small
    trials = runner("crash,memory,hang,kill,fine", limit_s=6.0)
    chosen = [(plans.plans[row], Chosen(row=row, why="", predicted_s=(1.0, 1.0, 1.0))) for row in range(5)]

    found = list(trials.run(chosen, 120.0))

    expected = [Status.FAILED, Status.OUT_OF_MEMORY, Status.TIMEOUT, Status.FAILED, Status.FINISHED]
    assert [one.status for one in found] == expected
    assert "mesh of 3" in found[0].cause
    assert "CUDA out of memory" in found[1].cause
    assert "SIGKILL" in found[3].cause
    # 5,000 tokens a second and GPU, on four GPUs.
    assert found[4].step_s == pytest.approx(16 * 512 / (4 * 5000))
    assert found[4].reserved_bytes == pytest.approx(1.5 * 2**30)
    assert nothing_is_left(tmp_path)


def test_a_command_that_prints_a_mean_alone_is_measured_by_it(small, runner) -> None:
    chosen = Chosen(row=0, why="", predicted_s=(1.0, 1.0, 1.0))

    found = list(runner("mean", limit_s=20.0).run([(small[1].plans[0], chosen)], 60.0))

    assert found[0].step_s == pytest.approx(16 * 512 / (4 * 3000))


def test_a_tuning_goes_on_over_failures_to_an_answer(small, runner) -> None:
    _, plans = small

    view = tune(plans, runner("memory,fine,crash"), Limits(budget_s=60.0, trials=5, within=0.0))

    assert view.best is not None
    assert [trial.status for trial in view.trials][:2] == [Status.OUT_OF_MEMORY, Status.FINISHED]
    assert view.best.step_s == min(trial.step_s for trial in view.trials if trial.step_s)


def test_a_tuning_that_is_killed_leaves_no_process_and_loses_no_trial(tmp_path, planner) -> None:
    """Kill -9 in the middle of the second trial; the state then has the first, and a second process goes on."""
    # About as quick as predicted, and other plans nearly as quick, or none would be tried.
    (tmp_path / "trainer.py").write_text(TRAINER.replace("1000 * number", "40_000 * number"))
    state = tmp_path / "state.jsonl"
    flags = ["--model", "llama3.2-1b", "--cluster", "dgx-h100", "--gpus", "2", "--framework", "torchtitan@0.2.2"]
    flags += [
        "--seq-len",
        "2048",
        "--global-batch",
        "16",
        "--state",
        str(state),
        "--steps",
        "4",
        "--trial-limit",
        "20s",
        "--budget",
        "2m",
    ]
    trainer = f"{sys.executable} {tmp_path / 'trainer.py'} {{config}} "
    first = start_planner("tune", *flags, "--command", trainer + "fine,hang,fine")
    wait_for(lambda: state.is_file() and state.read_text().count('"kind":"began"') == 2)
    child = tmp_path / "trials" / "trial-002" / "child"
    wait_for(lambda: child.is_file() and child.read_text().isdigit())

    first.kill()
    first.wait(20)
    wait_for(lambda: not alive_with(str(tmp_path / "trainer.py")))

    kept = [json.loads(line) for line in state.read_text().splitlines()]
    assert [line["status"] for line in kept if line["kind"] == "trial"] == ["finished"]
    assert "has to be stated again" in planner("tune", "--resume", state).stderr
    again = ("--command", trainer + "fine,hang,fine")
    second = start_planner("tune", "--resume", str(state), *again, "--trials", "2", "--json")
    answer = json.loads(second.communicate(timeout=120)[0])
    assert second.returncode == 0
    assert [one["status"] for one in answer["trials"]] == ["finished", "finished"]
    assert nothing_is_left(tmp_path)  # not even what led a session of its own when the tuning was killed


def start_planner(*arguments: str):
    return psutil.Popen(
        [sys.executable, "-m", "planner", *arguments],
        stdout=-1,
        stderr=-1,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        text=True,
    )


def alive_with(text: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if text in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def wait_for(condition, seconds: float = 90.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.05)


# --- the metric
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "seconds"),
    [
        ("jsonl", '{"step": 3, "step_s": 0.25}', 0.25),
        ("jsonl", '{"tokens_per_s": 4096}', 2.0),
        ("jsonl", '{"tokens_per_s_per_gpu": 1024}', 1.0),
        ("jsonl", "step_s 3", None),
        ("jsonl:time_per_step", '{"loss": 2.0, "time_per_step": 0.5}', 0.5),
        (r"took ([\d.]+) s", "it took 1.5 s", 1.5),
        (r"(?P<step_ms>[\d.]+) ms", "12.5 ms", 0.0125),
        ("megatron-lm", " iteration 7/ 10 | elapsed time per iteration (ms): 812.3 | loss", 0.8123),
        ("torchtitan", "step:  4  loss:  7.1  grad_norm: 1.2  memory:  5.91GiB(6.2%)  tps: 8,192  tflops: 9 ", 0.125),
        ("torchtitan", "\x1b[31mstep:  4  \x1b[38;5;208mmemory:  5.91GiB(6.2%)  \x1b[34mtps: 8,192  ", 0.125),
    ],
)
def test_steps_are_read_in_the_unit_that_is_named(text: str, line: str, seconds: float | None) -> None:
    found = metric_of(text, tokens_per_step=8192, gpus=8).samples(["other", line])

    assert [one.step_s for one in found] == ([] if seconds is None else [pytest.approx(seconds)])


@pytest.mark.parametrize("text", ["(", "no group", "(?P<speed>.)", "(?P<memory_gib>.)"])
def test_what_does_not_say_what_it_holds_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        metric_of(text, tokens_per_step=1, gpus=1)


@given(st.lists(st.text(max_size=200)), st.sampled_from(["jsonl", "torchtitan", "megatron-lm", r"([\d.e+-]+)"]))
def test_no_output_breaks_the_reading(lines: list[str], text: str) -> None:
    for one in metric_of(text, tokens_per_step=8192, gpus=8).samples(lines):
        assert one.step_s > 0


@pytest.mark.parametrize("text", ["", "'", "no-such-program {config}", "true"])
def test_commands_that_could_run_no_plan_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        command_words(text)


def test_an_executor_that_cannot_begin_is_a_failure_with_its_words(monkeypatch, tmp_path) -> None:
    workload = Workload(seq_len=64, global_batch_size=8)
    question = question_of(load_model("tiny-llama"), make_cluster(gpus_per_node=2), workload, framework="meshwright")
    plans = candidates_of(question, fastest=5)
    monkeypatch.setattr(executor_trials, "MODULE", "executor.no_such_module")
    runner = executor_trials.ExecutorTrials(question=question, device="cpu", folder=tmp_path)
    chosen = Chosen(row=0, why="", predicted_s=(1.0, 1.0, 1.0))

    found = list(runner.run([(plans.plans[0], chosen)], 60.0))

    assert [one.status for one in found] == [Status.FAILED]
    assert "no_such_module" in found[0].cause


def test_a_trial_alone_is_expected_to_take_a_whole_start(monkeypatch, tmp_path) -> None:
    """Two trials shared a start of 27 s; the next, of another mesh, would not end within 30 s."""
    workload = Workload(seq_len=64, global_batch_size=8)
    question = question_of(load_model("tiny-llama"), make_cluster(gpus_per_node=2), workload, framework="meshwright")
    plans = candidates_of(question, fastest=5)
    seconds = iter([0.0, 41.0])
    monkeypatch.setattr(executor_trials.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(executor_trials.child, "run_module", lambda *_, **__: 0)
    runner = executor_trials.ExecutorTrials(question=question, device="cpu", folder=tmp_path, timed_steps=9)
    ended = iter([12.0, 2.0])

    def trial_of(*_, **__):
        return Trial(key="", status=Status.FINISHED, step_s=0.2, seconds=next(ended))

    monkeypatch.setattr(executor_trials.ExecutorTrials, "_ended", trial_of)
    chosen = Chosen(row=0, why="", predicted_s=(1.0, 1.0, 1.0))
    found = list(runner.run([(plans.plans[0], chosen), (plans.plans[1], chosen)], 60.0))

    assert [one.seconds for one in found] == [39.0, 2.0]
    assert runner.start_s(plans.plans[2]) == pytest.approx(27.0 + 12.0 - 10 * 0.2)
