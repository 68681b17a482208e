"""Jobs of Kubernetes: manifests as its API takes them, and a real kubectl against an API server of ours."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import yaml

from planner.runs import scheduled
from planner.runs.schedulers.launchers import LauncherJob, write_job
from tests.tools.kube_api import cluster, faults
from topology import codec
from topology.errors import PlannerError, UserError

LAUNCHERS = ("kubernetes", "jobset", "trainjob")


def job(folder: Path, **changes: object) -> LauncherJob:
    fields = {"name": "a-run", "ranks": 16, "nodes": 2, "budget_s": 600.0, "image": "registry/mw:1"}
    return LauncherJob(**{**fields, "directory": folder / "run", "volume": f"shared:{folder}", **changes})


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("changes", [{}, {"on_cpus": True}, {"nodes": 1, "ranks": 8}])
def test_manifests_are_as_the_api_takes_them(tmp_path, launcher, changes):
    manifests = [*yaml.safe_load_all(write_job(launcher, job(tmp_path, **changes)).text)]

    assert [fault for one in manifests for fault in faults(one)] == []


def test_a_field_that_the_api_does_not_know_or_that_is_of_another_type_is_a_fault(tmp_path):
    """So that the test above can fail."""
    *_, manifest = yaml.safe_load_all(write_job("kubernetes", job(tmp_path)).text)
    manifest["spec"]["template"]["spec"]["container"] = []
    assert "container" in faults(manifest)[0]
    trainjob = yaml.safe_load(write_job("trainjob", job(tmp_path)).text)
    trainjob["spec"]["trainer"]["numNodes"] = "2"
    assert faults(trainjob)


@pytest.mark.parametrize("launcher", ["kubernetes", "jobset"])
def test_pods_meet_at_the_first_and_nothing_is_started_twice(tmp_path, launcher):
    *_, manifest = yaml.safe_load_all(write_job(launcher, job(tmp_path)).text)
    spec = manifest["spec"]
    first = "a-run-0"
    if launcher == "jobset":
        assert spec["failurePolicy"] == {"maxRestarts": 0}
        assert spec["network"]["subdomain"] == "a-run"
        spec, first = spec["replicatedJobs"][0]["template"]["spec"], "a-run-node-0-0"

    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (2, 2, 0)
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["subdomain"]) == ("Never", "a-run")
    assert f"--endpoint={first}.a-run:29400" in pod["containers"][0]["command"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shared"}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"image": None}, "--image"),
        ({"volume": None}, "--volume"),
        ({"volume": "Shared"}, "--volume"),
        ({"volume": "shared:/elsewhere"}, "not below /elsewhere"),
    ],
)
def test_what_pods_need_is_asked_for(tmp_path, changes, word):
    with pytest.raises(UserError, match=word):
        write_job("kubernetes", job(tmp_path, **changes))


@pytest.fixture
def api(tmp_path, monkeypatch):
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl")
    with cluster(tmp_path / "kube", apart=False) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


def submitted(folder: Path, launcher: str, python: str):
    asked = job(folder, nodes=1, ranks=2, python=python)
    file = write_job(launcher, asked)
    codec.write_text(file.path, file.text)
    return asked, scheduled.submit(file, launcher)


def ended(asked, submission, limit_s=20.0):
    ends = time.monotonic() + limit_s
    while not (found := scheduled.state(asked.directory, submission)).over and time.monotonic() < ends:
        time.sleep(0.2)
    return found.word


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_kubectl_submits_shows_and_deletes(api, tmp_path, launcher):
    asked, submission = submitted(tmp_path, launcher, "true")
    assert "created" in submission.said
    assert ended(asked, submission) == "completed"

    scheduled.cancel(asked.directory)
    assert scheduled.state(asked.directory, submission).word == "gone"


@pytest.mark.parametrize("lost", [True, False])
def test_why_a_job_ended_is_what_kubernetes_says(api, tmp_path, lost):
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "python").chmod(0o755)
    asked, submission = submitted(tmp_path, "kubernetes", str(tmp_path / "python"))
    while not api.pods.get("a-run"):
        time.sleep(0.05)

    api.disrupt("a-run", 0, lost=lost)

    with pytest.raises(PlannerError, match="disrupted") as caught:
        scheduled.follow(asked, submission, 30.0, tell=lambda _: None, poll_s=0.1, late_s=0.0)
    assert "took a node away" in caught.value.why


def test_a_job_whose_process_fails_or_that_runs_too_long_has_failed(api, tmp_path):
    asked, submission = submitted(tmp_path, "kubernetes", "false")
    assert ended(asked, submission) == "failed"
    api.objects["jobs", "a-run"]["status"]["conditions"][0]["reason"] = "DeadlineExceeded"
    assert scheduled.state(asked.directory, submission).word == "timeout"


def test_what_the_api_refuses_is_said(api, tmp_path):
    asked = job(tmp_path, nodes=1, ranks=2)
    file = write_job("kubernetes", asked)
    codec.write_text(file.path, file.text.replace("completionMode", "completionModus"))

    with pytest.raises(PlannerError, match="refused the job") as caught:
        scheduled.submit(file, "kubernetes")
    assert "completionModus" in caught.value.why
