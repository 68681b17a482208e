"""Jobs for schedulers: what is written can be read by them, and no name or path becomes a command."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from executor.launch.request import Request
from planner.question.plan_file import load_plan, plan_file, save_plan
from planner.runs.schedulers.launchers import (
    JOIN_S,
    LauncherJob,
    collect_command,
    node_command,
    slurm,
    submit,
    torchrun,
    trainjob,
)
from simulator.config.plan import Plan
from tests.planner.conftest import make_cluster, planned
from topology import codec
from topology.errors import BadInput, PlannerError, UserError


def job(**changes: object) -> LauncherJob:
    return LauncherJob(
        **{"name": "a-run", "directory": Path("/shared/run"), "ranks": 16, "nodes": 2, "budget_s": 600.0, **changes}
    )


@pytest.mark.parametrize(
    "name", ["", "A", "a b", "a;rm", '"; rm -rf ~ #', "a\nb", "-a", "a-", "a" * 54, "!!python/object", "$(x)", "ä"]
)
def test_names_that_schedulers_or_shells_would_trip_over_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="not a valid job name"):
        job(name=name)


@pytest.mark.parametrize("endpoint", ["host", "host:", ":1", "host:x", "h;x:1", "$(x):1", "a b:1", "host:1234567"])
def test_endpoints_are_hosts_and_ports(endpoint: str) -> None:
    with pytest.raises(UserError, match="--endpoint"):
        job(endpoint=endpoint)


def test_ranks_share_out_evenly() -> None:
    with pytest.raises(UserError, match="16 ranks"):
        job(nodes=3)


def test_a_batch_script_is_bash_with_the_resources_of_the_plan(tmp_path) -> None:
    written = slurm(job())

    directives = [line.removeprefix("#SBATCH ") for line in written.text.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--gpus-per-node=8", "--ntasks-per-node=1", "--job-name=a-run", "--time=15"} <= set(directives)
    (tmp_path / "job").write_text(written.text)
    subprocess.run(["bash", "-n", str(tmp_path / "job")], check=True)
    assert written.submit == ("sbatch", "/shared/run/job.sbatch")
    assert "--collect" in written.text


@pytest.mark.parametrize("path", ["/a b", "/a;b", "/a$(b)", "/a\n#SBATCH --x", "/a'b"])
def test_paths_that_cannot_stand_in_a_directive_are_refused(path: str) -> None:
    with pytest.raises(BadInput, match="#SBATCH"):
        slurm(job(directory=Path(path)))


@given(st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0/"), min_size=1, max_size=30))
def test_any_path_reaches_the_nodes_as_it_is(part: str) -> None:
    """The script's words, split as a shell would, are the argument list; the manifest's command is the same list."""
    asked = job(directory=Path("/shared") / part, endpoint="node0:29400", image="an/image:tag")

    text = torchrun(asked).text.splitlines(keepends=True)
    words = shlex.split("".join(text[2:]))
    assert words == ["exec", *node_command(asked, endpoint="node0:29400")]
    manifest = yaml.safe_load(trainjob(asked).text)
    assert manifest["spec"]["trainer"]["command"] == node_command(asked, endpoint=None, join_s=JOIN_S)


def test_a_trainjob_names_image_nodes_and_gpus() -> None:
    manifest = yaml.safe_load(trainjob(job(image="an/image:tag")).text)

    assert (manifest["kind"], manifest["apiVersion"]) == ("TrainJob", "trainer.kubeflow.org/v1alpha1")
    trainer = manifest["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (2, 8, "an/image:tag")
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 8}
    with pytest.raises(UserError, match="--image"):
        trainjob(job())


def test_agents_that_nobody_starts_must_be_told_where_to_meet() -> None:
    with pytest.raises(UserError, match="--endpoint"):
        torchrun(job())
    assert collect_command(job())[-1] == "--collect"


def test_a_scheduler_that_is_absent_or_refuses_is_told() -> None:
    with pytest.raises(PlannerError, match="there is no no-such-scheduler here") as absent:
        submit(["no-such-scheduler", "a job"])
    assert absent.value.remedy == "there: no-such-scheduler 'a job'"
    with pytest.raises(PlannerError, match="refused the job"):
        submit(["false"])
    assert submit(["echo", "Submitted batch job 7"]) == "Submitted batch job 7"


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A plan for two nodes of eight GPUs."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    content = planned(make_cluster(nodes=2))
    save_plan(plan_file(content.question(), replace(content.plan, placement=()), content.estimate), path)
    return path


def test_a_job_is_written_with_a_request_that_the_executor_reads(planner, saved, tmp_path) -> None:
    done = planner("apply", saved, "--launcher", "slurm", "--out", tmp_path / "run", "--budget", "10m", "--json")

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["nodes"], said["ranks_per_node"]) == (2, 8)
    assert (tmp_path / "run" / "job.sbatch").read_text() == said["text"]
    request = codec.convert(codec.read_json(tmp_path / "run" / "request.json"), Request, where="request")
    assert request.plan.gpus == 16
    assert request.predicted["step_s"]["value"] > 0


@pytest.mark.parametrize(("launcher", "word"), [(("slurm",), "gpus"), (("trainjob", "--image", "ours"), "nvidia.com")])
def test_a_job_on_cpus_asks_for_no_gpu(planner, saved, tmp_path, launcher, word) -> None:
    """So that a cluster can be tried without any: `--device` holds for jobs, too."""
    flags = ("--launcher", *launcher, "--out", tmp_path / "run", "--dry-run", "--json")
    on_cpus, on_gpus = (
        json.loads(planner("apply", saved, *device, *flags).stdout) for device in (("--device", "cpu"), ())
    )

    assert (on_cpus["request"]["device"], on_gpus["request"]["device"]) == ("cpu", "cuda")
    assert word in on_gpus["text"]
    assert word not in on_cpus["text"]


def test_a_dry_run_writes_nothing(planner, saved, tmp_path) -> None:
    arguments = ("--launcher", "torchrun", "--endpoint", "node0:29400", "--out", tmp_path / "run", "--dry-run")

    done = planner("apply", saved, *arguments)

    assert done.returncode == 0
    assert "executor.run.apply" in done.stdout
    assert not (tmp_path / "run").exists()


def test_submitting_calls_the_scheduler_with_an_argument_list(planner, saved, tmp_path, monkeypatch) -> None:
    seen = tmp_path / "seen"
    fake = tmp_path / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {shlex.quote(str(seen))}\necho Submitted batch job 7\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")

    done = planner("apply", saved, "--launcher", "slurm", "--submit", "--out", tmp_path / "run")

    assert done.returncode == 0, done.stderr
    assert "Submitted batch job 7" in done.stdout
    assert seen.read_text().splitlines() == [str(tmp_path / "run" / "job.sbatch")]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--launcher", "carrier-pigeon"),
        ("--launcher", "torchrun"),
        ("--launcher", "trainjob"),
        ("--launcher", "slurm", "--job-name", "a; rm -rf ~"),
        ("--launcher", "slurm", "--nodes", "3"),
        ("--launcher", "torchrun", "--endpoint", "a:1", "--submit"),
        ("--nodes", "2"),
        ("--submit",),
    ],
)
def test_questions_that_cannot_be_meant_are_code_2(planner, saved, tmp_path, arguments) -> None:
    assert planner("apply", saved, *arguments, "--out", tmp_path / "run").returncode == 2
    assert not (tmp_path / "run").exists()


def test_a_plan_that_names_its_gpus_is_no_job(planner, saved, tmp_path) -> None:
    content = load_plan(saved)
    placed = Plan(dp_shard=16, placement=(*range(1, 16), 0))
    save_plan(plan_file(content.question(), placed, content.estimate), tmp_path / "placed.json")

    done = planner("apply", tmp_path / "placed.json", "--launcher", "slurm", "--out", tmp_path / "run")

    assert done.returncode == 2
    assert "scheduler would not honour" in done.stderr
