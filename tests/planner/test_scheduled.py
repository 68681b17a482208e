"""Runs that a scheduler has: submitted once, followed, cancelled and collected, with stand-ins for its commands."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from planner.question.plan_file import plan_file, save_plan
from planner.runs import runs_store, scheduled
from planner.runs.planned_run import job_run
from planner.runs.schedulers import launchers
from planner.runs.schedulers.launchers import LauncherJob
from tests.planner.conftest import make_cluster, planned
from tests.planner.schedulers import queue
from topology import codec
from topology.errors import PlannerError

SLOT = "4711"


@pytest.fixture(scope="module")
def content():
    found = planned(make_cluster(nodes=2))
    return plan_file(found.question(), replace(found.plan, placement=()), found.estimate)


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    made = queue(tmp_path / "queue")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def submitted(content, scheduler, tmp_path):
    """Return a function that submits a run of two nodes and returns its job and the submission."""

    def begin(launcher="slurm"):
        job = LauncherJob(
            name="meshwright", directory=tmp_path / "run", ranks=16, nodes=2, budget_s=60.0, image="registry/mw:1"
        )
        request = job_run(content).request(steps=10, budget_s=60.0, own_table=False)
        codec.write_text(job.directory / "request.json", codec.to_json(request))
        file = launchers.write_job(launcher, job)
        codec.write_text(file.path, file.text)
        return job, scheduled.submit(file, launcher)

    return begin


def follow(job, submission, turns=(), patience_s=60.0):
    """Follow a run; at each poll the next of `turns` happens. Returns the report and what it said."""
    left, lines = list(turns), []

    def tell(line):
        lines.append(line)
        if left:
            left.pop(0)()

    return scheduled.follow(job, submission, patience_s, tell=tell, poll_s=0.0, late_s=0.0), lines


def test_a_run_is_followed_through_the_queue_until_its_report_is_there(submitted, scheduler):
    job, submission = submitted()
    turns = (lambda: scheduler.says(SLOT, "RUNNING"), lambda: scheduler.does("away"), scheduler.runs)

    report, lines = follow(job, submission, turns=turns)

    assert report["status"] == "finished"
    words = [line.removeprefix("Submitted batch job 4711: ") for line in lines]
    assert words[:2] == ["pending", "running"]
    assert "Unable to contact slurm controller" in words[2]  # a controller that is away ends nothing
    assert scheduler.cancelled == []


@pytest.mark.parametrize(
    ("word", "accounted", "said", "cause"),
    [
        ("FAILED", "", "failed", ""),
        ("CANCELLED", "", "cancelled", "the job was cancelled; "),
        ("OUT_OF_MEMORY", "", "out_of_memory", "a node had no memory left for the job; "),
        (None, "NODE_FAIL", "node_fail", "a node failed; "),
        (None, "", "ended", ""),
    ],
)
def test_a_job_that_leaves_no_report_says_how_it_ended(submitted, scheduler, word, accounted, said, cause):
    job, submission = submitted()
    if word is None:  # squeue has forgotten it
        scheduler.forgets(SLOT)
        scheduler.does("accounted", accounted)
    else:
        scheduler.says(SLOT, word)
    (job.directory / "slurm-4711.txt").write_text("starting\nsrun: error: node0: no such image\n")

    with pytest.raises(PlannerError, match=f"ended \\({said}\\) and left no report") as caught:
        follow(job, submission)

    assert caught.value.why == f"{cause}srun: error: node0: no such image"


def test_a_job_that_waits_too_long_is_cancelled(submitted, scheduler):
    job, submission = submitted()

    with pytest.raises(PlannerError, match="cancelled"):
        follow(job, submission, patience_s=0.0)

    assert scheduler.cancelled == [SLOT]


@pytest.mark.parametrize(
    ("conditions", "word", "over"),
    [
        ([], "active", False),
        ([{"type": "Suspended", "status": "True"}, {"type": "Complete", "status": "False"}], "suspended", False),
        ([{"type": "Complete", "status": "True"}], "completed", True),
        ([{"type": "Failed", "status": "True"}], "failed", True),
        ("damaged", "active", False),
    ],
)
def test_the_state_of_a_trainjob_is_its_conditions(submitted, scheduler, conditions, word, over):
    job, submission = submitted("trainjob")
    scheduler.says("kube", json.dumps({"status": {"conditions": conditions}}))

    found = scheduled.state(job.directory, submission)

    assert (found.word, found.over) == (word, over)


def test_a_trainjob_is_cancelled_by_its_manifest_and_is_then_gone(submitted, scheduler):
    job, submission = submitted("trainjob")

    scheduled.cancel(job.directory)

    assert scheduler.cancelled == [str(job.directory / "job.yaml")]
    assert scheduled.state(job.directory, submission).over


def test_what_is_refused_may_be_submitted_again_and_what_nobody_knows_may_not(submitted, scheduler, tmp_path):
    scheduler.does("refuse")
    with pytest.raises(PlannerError, match="refused"):
        submitted()
    assert scheduled.recorded(tmp_path / "run") is None
    (scheduler.folder / "refuse").unlink()

    job, submission = submitted()
    killed = replace(submission, said=None)  # between sbatch and its answer
    with pytest.raises(PlannerError, match="not known whether"):
        follow(job, killed)


def test_only_runs_without_a_report_are_cancelled_below_a_folder(submitted, scheduler, tmp_path):
    submitted()
    scheduler.runs()
    scheduled.cancel_below(tmp_path)
    assert scheduler.cancelled == []

    (tmp_path / "run" / "run.json").unlink()
    scheduled.cancel_below(tmp_path)
    assert scheduler.cancelled == [SLOT]


def test_apply_submits_follows_and_keeps_the_run(planner, content, scheduler, tmp_path, monkeypatch):
    """Asked again with the same folder, it follows the job that is there."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    save_plan(content, tmp_path / "plan.json")
    words = ("apply", tmp_path / "plan.json", "--launcher", "slurm", "--submit", "--out", tmp_path / "run", "--json")
    assert planner(*words).returncode == 0
    scheduler.runs()

    done = planner(*words, "--wait", "2m")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["comparison"]["within"]
    assert scheduler.submitted == [str(tmp_path / "run" / "job.sbatch")]
    store = tmp_path / "data" / "meshwright" / "runs.sqlite3"
    assert [run.status for run in runs_store.list_runs(store)] == ["finished"]

    other = planner(*words, "--wait", "2m", "--steps", "20")
    assert other.returncode == 2
    assert "holds another run" in other.stderr
