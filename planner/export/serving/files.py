"""A serving plan as files: a script for one node, a compose file, a Kubernetes deployment."""

from __future__ import annotations

import shlex

from planner.export.serving.commands import PORT, command
from planner.export.serving.separated import require_separable, separated_files
from planner.export.yaml_text import yaml_text
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import engine_of
from topology.codec import JsonObject
from topology.errors import Infeasible

IMAGES = {
    "vllm": "vllm/vllm-openai:latest",
    "sglang": "lmsysorg/sglang:latest",
    "trtllm": "nvcr.io/nvidia/tensorrt-llm/release:latest",
}


def serving_files(deployment: Deployment, model: str, *, longest: int, gpus_per_node: int) -> dict[str, str]:
    """Return the text of each file by name. Raises Infeasible for a plan that these cannot start."""
    pool = deployment.pool
    if deployment.prefill is not None:
        require_separable(deployment)
        image = IMAGES[engine_of(deployment.engine).program]
        return separated_files(deployment, model, longest=longest, gpus_per_node=gpus_per_node, image=image)
    if pool.gpus > gpus_per_node:
        raise Infeasible(
            f"one engine takes {pool.gpus} GPUs, a node has {gpus_per_node}",
            why="engines over several nodes need a launcher that knows their addresses",
            remedy="choose a plan with smaller engines, for example with narrower weights",
        )
    words = command(deployment, pool, model, longest=longest)
    return {
        "serve.sh": _script(deployment, model, longest, gpus_per_node),
        "compose.yaml": yaml_text(_compose(deployment, words, gpus_per_node)),
        "kubernetes.yaml": yaml_text(_kubernetes(deployment, pool, words)),
    }


def _script(deployment: Deployment, model: str, longest: int, gpus_per_node: int) -> str:
    """Return a script that starts the engines of one node, each on its own GPUs and port, and ends them together."""
    pool = deployment.pool
    here = min(pool.engines, gpus_per_node // pool.gpus)
    last = pool.engines % here
    only = f" The last node has the first {last} alone." if last else ""
    lines = [
        "#!/usr/bin/env bash",
        f"# {here} of {pool.engines} engines: run it once on every node.{only}",
        "set -euo pipefail",
    ]
    lines += ["trap 'kill $(jobs -p) 2> /dev/null' EXIT"]
    for number in range(here):
        first = number * pool.gpus
        devices = ",".join(map(str, range(first, first + pool.gpus)))
        words = command(deployment, pool, model, longest=longest, port=PORT + number)
        lines.append(f"CUDA_VISIBLE_DEVICES={devices} {shlex.join(words)} &")
    return "\n".join([*lines, "wait -n", ""])


def _compose(deployment: Deployment, words: list[str], gpus_per_node: int) -> JsonObject:
    pool = deployment.pool
    here = min(pool.engines, gpus_per_node // pool.gpus)
    services = {}
    for number in range(here):
        devices = [str(number * pool.gpus + index) for index in range(pool.gpus)]
        gpus = {"driver": "nvidia", "device_ids": devices, "capabilities": ["gpu"]}
        services[f"engine-{number}"] = {
            "image": IMAGES[engine_of(deployment.engine).program],
            "entrypoint": words[:1],
            "command": words[1:],
            "ports": [f"{PORT + number}:{PORT}"],
            "ipc": "host",
            "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
        }
    return {"services": services}


def _kubernetes(deployment: Deployment, pool: Pool, words: list[str]) -> JsonObject:
    labels = {"app": "model-server"}
    container = {
        "name": "engine",
        "image": IMAGES[engine_of(deployment.engine).program],
        "command": words,
        "ports": [{"containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": 10, "failureThreshold": 180},
        "resources": {"limits": {"nvidia.com/gpu": pool.gpus}},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],  # noqa: S108 - NCCL's, in the container
    }
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": [memory]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "model-server", "labels": labels},
        "spec": {"replicas": pool.engines, "selector": {"matchLabels": labels}, "template": pod},
    }
