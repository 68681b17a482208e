"""Job files of schedulers, for exported plans and for runs of the executor: the parts that request nodes and GPUs.

Sources: sbatch(1); Kubeflow Trainer v2's TrainJob (trainer.kubeflow.org/v1alpha1, kubeflow-trainer-api 2.3.0), where
`resourcesPerNode` replaces the runtime's resources, so GPUs are named there.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from topology.codec import JsonObject

BASH = "#!/bin/bash"
# Expanded by the shell of the job: the first node of the allocation is the rendezvous.
FIRST_NODE = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'


def slurm_options(name: str, *, nodes: int, gpus_per_node: int) -> JsonObject:
    """Return the sbatch options for one task on each of `nodes`, of which each may need no GPU."""
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
