"""Kubernetes: a TrainJob of Kubeflow Trainer, `trainer.kubeflow.org/v1alpha1`.

The operator sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, which torchrun
reads. Arguments in `spec.trainer.args` are passed to the program.
"""

from __future__ import annotations

import json
from typing import Any

from planner.export.draft import Draft, Target
from planner.export.job import ExportJob
from planner.export.job_files import slug, train_job
from planner.export.launchers.program import framework_program, node_environment
from planner.export.script import (
    BUS_ORDER_REASON,
    PLACEMENT_REASON,
    command,
    common_device_list,
    file_lines,
    host_order_notes,
)
from planner.export.yaml_text import yaml_text
from simulator.runtimes.environment import Variable
from topology.codec import JsonObject

VERSION = "2.3.0"
TITLE = f"Kubeflow Trainer {VERSION}"
NAME_ANNOTATION, HASH_ANNOTATION = "meshwright/name", "meshwright/plan"


def write(job: ExportJob) -> Draft:
    """Return the manifest. Raises Infeasible."""
    words, draft = framework_program(job)
    hosts = job.hosts()
    devices = common_device_list(hosts, TITLE)
    placed: tuple[Variable, ...] = ()
    if devices:
        placed = (
            Variable(name="CUDA_DEVICE_ORDER", value="PCI_BUS_ID", reason=BUS_ORDER_REASON),
            Variable(name="CUDA_VISIBLE_DEVICES", value=devices, reason=PLACEMENT_REASON),
        )
    extra = (*node_environment(job, hosts, draft), *placed)
    variables = (*job.environment(), *extra)
    # Each container has its own file system, so each writes the files.
    script = f"{file_lines(draft.files)}{draft.body}exec {command(['torchrun', *words])}\n"
    document = train_job(
        slug(job.name),
        nodes=hosts.count,
        ranks_per_node=hosts.ranks_per_host,
        gpus_per_node=hosts.gpus_to_request,
        command=["sh", "-euc", script, "sh"],
        annotations={NAME_ANNOTATION: job.name, HASH_ANNOTATION: job.plan_hash},
        environment={one.name: one.value for one in variables},
    )
    not_expressed = draft.not_expressed
    if hosts.order_matters:
        not_expressed = (*not_expressed, "the order of hosts: the scheduler chooses nodes")
    if hosts.count > 1:
        not_expressed = (
            *not_expressed,
            "which nodes: the scheduler and the runtime decide whether hosts share a switch",
        )
    return Draft(
        body=yaml_text(document),
        settings=_flat(document, ""),
        not_expressed=not_expressed,
        needed=("spec.trainer.image, or a runtime whose image has the framework", *draft.needed),
        notes=(*draft.notes, *host_order_notes(hosts), *(f"{one.name}: {one.reason}" for one in variables)),
        environment=extra,
    )


def _flat(value: Any, path: str) -> JsonObject:
    """Return the leaves of a document by path, such as `spec.trainer.numNodes`; lists and free-form maps are leaves."""
    if isinstance(value, dict) and not path.endswith(("annotations", "limits")):
        flat: JsonObject = {}
        for key, inner in value.items():
            flat |= _flat(inner, f"{path}.{key}" if path else key)
        return flat
    return {path: json.loads(json.dumps(value))}


TARGET = Target(
    name="trainjob",
    version=VERSION,
    title="Kubernetes TrainJob",
    file_name="trainjob.yaml",
    write=write,
    run="kubectl create -f trainjob.yaml",
)
