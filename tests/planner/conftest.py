"""Machines and models small enough to check by hand, and the command line as a process."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import planner.answers.estimate as estimate_answer
import planner.commands.explain as explain_command
import planner.search.answer as search_answer
from planner.cli import main
from planner.question.plan_file import PlanFile, plan_file
from planner.question.question import question_of
from planner.search.search import SearchOptions, suggest
from simulator.config.model import MixtureOfExperts, Model
from simulator.config.workload import Workload
from topology.cluster import (
    Cluster,
    Fabric,
    FabricKind,
    Gpu,
    GpuKind,
    Link,
    LinkKind,
    Nic,
    Node,
    NodeGroup,
    Vertex,
    VertexKind,
)

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "data" / "cases"


def make_cluster(
    nodes=1, gpus_per_node=8, *, memory_gib=80.0, nvlink=True, nvlink_rate=450e9, network=50e9, power_w=700.0
):
    """Return `nodes` switched nodes of H100-like GPUs, or PCIe-only ones."""
    kind = GpuKind(
        name="h100-sxm",
        title="H100",
        architecture="Hopper",
        compute_capability=90,
        sm_count=132,
        memory_bytes=int(memory_gib * 2**30),
        memory_bytes_per_s=3.35e12,
        peak_flops={"bfloat16": 989e12, "float32": 67e12},
        achieved_flops={"bfloat16": 700e12},
        nvlink_links=18,
        nvlink_bytes_per_s=nvlink_rate / 18,
        nvlink_nccl_bytes_per_s=0.8 * nvlink_rate / 18,
        pcie_bytes_per_s=64e9,
        power_w=power_w,
    )
    links = tuple(
        Link(
            a=f"gpu{i}",
            b="nvswitch" if nvlink else "cpu0",
            kind=LinkKind.NVSWITCH if nvlink else LinkKind.PCIE,
            bytes_per_s=nvlink_rate if nvlink else 64e9,
            count=18,
        )
        for i in range(gpus_per_node)
    )
    node = Node(
        name="node",
        gpus=tuple(Gpu(index=i, kind="h100-sxm") for i in range(gpus_per_node)),
        vertices=(Vertex(id="nvswitch", kind=VertexKind.NVSWITCH), Vertex(id="cpu0", kind=VertexKind.CPU)),
        nics=tuple(Nic(label=f"mlx5_{i}", bytes_per_s=network) for i in range(gpus_per_node)),
        links=links,
    )
    return Cluster(
        name="test",
        gpu_kinds=(kind,),
        groups=(NodeGroup(node=node, count=nodes),),
        fabric=Fabric(kind=FabricKind.RAIL_OPTIMISED),
    )


TINY = Model(name="tiny", family="llama", layers=4, hidden=512, heads=8, kv_heads=4, head_dim=64, ffn=1536, vocab=32000)
LLAMA8B = Model(
    name="llama3-8b",
    family="llama",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=14336,
    vocab=128256,
)
MIXTRAL = replace(
    LLAMA8B, name="mixtral", ffn=14336, vocab=32000, moe=MixtureOfExperts(experts=8, experts_per_token=2, ffn=14336)
)


def planned(cluster: Cluster) -> PlanFile:
    """Return the best plan for Llama-3 8B on a cluster, as it is saved."""
    question = question_of(LLAMA8B, cluster, Workload(seq_len=4096, global_batch_size=64))
    result = suggest(question, SearchOptions(top=1))
    return plan_file(result.question, result.plans[0].plan, result.plans[0].estimate)


@pytest.fixture(scope="session")
def content() -> PlanFile:
    """A plan for eight H100s."""
    return planned(make_cluster())


@pytest.fixture
def tiny():
    return TINY


@pytest.fixture
def llama8b():
    return LLAMA8B


@pytest.fixture
def mixtral():
    return MIXTRAL


@pytest.fixture
def cluster():
    return make_cluster()


@pytest.fixture
def cluster_of():
    return make_cluster


@pytest.fixture
def workload():
    return Workload(seq_len=4096, global_batch_size=64)


@dataclass
class Finished:
    """A command that ran in this process: its exit code, both streams, and what it printed as JSON."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.stdout)


def kept(ask: Callable[..., Any], answers: dict[bytes, Any]) -> Callable[..., Any]:
    """Return `ask`, which gives what it was asked before without working it out again, unless early answers count."""

    def asked(*what: Any, early: Any = None, **more: Any) -> Any:
        if early is not None:
            return ask(*what, early=early, **more)
        key = pickle.dumps((ask.__name__, what))
        if key not in answers:
            answers[key] = ask(*what, **more)
        return answers[key]

    return asked


def searched_once(patch: pytest.MonkeyPatch, answers: dict[bytes, Any]) -> None:
    """Have commands that run in this process take from `answers` what they have asked before."""
    for place in (search_answer, explain_command):
        patch.setattr(place, "suggest", kept(place.suggest, answers))
    patch.setattr(estimate_answer, "answer_plan", kept(estimate_answer.answer_plan, answers))


@pytest.fixture
def planner(capsys, monkeypatch):
    """Run the command line in this process; return its exit code and both streams. What a test asks again, as text and
    as JSON or of a saved plan, is searched once.
    """
    answers: dict[bytes, Any] = {}

    def run(*arguments, stdin="", env=None):
        with monkeypatch.context() as patch:
            searched_once(patch, answers)
            for name, value in {"COLUMNS": "80", **(env or {})}.items():
                patch.setenv(name, value)
            patch.setattr("sys.stdin", io.StringIO(stdin))
            capsys.readouterr()
            code = main([str(argument) for argument in arguments])
        return Finished(code, *capsys.readouterr())

    return run


@pytest.fixture
def planner_process():
    """Run the command line in a process of its own; return its CompletedProcess."""

    def run(*arguments, **options):
        return subprocess.run(
            [sys.executable, "-m", "planner", *map(str, arguments)],
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
            cwd=ROOT,
            **(options or {"capture_output": True}),
        )

    return run
