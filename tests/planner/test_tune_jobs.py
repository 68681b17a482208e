"""Tuning through a scheduler: a job for all trials, and a job for each, with stand-ins for sbatch and scancel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

from planner.question.question import question_of
from planner.tune.candidates import candidates_of
from planner.tune.runners.job_trials import JobTrials
from planner.tune.sessions.job import TuneJob
from planner.tune.sessions.start import job_settings
from planner.tune.state import TuningRequest
from planner.tune.trials import Chosen, Status
from simulator.config.hf_config import load_model
from simulator.config.workload import Workload
from tests.planner.conftest import ROOT, make_cluster
from tests.tools.kube_api import faults
from topology.errors import UserError

RECORDED = ROOT / "tests" / "data" / "tune" / "vtrain_two_questions.json"

# Leaves the report that the plan's nodes would, by default.
SBATCH = """#!{python}
import json, os, sys
from pathlib import Path
script = Path(sys.argv[1])
text = script.read_text()
assert "--nodes=2" in text and "--collect" in text
what = os.environ["SBATCH_DOES"]
if what == "refuse":
    sys.exit("sbatch: error: invalid partition")
request = json.loads((script.parent / "request.json").read_text())
status = "out_of_memory" if what == "memory" else "finished"
steps = None if what == "memory" else {{"median": 0.25, "spread": 0.01, "all": [0.25] * 10}}
report = {{
    "schema_version": 1, "status": status, "taken_at": "2026-01-01T00:00:00+00:00", "exit_code": 0, "seconds": 30.0,
    **{{key: request[key] for key in ("plan", "model", "workload", "runtime", "device", "predicted")}},
    "failure": {{"rank": 3, "message": "memory is full"}} if what == "memory" else None,
    "measured": {{"steps": 10, "steps_asked": 10, "step_s": steps,
                 "memory_by_rank": [{{"peak_reserved_bytes": 2**30, "peak_allocated_bytes": 2**29}}]}},
}}
if what != "hang":
    (script.parent / "run.json").write_text(json.dumps(report))
