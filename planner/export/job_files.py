"""Job files of schedulers, for exported plans and for runs of the executor: the parts that request nodes and GPUs.

Sources: sbatch(1); Kubernetes' Indexed Jobs and headless services (batch/v1, v1 of 1.37); JobSet
(jobset.x-k8s.io/v1alpha2); Kubeflow Trainer v2's TrainJob (trainer.kubeflow.org/v1alpha1, kubeflow-trainer-api 2.3.0),
where `resourcesPerNode` replaces the runtime's resources, so GPUs are named there.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topology.codec import JsonObject

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - of a pod, where NCCL's ranks meet; 64 MiB by default
BASH = "#!/bin/bash"
# Expanded by the shell of the job: the first node of the allocation is the rendezvous.
FIRST_NODE = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
MAX_CHARACTERS = 40


def slurm_options(name: str, *, nodes: int, gpus_per_node: int) -> JsonObject:
    """Return the sbatch options for one task on each of `nodes`; a node may need no GPU."""
    asked = {"gpus-per-node": gpus_per_node} if gpus_per_node else {}
    return {"job-name": name, "nodes": nodes, "ntasks-per-node": 1, **asked}


def directives(options: Mapping[str, Any]) -> str:
    """Return `#SBATCH` lines, with values quoted as sbatch reads them; a value of None is an option without one."""
    return "".join(
        f"#SBATCH --{name}\n" if value is None else f"#SBATCH --{name}={shlex.quote(str(value))}\n"
        for name, value in options.items()
    )


def train_job(
    name: str,
    *,
    nodes: int,
    ranks_per_node: int,
    gpus_per_node: int,
    command: Sequence[str],
    image: str | None = None,
    annotations: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> JsonObject:
    """Return a TrainJob of the runtime torch-distributed, which sets the rendezvous of torchrun's agents."""
    trainer: JsonObject = {
        **({"image": image} if image else {}),
        "numNodes": nodes,
        "numProcPerNode": ranks_per_node,
        "command": list(command),
        **({"resourcesPerNode": {"limits": {"nvidia.com/gpu": gpus_per_node}}} if gpus_per_node else {}),
    }
    if environment:
        trainer["env"] = [{"name": variable, "value": value} for variable, value in environment.items()]
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed"}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name, **({"annotations": dict(annotations)} if annotations else {})},
        "spec": {"runtimeRef": runtime, "trainer": trainer},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """One pod on each of `nodes`, which all mount the claim at `mount`. `limit_s` is their time limit."""

    name: str
    nodes: int
    gpus_per_node: int
    command: Sequence[str]
    image: str
    claim: str
    mount: str
    limit_s: int

    def job_spec(self, subdomain: str) -> JsonObject:
        """Return the specification of an Indexed Job. Nothing is restarted, since a run would be measured twice."""
        limits = {"resources": {"limits": {"nvidia.com/gpu": self.gpus_per_node}}} if self.gpus_per_node else {}
        container: JsonObject = {
            "name": "node",
            "image": self.image,
            "command": list(self.command),
            "volumeMounts": [
                {"name": "shared", "mountPath": self.mount},
                {"name": "memory", "mountPath": SHARED_MEMORY},
            ],
            **limits,
        }
        pod: JsonObject = {
            "restartPolicy": "Never",
            "subdomain": subdomain,
            "containers": [container],
            "volumes": [
                {"name": "shared", "persistentVolumeClaim": {"claimName": self.claim}},
                {"name": "memory", "emptyDir": {"medium": "Memory"}},
            ],
        }
        disrupted = {"type": "DisruptionTarget", "status": "True"}
        return {
            "completionMode": "Indexed",
            "completions": self.nodes,
            "parallelism": self.nodes,
            "backoffLimit": 0,
            "activeDeadlineSeconds": self.limit_s,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onPodConditions": [disrupted]}]},
            "template": {"metadata": {"labels": {"meshwright": self.name}}, "spec": pod},
        }


def indexed_job(pods: Pods) -> list[JsonObject]:
    """Return a headless service, by which pods NAME-0, NAME-1, ... find each other, and the Job of the pods."""
    service = {"clusterIP": "None", "selector": {"meshwright": pods.name}, "publishNotReadyAddresses": True}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": pods.name}, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": pods.name}, "spec": pods.job_spec(pods.name)},
    ]


def job_set(pods: Pods) -> JsonObject:
    """Return a JobSet of one Job, whose pods are NAME-node-0-0, NAME-node-0-1, ..."""
    replicated = {"name": "node", "replicas": 1, "template": {"spec": pods.job_spec(pods.name)}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": pods.name},
        "spec": {
            "failurePolicy": {"maxRestarts": 0},
            "network": {"enableDNSHostnames": True, "subdomain": pods.name},
            "replicatedJobs": [replicated],
        },
    }


def slug(name: str) -> str:
    """Return `name` if it is a DNS label, otherwise a label made from it, with a hash that keeps names distinct."""
    cleaned = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if name and cleaned == name and len(name) <= MAX_CHARACTERS:
        return name
    return f"{cleaned[:MAX_CHARACTERS].strip('-') or 'job'}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def renamed(name: str) -> tuple[str, ...]:
    """Return what a job file does not express of a job's name, if it is no DNS label."""
    return () if slug(name) == name else (f"the job's name {name!r}: written as {slug(name)!r}",)
