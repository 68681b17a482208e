"""Kubernetes: a TrainJob of Kubeflow Trainer, `trainer.kubeflow.org/v1alpha1`.

Fields: kubeflow-trainer-api 2.3.0. `resourcesPerNode` replaces the runtime's resources, so GPUs are named there. The
operator sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, which torchrun reads.
"""

from __future__ import annotations

import json
from typing import Any

from planner.export.draft import Draft, Target
from planner.export.job import Job
from planner.export.program import network, network_values, program_of
from planner.export.script import BUS_ORDER, PLACED, host_order, one_device_list
from planner.export.slug import slug
from planner.export.yaml_text import yaml_text

VERSION = "2.3.0"
TITLE = f"Kubeflow Trainer {VERSION}"
NAME_ANNOTATION, HASH_ANNOTATION = "meshwright/name", "meshwright/plan"


def write(job: Job) -> Draft:
    """Return the manifest. Raises Infeasible."""
    words, draft = program_of(job)
    hosts = job.hosts()
    devices = one_device_list(hosts, TITLE)
    reasons = network(job, hosts) | draft.environment
    environment = (network_values(job) if network(job, hosts) else {}) | dict.fromkeys(draft.environment, "1")
    if devices:
        environment |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": devices}
        reasons |= {"CUDA_DEVICE_ORDER": BUS_ORDER, "CUDA_VISIBLE_DEVICES": PLACED}
    trainer: dict[str, Any] = {
        "numNodes": hosts.count,
        "numProcPerNode": hosts.ranks_each,
        "command": ["torchrun", *words],
        "resourcesPerNode": {"limits": {"nvidia.com/gpu": hosts.gpus_to_ask}},
    }
    if environment:
        trainer["env"] = [{"name": name, "value": value} for name, value in environment.items()]
    document = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {
            "name": slug(job.name),
            "annotations": {NAME_ANNOTATION: job.name, HASH_ANNOTATION: job.plan_hash},
        },
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": "torch-distributed",
            },
            "trainer": trainer,
        },
    }
    unsaid = draft.unsaid
    if hosts.order_matters:
        unsaid = (*unsaid, "the order of hosts: the scheduler chooses nodes")
    if hosts.count > 1:
        unsaid = (*unsaid, "which nodes: hosts that share a switch are the scheduler's and the runtime's business")
    return Draft(
        body=yaml_text(document),
        settings=_flat(document, ""),
        unsaid=unsaid,
        needed=("spec.trainer.image, or a runtime whose image has the framework", *draft.needed),
        notes=(*draft.notes, *host_order(hosts), *(f"{name}: {why}" for name, why in reasons.items())),
        environment=reasons,
    )


def _flat(value: Any, path: str) -> dict[str, Any]:
    """Return leaves by path: `spec.trainer.numNodes`; lists and free-form maps are leaves."""
    if isinstance(value, dict) and not path.endswith(("annotations", "limits")):
        flat: dict[str, Any] = {}
        for key, inner in value.items():
            flat |= _flat(inner, f"{path}.{key}" if path else key)
        return flat
    return {path: json.loads(json.dumps(value))}


TARGET = Target(name="trainjob", version=VERSION, title="Kubernetes TrainJob", file_name="trainjob.yaml", write=write)
