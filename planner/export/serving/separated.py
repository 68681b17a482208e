"""A disaggregated plan as files: engines for prompts, engines for answers, and the router for clients.

The cache is sent by NIXL. SGLang: sglang/srt/server_args.py (disaggregation) and sglang_router/router_args.py. vLLM:
docs/features/nixl_connector_usage.md, whose router is toy_proxy_server.py of its repository
(tests/v1/kv_connector/nixl_integration).
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from planner.export.serving.commands import PORT, command
from planner.export.yaml_text import yaml_text
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import engine_of
from topology.codec import JsonObject
from topology.errors import Infeasible

BOOTSTRAP_PORT = 8998  # port at which an SGLang prompt engine tells others how to fetch its cache (default)
SIDE_CHANNEL_PORT = 5600  # the same for vLLM, one port for each rank of attention with its own requests (default)
PROXY = "toy_proxy_server.py"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - NCCL's, in the container


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine of a plan: its task, its index among those with the same task, and its pool."""

    mode: str  # prefill or decode
    number: int
    pool: Pool

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.number}"


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an engine: its server's port, and the port at which its cache is fetched."""

    host: str
    port: int = PORT
    fetched_at: int = 0


def _is_vllm(deployment: Deployment) -> bool:
    return engine_of(deployment.engine).program == "vllm"


def require_separable(deployment: Deployment) -> None:
    """Raise Infeasible for an engine whose parts cannot be started separately."""
    if engine_of(deployment.engine).program not in {"sglang", "vllm"}:
        raise Infeasible(
            "engines that only read or only write are started for SGLang and vLLM",
            why="others connect them through a router that is not part of the engine",
            remedy="use --engine sglang or vllm, leave --separate out, or take the degrees to NVIDIA Dynamo",
        )


def separated_files(
    deployment: Deployment, model: str, *, longest: int, gpus_per_node: int, image: str
) -> dict[str, str]:
    """Return the text of each file by name: Kubernetes always, a script and a compose file where one node holds all.

    Raises Infeasible for engines that cannot be started apart, or that are larger than a node.
    """
    require_separable(deployment)
    engines = _engines(deployment)
    largest = max(engine.pool.gpus for engine in engines)
    if largest > gpus_per_node:
        raise Infeasible(
            f"one engine takes {largest} GPUs, a node has {gpus_per_node}",
            why="engines over several nodes need a launcher that knows their addresses",
            remedy="choose a plan with smaller engines, for example with narrower weights",
        )
    files = {}
    if deployment.gpus <= gpus_per_node:
        files["serve.sh"] = _script(deployment, engines, model, longest)
        files["compose.yaml"] = yaml_text(_compose(deployment, engines, model, longest, image))
    documents = _kubernetes(deployment, engines, model, longest, image)
    return files | {"kubernetes.yaml": "---\n".join(yaml_text(document) for document in documents)}


def _engines(deployment: Deployment) -> list[Engine]:
    reading = deployment.prefill or Pool(engines=0)
    return [
        Engine(mode, number, pool)
        for mode, pool in (("prefill", reading), ("decode", deployment.pool))
        for number in range(pool.engines)
    ]


def engine_words(deployment: Deployment, engine: Engine, model: str, longest: int, address: Address) -> list[str]:
    """Return the command of one engine at an address."""
    words = command(deployment, engine.pool, model, longest=longest, port=address.port)
    if _is_vllm(deployment):
        role = {"prefill": "kv_producer", "decode": "kv_consumer"}[engine.mode]
        return [*words, "--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": role})]
    words += ["--disaggregation-mode", engine.mode, "--disaggregation-transfer-backend", "nixl"]
    if engine.mode == "prefill":
        words += ["--disaggregation-bootstrap-port", str(address.fetched_at)]
    return words


def engine_environment(deployment: Deployment, address: Address) -> dict[str, str]:
    """Return an engine's environment: for vLLM, the address at which its cache is fetched."""
    if not _is_vllm(deployment):
        return {}
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": address.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(address.fetched_at)}


def router_words(deployment: Deployment, addresses: dict[Engine, Address], *, proxy: str = PROXY) -> list[str]:
    """Return the command of the router for all engines."""
    words = ["--host", "0.0.0.0", "--port", str(PORT)]  # noqa: S104
    if _is_vllm(deployment):
        for name, mode in (("prefiller", "prefill"), ("decoder", "decode")):
            chosen = [address for engine, address in addresses.items() if engine.mode == mode]
            words += [f"--{name}-hosts", *(one.host for one in chosen)]
            words += [f"--{name}-ports", *(str(one.port) for one in chosen)]
        return ["python3", proxy, *words]
    for engine, address in addresses.items():
        words += [f"--{engine.mode}", f"http://{address.host}:{address.port}"]
        words += [str(address.fetched_at)] if engine.mode == "prefill" else []
    return ["python", "-m", "sglang_router.launch_router", "--pd-disaggregation", *words]


def _fetched_at(deployment: Deployment, place: int) -> int:
    """Return the port at which one of several engines' caches on a host is fetched."""
    if _is_vllm(deployment):
        widest = max(pool.dp_attention for pool in (deployment.pool, deployment.prefill or deployment.pool))
        return SIDE_CHANNEL_PORT + place * widest
    return BOOTSTRAP_PORT + place


