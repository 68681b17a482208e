"""Runs that the service hands to a scheduler, with stand-ins for its commands: followed, collected, cancelled."""

from __future__ import annotations

import pytest

from planner.question.plan_file import plan_file
from planner.question.question import question_of
from planner.runs import runs_store
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from tests.planner.conftest import TINY, make_cluster
from tests.planner.schedulers import queue
from tests.service import needs  # noqa: F401 - skips where a package is missing
from tests.waiting import wait_until
from topology import codec

from planner.remote.client import Client  # isort: skip
from tests.service.running import service  # isort: skip


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    made = queue(tmp_path / "queue")
    for name, value in {**made.environment, "XDG_DATA_HOME": str(tmp_path / "data")}.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def asked():
    workload, plan = Workload(seq_len=512, global_batch_size=8), Plan(dp_shard=4)
    question = question_of(TINY, make_cluster(2, 2), workload, framework="meshwright")
    content = plan_file(question, plan, question.estimate([plan]).estimate(0))
    plan = {"name": "plan.json", "content": codec.to_json(content)}
    return {"plan": plan, "launcher": "slurm", "submit": True}


def test_a_run_of_a_scheduler_outlives_the_service_and_is_collected(tmp_path, scheduler, asked):
    """Killed servers neither submit twice nor lose the run; a second job is submitted alongside it, and cancelled."""
    with service(tmp_path / "service") as running, Client(running.url) as client:
        job = client.submit("apply", asked)
        wait_until(lambda: client.job(job)["progress"].endswith("4711: pending"))
        running.kill()
        running.start()
        other = client.submit("apply", {**asked, "steps": 20})
        wait_until(lambda: client.job(other)["progress"].endswith("4712: pending"))
        wait_until(lambda: client.job(job)["starts"] == 2 and client.job(job)["progress"].endswith("4711: pending"))
        assert len(scheduler.submitted) == 2

        client.cancel(other)
        wait_until(lambda: scheduler.cancelled == ["4712"])
        assert client.job(other)["state"] == "cancelled"

        scheduler.does("folder", str(tmp_path / "service" / "work" / job / "run"))
        scheduler.runs()
        found = client.job(job, wait_s=30)
        assert found["state"] == "done", found["error"]
        assert found["result"]["comparison"]["within"]
        assert {"run/run.json", "run/job.sbatch"} <= {one["name"] for one in found["artifacts"]}

    store = tmp_path / "data" / "meshwright" / "runs.sqlite3"
    assert [run.status for run in runs_store.list_runs(store)] == ["finished"]
    assert scheduler.cancelled == ["4712"]
