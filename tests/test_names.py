"""What machines, GPUs and models are called changes no figure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.question.question import question_of
from simulator.collectives.cost import OPS, CollectiveModel
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.estimate import estimate_serving
from simulator.serving.traffic import Lengths, Traffic
from topology.catalog.clusters import cluster
from topology.cluster import Cluster, Node
from topology.rates.groups import group_shape

MODEL = load_model("llama3.2-1b")
NAMES = ("x", "gb300-nvl72 mnnvl h100 pcie mesh a100 L40S")
TRAFFIC = Traffic(prompt=Lengths(mean=100), output=Lengths(mean=8), concurrency=4, requests=8)


def called(machine: Cluster, name: str) -> Cluster:
    """Return a cluster whose every name is made of `name`."""
    kinds = {kind.name: f"{name} {number}" for number, kind in enumerate(machine.gpu_kinds)}

    def node_called(node: Node) -> Node:
        hubs = [*(hub.id for hub in node.vertices), *(nic.label for nic in node.nics)]
        ids = {old: f"{name} {number}" for number, old in enumerate(hubs)}
        return replace(
            node,
            name=name,
            gpus=tuple(replace(gpu, kind=kinds[gpu.kind], name=gpu.name and name) for gpu in node.gpus),
            vertices=tuple(replace(hub, id=ids[hub.id]) for hub in node.vertices),
            nics=tuple(replace(nic, label=ids[nic.label], name=nic.name and ids[nic.label]) for nic in node.nics),
            links=tuple(replace(link, a=ids.get(link.a, link.a), b=ids.get(link.b, link.b)) for link in node.links),
            closest_nics={
                gpu: tuple(ids.get(label, label) for label in near) for gpu, near in node.closest_nics.items()
            },
        )

    return replace(
        machine,
        name=name,
        gpu_kinds=tuple(replace(kind, name=kinds[kind.name], aliases=()) for kind in machine.gpu_kinds),
        groups=tuple(replace(group, node=node_called(group.node)) for group in machine.groups),
    )


def figures(machine: Cluster, model_name: str) -> list[object]:
    """Return times of collectives, a step and its memory, and what an engine's clients see."""
    gpus, node = machine.gpu_count, machine.gpus_per_node
    shape = group_shape(size=gpus, stride=1, gpus_per_node=node, world=gpus)
    model = replace(MODEL, name=model_name)
    question = question_of(model, machine, Workload(seq_len=2048, global_batch_size=gpus), gpus=gpus)
    step = question.estimate([Plan(dp_shard=gpus)])
    collectives = CollectiveModel(machine)
    return [
        *(collectives.choose_many(op, [1.0, 1e6, 1e9], shape) for op in OPS),
        float(step.step_s[0]),
        float(step.reserved_bytes[0]),
        estimate_serving(model, machine, Deployment(engine="vllm", pool=Pool(tp=2)), TRAFFIC),
    ]


@pytest.mark.parametrize(("machine", "gpus"), [("gb200-nvl72", 144), ("dgx-a100", 16), ("l40s-x8", 8)])
def test_other_names_change_no_figure(machine, gpus):
    known = cluster(machine, gpus)
    assert [figures(called(known, name), name) for name in NAMES] == [figures(known, MODEL.name)] * len(NAMES)