print("Submitted batch job 4711")
"""
SCANCEL = '#!/bin/sh\necho "$1" >> "$SCANCELLED"\n'


@pytest.fixture(scope="module")
def two_nodes():
    workload = Workload(seq_len=1024, global_batch_size=64)
    question = question_of(load_model("tiny-llama"), make_cluster(2, 2), workload, framework="meshwright")
    return question, candidates_of(question, fastest=10)


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """Return a function that makes trials whose jobs do what they are asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("sbatch", SBATCH.format(python=sys.executable)), ("scancel", SCANCEL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SCANCELLED", str(tmp_path / "cancelled"))

    def make(question, what: str, **more) -> JobTrials:
        monkeypatch.setenv("SBATCH_DOES", what)
        fields = {"question": question, "launcher": "slurm", "folder": tmp_path / "trials"}
        return JobTrials(**fields, store=tmp_path / "runs.sqlite3", **more)

    return make


@pytest.mark.parametrize(
    ("what", "status", "cause"),
    [
        ("fine", Status.FINISHED, ""),
        ("memory", Status.OUT_OF_MEMORY, "memory is full"),
        ("refuse", Status.FAILED, "invalid partition"),
        ("hang", Status.TIMEOUT, "no report"),
    ],
)
def test_each_trial_is_a_job_of_two_nodes(two_nodes, scheduler, tmp_path, what, status, cause) -> None:
    question, plans = two_nodes
    runner = scheduler(question, what, limit_s=1.0, queue_s=1.0 if what == "hang" else 60.0)
    chosen = Chosen(row=0, why="", predicted_s=(1.0, 1.0, 1.0))

    found = list(runner.run([(plans.plans[0], chosen)], 300.0))

    assert [one.status for one in found] == [status]
    assert cause in found[0].cause
    if what == "fine":
        assert (found[0].step_s, found[0].reserved_bytes) == (0.25, 2**30)
    cancelled = tmp_path / "cancelled"
    assert (cancelled.read_text().split() if cancelled.is_file() else []) == (["4711"] if what == "hang" else [])


ARRAY = """#!{python}
import sys
from pathlib import Path
text = Path(sys.argv[1]).read_text()
assert "#SBATCH --exclusive" in text
assert ("#SBATCH --array=0-1" in text) == ("array" in sys.argv[1])
print("Submitted batch job 4711")
"""
ARRAY_STATES = """#!{python}
import os, sys
number = next(word for word in sys.argv if word.startswith("--jobs="))[7:]
print("PREEMPTED" if number == "4711_1" and not os.path.exists(os.environ["AGAIN"]) else "RUNNING")
"""


@pytest.fixture
def array(two_nodes, tmp_path, monkeypatch):
    """Return a runner whose scheduler takes arrays, and a function that lets the job in a trial's folder end."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("sbatch", ARRAY), ("squeue", ARRAY_STATES)):
        (folder / name).write_text(text.format(python=sys.executable))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("AGAIN", str(tmp_path / "again"))
    monkeypatch.setattr("planner.tune.runners.job_trials.POLL_S", 0.05)
    fields = {"question": two_nodes[0], "launcher": "slurm", "device": "cpu", "late_s": 0.1}
    runner = JobTrials(**fields, folder=tmp_path / "trials", store=tmp_path / "runs")

    def leave_report(trial: str) -> None:
        where = tmp_path / "trials" / trial
        (where / "run.json").write_text(json.dumps(report(json.loads((where / "request.json").read_text()))))

    return runner, leave_report


def first_two(plans):
    return [(one, Chosen(row=row, why="", predicted_s=(1.0, 1.0, 1.0))) for row, one in enumerate(plans.plans[:2])]


def report(request):
    """Return the report of a run on CPUs."""
    kept = {key: request[key] for key in ("plan", "model", "workload", "runtime", "device", "predicted")}
    measured = {"steps": 10, "steps_asked": 10, "step_s": {"median": 0.25, "spread": 0.01, "all": [0.25] * 10}}
    about = {"schema_version": 1, "status": "finished", "taken_at": "2026-01-01T00:00:00+00:00", "exit_code": 0}
    return {**about, **kept, "seconds": 30.0, "failure": None, "measured": {**measured, "memory_by_rank": []}}


def test_plans_that_are_tried_together_are_an_array(two_nodes, array, monkeypatch, tmp_path) -> None:
    (tmp_path / "again").touch()  # no task is preempted
    runner, leave_report = array
    pair = first_two(two_nodes[1])
    assert runner.shares_start(pair[0][0], pair[1][0])
    begun = []
    runner.began = lambda start: (begun.append(start), leave_report(f"trial-{len(begun):03d}"))

    found = list(runner.run(pair, 300.0))

    assert [(one.status, one.step_s) for one in found] == [(Status.FINISHED, 0.25)] * 2
    assert [one.key for one in begun] == [one.key for one, _ in pair]
    records = [json.loads((tmp_path / "trials" / name / "submission.json").read_text()) for name in TRIALS]
    assert [one["task"] for one in records] == [0, 1]


TRIALS = ("trial-001", "trial-002")


def test_what_a_scheduler_took_away_says_nothing_of_the_plan_and_is_tried_again(two_nodes, array, tmp_path) -> None:
    runner, leave_report = array
    pair = first_two(two_nodes[1])

    def began(start) -> None:
        name = start.directory.rpartition("/")[2]
        if name == "trial-003":  # the second plan, again
            (tmp_path / "again").touch()
        if name != "trial-002":
            leave_report(name)

    runner.began = began
    found = list(runner.run(pair, 300.0))

    assert [one.status for one in found] == [Status.FINISHED, Status.INTERRUPTED, Status.FINISHED]
    assert "gave the nodes to another job" in found[1].cause
    assert found[2].key == found[1].key == pair[1][0].key


def test_jobs_of_a_tuning_that_was_killed_are_followed_and_not_submitted_again(two_nodes, array, tmp_path) -> None:
    runner, leave_report = array
    plan = two_nodes[1].plans[0]
    starts = []
    runner.began = starts.append
    runner.tell = lambda _: (_ for _ in ()).throw(SystemExit)  # at its first look at the queue
    with pytest.raises(SystemExit):
        list(runner.run(first_two(two_nodes[1])[:1], 300.0))
    (tmp_path / "bin" / "sbatch").unlink()
    runner.tell = lambda _: None
    leave_report("trial-001")

    found = list(runner.left_over(starts, two_nodes[1].plans))

    assert [(one.key, one.step_s) for one in found] == [(plan.key, 0.25)]


def asked(question, **changes) -> TuningRequest:
    fields = {name: getattr(question, name) for name in ("model", "cluster", "workload", "runtime")}
    return TuningRequest(**fields, framework="meshwright", gpus=2, budget_s=600.0, within=0.01, **changes)


def test_one_job_for_all_trials_is_refused_where_plans_need_several_nodes(two_nodes, tmp_path) -> None:
    wide = replace(asked(two_nodes[0]), gpus=4)
    with pytest.raises(UserError, match="4 GPUs"):
        TuneJob(request=wide, state=tmp_path / "state", launcher="slurm").written()


@pytest.mark.parametrize("launcher", ["kubernetes", "jobset", "trainjob"])
def test_a_container_resumes_the_state(two_nodes, tmp_path, launcher) -> None:
    volume = None if launcher == "trainjob" else f"shared:{tmp_path}"
    state = tmp_path / "state"
    job = TuneJob(request=asked(two_nodes[0]), state=state, launcher=launcher, image="ours:1", volume=volume)

    manifests = list(yaml.safe_load_all(job.written().text))

    assert [faults(one) for one in manifests] == [[]] * len(manifests)
    text = json.dumps(manifests[-1])
    assert json.dumps(["python3", "-m", "planner", "tune", "--resume", str(state)])[1:-1] in text
    assert '{"limits": {"nvidia.com/gpu": 2}}' in text
    assert "planner tune --resume" in job.written().advice[-1]
    if volume:
        with pytest.raises(UserError, match="is not below /elsewhere"):
            replace(job, volume="shared:/elsewhere").written()


@pytest.mark.parametrize(
    ("launcher", "more", "what"),
    [
        ("slurm", {"volume": "shared:/a"}, "slurm has no use for --volume"),
        ("ray", {"image": "ours:1"}, "ray has no use for --image"),
        ("trainjob", {"image": "ours:1", "volume": "shared:/a"}, "trainjob has no use for --volume"),
        ("jobset", {"image": "ours:1"}, "jobset needs --volume"),
        ("kubernetes", {"volume": "shared:/a"}, "kubernetes needs --image"),
        ("torchrun", {}, "--launcher is 'torchrun'"),
    ],
)
def test_settings_that_a_launcher_lacks_or_has_no_use_for_are_named(two_nodes, tmp_path, launcher, more, what) -> None:
    with pytest.raises(UserError, match=what):
        job_settings(launcher, "tuned", **more)
    with pytest.raises(UserError, match=what):
        TuneJob(request=asked(two_nodes[0]), state=tmp_path / "state", launcher=launcher, **more).written()


def test_a_batch_job_runs_all_trials_of_a_state_on_its_node(tmp_path, planner) -> None:
    """The stand-in for sbatch runs the script here; its trials are looked up, since no GPU is needed for that."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "sbatch").write_text('#!/bin/sh\nbash "$1" && echo Submitted batch job 7\n')
    (bin_ / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for one in bin_.iterdir():
        one.chmod(0o755)
    state = tmp_path / "state.jsonl"
    begun = planner("tune", "--recorded", str(RECORDED), "--state", str(state), "--trials", "1")
    path = {"PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    done = planner("tune", "--resume", str(state), "--launcher", "slurm", "--submit", "--json", env=path)

    assert (begun.returncode, done.returncode) == (0, 0), begun.stderr + done.stderr
    document = json.loads(done.stdout)
    assert document["submitted"] == "Submitted batch job 7"
    subprocess.run(["bash", "-n", document["file"]], check=True)
    assert "#SBATCH --gpus-per-node=8" in document["text"]
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["best"]["measured_s"] > 0
    assert (tmp_path / "best.plan.json").is_file()
