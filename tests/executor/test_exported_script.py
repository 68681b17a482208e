"""The torchrun export starts the executor as it stands: on one host, and on two that find each other."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch")

from planner.export.job import ExportJob
from planner.export.targets.registry import export, find_target
from planner.question.question import question_of
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from tests.planner.conftest import make_cluster

ROOT = Path(__file__).resolve().parents[2]


def script(nodes: int, per_node: int) -> str:
    """The script as exported, but for CPU processes, few steps and a port of its own."""
    question = question_of(
        load_model("tiny-llama"),
        make_cluster(nodes, per_node),
        Workload(seq_len=64, global_batch_size=4),
        runtime=Runtime(name="pytorch", compute_dtype="float32"),
        framework="pytorch",
    )
    job = ExportJob(name="exported", plan=Plan(dp_shard=2), question=question)
    text = export(job, find_target("torchrun")).text
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for said, meant in (
        ('"device":"cuda"', '"device":"cpu"'),
        ('"steps":10,"warm_up":3', '"steps":1,"warm_up":1'),
        ("--master-port=29500", f"--master-port={port}"),
    ):
        assert said in text or (nodes == 1 and "port" in said)
        text = text.replace(said, meant)
    return text


def start(text: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script with this interpreter's torchrun."""
    tools = folder / "tools"
    tools.mkdir(parents=True)
    (tools / "torchrun").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n')
    (tools / "torchrun").chmod(0o755)
    here = folder / "here"
    here.mkdir()
    return subprocess.run(
        ["sh", "-c", text],
        cwd=here,
        env={
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def records(folder: Path, rank: int) -> list[dict]:
    (path,) = folder.glob(f"here/meshwright-*/records/rank{rank}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_one_host_checks_its_numbers_and_takes_its_steps(tmp_path: Path) -> None:
    run = start(script(1, 2), tmp_path)

    assert run.returncode == 0, run.stderr[-2000:]
    for rank in range(2):
        seen = records(tmp_path, rank)
        assert next(line for line in seen if line["kind"] == "mesh")["as_requested"]
        assert next(line for line in seen if line["kind"] == "verified")["ok"]
        assert any(line["kind"] == "step" for line in seen)


@pytest.mark.nightly  # test_two_nodes.py runs two agents; test_launchers.py holds the rank of each host
def test_two_hosts_get_the_node_ranks_they_are_told(tmp_path: Path) -> None:
    text = script(2, 1)
    with ThreadPoolExecutor() as hosts:
        runs = [
            hosts.submit(start, text, tmp_path / str(rank), NODE_RANK=str(rank), MASTER_ADDR="127.0.0.1")
            for rank in range(2)
        ]

    assert [run.result().returncode for run in runs] == [0, 0], runs[0].result().stderr[-2000:]
    for rank in range(2):
        assert next(line for line in records(tmp_path / str(rank), rank) if line["kind"] == "verified")["ok"]


def test_a_host_that_is_not_told_who_it_is_says_so(tmp_path: Path) -> None:
    run = start(script(2, 1), tmp_path)

    assert run.returncode != 0
    assert "NODE_RANK: set it to 0 on the first host" in run.stderr


MEETS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
open(f"met{dist.get_rank()}", "w").write(f"{total.item():.0f} {dist.get_world_size()}")
dist.destroy_process_group()
"""


@pytest.mark.nightly  # starts two agents of torchrun
def test_skypilots_machines_run_a_program_that_meets(tmp_path: Path) -> None:
    """The task's script, started as SkyPilot does: on every machine, with its number and all addresses."""
    question = question_of(
        load_model("tiny-llama"), make_cluster(2, 1), Workload(seq_len=64, global_batch_size=4), framework="pytorch"
    )
    job = ExportJob(name="exported", plan=Plan(dp_shard=2), question=question)
    task = yaml.safe_load(export(job, find_target("skypilot")).text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = task["run"].replace("29500", str(port)).replace("YOUR_PROGRAM.py", str(tmp_path / "meets.py"))
    (tmp_path / "meets.py").write_text(MEETS)
    with ThreadPoolExecutor() as machines:
        runs = [
            machines.submit(
                start,
                text,
                tmp_path / str(number),
                **task["envs"],
                SKYPILOT_NODE_RANK=str(number),
                SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.1",
                GLOO_SOCKET_IFNAME="lo",
            )
            for number in range(task["num_nodes"])
        ]

    assert [run.result().returncode for run in runs] == [0, 0], runs[0].result().stderr[-2000:]
    assert [(tmp_path / str(one) / "here" / f"met{one}").read_text() for one in range(2)] == ["2 2", "2 2"]
