"""What keeps a job from running is found before it is queued: in what Slurm declares, and in what nodes answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.runs.schedulers.node_answers import ERROR, judge_nodes
from planner.runs.schedulers.slurm import _gpus_of
from tests.tools import slurm_nodes

ROOT = Path(__file__).parents[2]
SOFTWARE = {"python": "3.11.7", "meshwright": "0.2.0", "torch": "2.13.0"}


def node(name, **changes):
    found = {
        "node": name,
        "host": name,
        "versions": SOFTWARE,
        "gpu_devices": 8,
        "sees_file": True,
        "resolved": {"n1": ["10.0.0.1"], "n2": ["10.0.0.2"]},
        "port_free": True,
        "unreached": "",
        "interfaces": ["ib0", "eth0"],
        "nccl_interface": "",
    }
    return {**found, **changes}


def faults(*answers, nodes=2, gpus=8):
    return {one.code for one in judge_nodes(answers, nodes, gpus) if one.severity == ERROR}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"sees_file": False}, "folder"),
        ({"gpu_devices": 7}, "devices"),
        ({"versions": {**SOFTWARE, "torch": "2.11.0"}}, "versions"),
        ({"versions": {"python": "3.11.7"}}, "torch"),
        ({"resolved": {"n1": [], "n2": ["10.0.0.2"]}}, "names"),
        ({"resolved": {"n1": ["127.0.1.1"], "n2": ["127.0.1.1"]}}, "names"),
        ({"nccl_interface": "bond0"}, "interfaces"),
        ({"unreached": "no answer from 10.0.0.1"}, "port"),
    ],
)
def test_a_fault_of_a_node_is_found(changes, code):
    assert code in faults(node("n1"), node("n2", **changes))


def test_what_is_alike_and_reached_has_no_fault():
    assert faults(node("n1"), node("n2")) == set()
    assert faults(node("n1", nccl_interface="^docker,lo"), node("n2", nccl_interface="eth,ib")) == set()
    assert faults(node("n1", versions={**SOFTWARE, "python": "3.12.3"}), node("n2")) == set()


def test_a_port_counts_where_the_nodes_meet_and_silent_nodes_are_named():
    assert faults(node("n1"), node("n2", port_free=False)) == set()
    assert faults(node("n1", port_free=False), node("n2")) == {"port"}
    (found,) = (one for one in judge_nodes([node("n1")], 2, 8) if one.severity == ERROR)
    assert (found.code, found.why) == ("answers", "n2 did not")


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("(null)", 0), ("gpu:8", 8), ("gpu:h100:8(S:0-1)", 8), ("gpu:h100:4,gpu:a100:4,shard:16", 8), ("gpu", 1)],
)
def test_gpus_are_read_as_slurm_declares_them(gres, gpus):
    assert _gpus_of(gres) == gpus


REAL = pytest.mark.skipif(
    bool(slurm_nodes.missing()), reason="no Slurm: apt-get install munge slurmctld slurmd, as root"
)


def asked(cluster, folder, *words):
    environment = {**os.environ, **cluster.environment, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(folder / "data")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "planner", *words, "--json"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@REAL
@pytest.mark.nightly
def test_a_real_slurm_is_checked_and_runs_a_job_of_two_nodes(tmp_path):
    with slurm_nodes.cluster(tmp_path / "slurm") as cluster:
        assert asked(cluster, tmp_path, "doctor", "--launcher=slurm", "--gpus-per-node=0")[0] == 0
        code, found = asked(cluster, tmp_path, "doctor", "--launcher=slurm")
        assert code == 1, "its GPUs are files that no driver has made"
        assert {one["code"] for one in found["items"] if one["severity"] == "error"} == {"devices"}
        too_many = asked(cluster, tmp_path, "doctor", "--launcher=slurm", "--gpus-per-node=8")[1]
        assert too_many["items"][0]["code"] == "gpus"
        code, run = asked(cluster, tmp_path, "apply", "--launcher=slurm", "--submit", "--wait=4m", "--out=run")
        assert (code, run["status"]) == (0, "finished")


@REAL
@pytest.mark.nightly
def test_names_that_lead_nowhere_are_found_before_a_job_and_by_one(tmp_path):
    with slurm_nodes.cluster(tmp_path / "slurm", resolved=False) as cluster:
        found = asked(cluster, tmp_path, "doctor", "--launcher=slurm", "--gpus-per-node=0")[1]
        assert found["items"][0]["code"] == "names"
        code, run = asked(cluster, tmp_path, "apply", "--launcher=slurm", "--submit", "--wait=4m", "--out=run")
        assert code == 1
        assert "mw1 leads to no address" in run["failure"]["message"]
