"""Jobs of Ray: its job API in a stand-in, and a real Ray of two nodes where one is installed."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from planner.runs import scheduled
from planner.runs.schedulers import ray
from planner.runs.schedulers.launchers import LauncherJob, collect_command, write_job
from planner.runs.schedulers.ray import check_ray
from tests.tools import ray_nodes
from topology import codec
from topology.errors import PlannerError, UserError

PROGRAMS = Path(os.environ["MESHWRIGHT_RAY"]) if "MESHWRIGHT_RAY" in os.environ else None


def job(folder: Path) -> LauncherJob:
    return LauncherJob(name="a-run", directory=folder, ranks=16, nodes=2, budget_s=600.0)


@pytest.fixture
def dashboard(monkeypatch):
    """A job API that holds what it is given; a test sets states and messages."""
    jobs: dict[str, dict[str, str]] = {}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self, code: int, document: object) -> None:
            text = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            name = self.path.split("/")[3]
            if name:
                jobs[name]["status"] = "STOPPED"
                self.answer(200, {"stopped": True})
            else:
                asked = json.loads(body)
                jobs[asked["submission_id"]] = {**asked, "status": "PENDING", "message": ""}
                self.answer(200, {"submission_id": asked["submission_id"]})

        def do_GET(self) -> None:
            name, _, rest = self.path.removeprefix("/api/jobs/").partition("/")
            if name not in jobs:
                self.answer(404, {"detail": "Job not found"})
            else:
                self.answer(200, {"logs": "one\nlast words\n"} if rest else jobs[name])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{server.server_address[1]}")
    yield jobs
    server.shutdown()
    server.server_close()


def submitted(folder):
    asked = job(folder)
    file = write_job("ray", asked)
    codec.write_text(file.path, file.text)
    return asked, scheduled.submit(file, "ray", name=asked.name)


def test_a_job_takes_a_bundle_on_each_node_and_collects_afterwards(tmp_path):
    file = write_job("ray", job(tmp_path / "a folder"))
    words = shlex.split(json.loads(file.text)["entrypoint"])

    assert words[1:5] == ["-m", "executor.launch.ray_nodes", "--nodes=2", "--gpus-per-node=8"]
    assert json.loads(words[words.index("--then") + 1]) == collect_command(job(tmp_path / "a folder"))
    assert f"--out={tmp_path / 'a folder'}" in words[words.index("--") :]
    assert file.submit[:4] == ("ray", "job", "submit", "--no-wait")


@pytest.mark.parametrize(
    ("status", "message", "cause"),
    [
        ("FAILED", "Job entrypoint command failed with exit code 75", "a node failed; last words"),
        ("FAILED", "Job entrypoint command failed with exit code 1", "last words"),
        ("STOPPED", "", "the job was cancelled; last words"),
    ],
)
def test_a_job_that_leaves_no_report_says_why(dashboard, tmp_path, status, message, cause):
    asked, submission = submitted(tmp_path)
    assert scheduled.state(tmp_path, submission) == scheduled.SchedulerState(word="pending", over=False)
    dashboard[submission.job] |= {"status": status, "message": message}

    with pytest.raises(PlannerError, match="left no report") as caught:
        scheduled.follow(asked, submission, 5.0, tell=lambda _: None, poll_s=0.0, late_s=0.0)

    assert caught.value.why == cause


def test_a_job_is_stopped_and_one_that_is_forgotten_is_gone(dashboard, tmp_path):
    _, submission = submitted(tmp_path)
    scheduled.cancel(tmp_path)
    assert dashboard[submission.job]["status"] == "STOPPED"
    dashboard.clear()
    assert scheduled.state(tmp_path, submission).word == "gone"


def test_a_dashboard_that_is_away_or_no_address_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")
    with pytest.raises(PlannerError, match="does not answer"):
        submitted(tmp_path)
    assert scheduled.recorded(tmp_path) is None
    assert [one.code for one in check_ray(2, None, folder=tmp_path)] == ["controller"]
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "file:///etc/passwd")
    with pytest.raises(UserError, match="RAY_API_SERVER_ADDRESS"):
        ray.address()


@pytest.mark.nightly
@pytest.mark.skipif(
    bool(ray_nodes.missing(PROGRAMS)), reason="no Ray: MESHWRIGHT_RAY=BIN, see tests/tools/ray_nodes.py"
)
def test_a_real_ray_is_checked_and_runs_a_job_of_two_nodes(tmp_path, planner):
    # A socket's path has at most 107 characters, so Ray's folder is not below pytest's.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, ray_nodes.cluster(Path(folder), PROGRAMS) as cluster:
        checked = planner("doctor", "--launcher=ray", "--gpus-per-node=0", "--json", env=cluster.environment)
        assert checked.returncode == 0, checked.stdout
        words = ("--submit", "--wait=4m", "--json", "--out", tmp_path / "run")
        done = planner("apply", "--launcher=ray", *words, env=cluster.environment)
        assert (done.returncode, json.loads(done.stdout)["status"]) == (0, "finished"), done.stderr