def _script(deployment: Deployment, engines: list[Engine], model: str, longest: int) -> str:
    """Return a script for one node that starts all engines, each on its own GPUs, and the router."""
    lines = ["#!/usr/bin/env bash"]
    if _is_vllm(deployment):
        lines.append(f"# {PROXY}: of vLLM's repository, tests/v1/kv_connector/nixl_integration, next to this file.")
    lines += ["set -euo pipefail", "trap 'kill $(jobs -p) 2> /dev/null' EXIT"]
    addresses = {
        engine: Address("127.0.0.1", PORT + place, _fetched_at(deployment, place))
        for place, engine in enumerate(engines, 1)
    }
    first = 0
    for engine, address in addresses.items():
        devices = ",".join(map(str, range(first, first + engine.pool.gpus)))
        variables = {"CUDA_VISIBLE_DEVICES": devices, **engine_environment(deployment, address)}
        words = engine_words(deployment, engine, model, longest, address)
        lines.append(f"{' '.join(f'{name}={value}' for name, value in variables.items())} {shlex.join(words)} &")
        first += engine.pool.gpus
    return "\n".join([*lines, f"{shlex.join(router_words(deployment, addresses))} &", "wait -n", ""])


def _compose(deployment: Deployment, engines: list[Engine], model: str, longest: int, image: str) -> JsonObject:
    """Return one service per engine, found by its name, and the router, the only one whose port is published."""
    addresses = {engine: Address(engine.name, PORT, _fetched_at(deployment, 0)) for engine in engines}
    services: JsonObject = {}
    first = 0
    for engine, address in addresses.items():
        words = engine_words(deployment, engine, model, longest, address)
        devices = [str(first + index) for index in range(engine.pool.gpus)]
        gpus = {"driver": "nvidia", "device_ids": devices, "capabilities": ["gpu"]}
        services[engine.name] = {
            "image": image,
            "entrypoint": words[:1],
            "command": words[1:],
            "environment": engine_environment(deployment, address),
            "ipc": "host",
            "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
        }
        first += engine.pool.gpus
    words = router_words(deployment, addresses, proxy=f"/{PROXY}")
    services["router"] = {
        "image": image,
        "entrypoint": words[:1],
        "command": words[1:],
        "ports": [f"{PORT}:{PORT}"],
        "volumes": [f"./{PROXY}:/{PROXY}:ro"] if _is_vllm(deployment) else [],
        "depends_on": list(services),
    }
    return {"services": services}


def _kubernetes(
    deployment: Deployment, engines: list[Engine], model: str, longest: int, image: str
) -> list[JsonObject]:
    """Return a StatefulSet for each kind of engine, with the service that names its pods, and the router with
    its own.
    """
    addresses = {
        engine: Address(f"{engine.name}.{engine.mode}", PORT, _fetched_at(deployment, 0)) for engine in engines
    }
    documents: list[JsonObject] = []
    for mode in ("prefill", "decode"):
        of_mode = [engine for engine in engines if engine.mode == mode]
        labels = {"app": "model-server", "role": mode}
        address = addresses[of_mode[0]]
        container = {
            "name": "engine",
            "image": image,
            "command": engine_words(deployment, of_mode[0], model, longest, address),
            "env": _pod_environment(deployment, address),
            "ports": [{"containerPort": PORT}, {"containerPort": address.fetched_at}],
            "readinessProbe": {
                "httpGet": {"path": "/health", "port": PORT},
                "periodSeconds": 10,
                "failureThreshold": 180,
            },
            "resources": {"limits": {"nvidia.com/gpu": of_mode[0].pool.gpus}},
            "volumeMounts": [{"name": "shared-memory", "mountPath": SHARED_MEMORY}],
        }
        volumes = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
        documents += [
            _service(mode, labels, headless=True),
            _workload("StatefulSet", mode, labels, container, volumes, len(of_mode)),
        ]
    labels = {"app": "model-server", "role": "router"}
    container = {
        "name": "router",
        "image": image,
        "command": router_words(deployment, addresses, proxy=f"/proxy/{PROXY}"),
        "ports": [{"containerPort": PORT}],
    }
    volumes = []
    if _is_vllm(deployment):  # kubectl create configmap proxy --from-file toy_proxy_server.py
        container["volumeMounts"] = [{"name": "proxy", "mountPath": "/proxy"}]
        volumes = [{"name": "proxy", "configMap": {"name": "proxy"}}]
    router = _workload("Deployment", "router", labels, container, volumes, 1)
    return [*documents, _service("router", labels, headless=False), router]


def _pod_environment(deployment: Deployment, address: Address) -> list[JsonObject]:
    """Return the environment of a pod, whose cache is fetched at its own address."""
    found = engine_environment(deployment, address)
    own = {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return [{"name": name, **(own if name.endswith("_HOST") else {"value": value})} for name, value in found.items()]


def _service(name: str, labels: dict[str, str], *, headless: bool) -> JsonObject:
    spec: JsonObject = {"selector": labels, "ports": [{"port": PORT}]}
    if headless:
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": labels}, "spec": spec}


def _workload(
    kind: str,
    name: str,
    labels: dict[str, str],
    container: JsonObject,
    volumes: list[JsonObject],
    replicas: int,
) -> JsonObject:
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes}}
    spec: JsonObject = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": pod}
    if kind == "StatefulSet":
        spec |= {"serviceName": name, "podManagementPolicy": "Parallel"}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "labels": labels}, "spec": spec}
