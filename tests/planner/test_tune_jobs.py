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
from planner.tune.state import TuningRequest
from planner.tune.trials import Chosen, Status
from simulator.config.hf_config import load_model
from simulator.config.workload import Workload
from tests.planner.conftest import ROOT, make_cluster
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


def asked(question, **changes) -> TuningRequest:
    fields = {name: getattr(question, name) for name in ("model", "cluster", "workload", "runtime")}
    return TuningRequest(**fields, framework="meshwright", gpus=2, budget_s=600.0, within=0.01, **changes)


def test_one_job_for_all_trials_is_refused_where_plans_need_several_nodes(two_nodes, tmp_path) -> None:
    wide = replace(asked(two_nodes[0]), gpus=4)
    with pytest.raises(UserError, match="4 GPUs"):
        TuneJob(request=wide, state=tmp_path / "state", launcher="slurm").written()


def test_a_trainjob_resumes_the_state_in_its_container(two_nodes, tmp_path) -> None:
    job = TuneJob(
        request=asked(two_nodes[0]), state=tmp_path / "state", launcher="trainjob", image="registry/meshwright:1"
    )

    manifest = yaml.safe_load(job.written().text)

    trainer = manifest["spec"]["trainer"]
    assert trainer["command"][:6] == ["python3", "-m", "planner", "tune", "--resume", str(tmp_path / "state")]
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 2}


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
