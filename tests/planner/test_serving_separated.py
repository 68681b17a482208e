"""Separated plans as files: every engine once, its flags real ones, and a router that finds every engine where it
listens.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
from itertools import pairwise

import pytest
import yaml

from planner.configs.formats.command_line import CommandLine, option_kinds
from planner.configs.serving import VERSIONS
from planner.export.schema import schema
from planner.export.serving.files import serving_files
from simulator.serving.deployment import Deployment, Pool

PLANS = {
    "vllm": Deployment(engine="vllm", pool=Pool(engines=2, tp=2), prefill=Pool(engines=4)),
    "sglang": Deployment(engine="sglang", pool=Pool(tp=4), prefill=Pool(engines=2, tp=2)),
}


def router_addresses(words: list[str]) -> list[tuple[str, str]]:
    """Return (host, port) of all engines that a router is given, by the parser of each."""
    if "toy_proxy_server.py" not in words[1]:
        reported = [(before, word) for before, word in pairwise(words) if before in {"--prefill", "--decode"}]
        return [tuple(url.removeprefix("http://").split(":")) for _, url in reported]
    parser = argparse.ArgumentParser()  # as toy_proxy_server.py of vLLM has it
    parser.add_argument("--port", type=int)
    parser.add_argument("--host")
    for name in ("prefiller", "decoder"):
        parser.add_argument(f"--{name}-hosts", nargs="+")
        parser.add_argument(f"--{name}-ports", type=int, nargs="+")
    found = parser.parse_args(words[2:])
    hosts, ports = found.prefiller_hosts + found.decoder_hosts, found.prefiller_ports + found.decoder_ports
    return [(host, str(port)) for host, port in zip(hosts, ports, strict=True)]


def assert_taken(engine: str, words: list[str]) -> None:
    """Every flag is one of the engine's own parser, with a value of its type and choices."""
    keys = schema(engine, VERSIONS[engine])["keys"]
    for flag, value in CommandLine(shlex.join(words), "x", option_kinds(keys)).settings.items():
        assert flag in keys, flag
        assert "choices" not in keys[flag] or value in keys[flag]["choices"]
    modes = dict(pairwise(words))
    if engine == "vllm":
        config = json.loads(modes["--kv-transfer-config"])
        assert config["kv_connector"] == "NixlConnector"
        assert config["kv_role"] in {"kv_producer", "kv_consumer"}
    else:
        assert modes["--disaggregation-transfer-backend"] == "nixl"


@pytest.mark.parametrize("engine", PLANS)
def test_a_compose_file_has_every_gpu_once_and_a_router_before_all(engine: str) -> None:
    files = serving_files(PLANS[engine], "org/model", longest=4096, gpus_per_node=8)
    services = yaml.safe_load(files["compose.yaml"])["services"]
    router = services.pop("router")
    devices = [
        d for one in services.values() for d in one["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
    ]
    assert sorted(devices) == list("01234567")
    words = {name: [*one["entrypoint"], *one["command"]] for name, one in services.items()}
    for each in words.values():
        assert_taken(engine, each)
    listened = [(name, dict(pairwise(each))["--port"]) for name, each in words.items()]
    assert router_addresses([*router["entrypoint"], *router["command"]]) == listened
    assert router["depends_on"] == list(services)
    if engine == "vllm":
        assert [one["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] for one in services.values()] == list(services)


@pytest.mark.parametrize("engine", PLANS)
def test_kubernetes_names_every_pod_that_the_router_is_told(engine: str) -> None:
    """A StatefulSet's pods are NAME-0, NAME-1, ... under its headless service; selectors are the pods' labels."""
    plan = PLANS[engine]
    files = serving_files(plan, "org/model", longest=4096, gpus_per_node=4)
    assert "serve.sh" not in files  # more than a node
    documents = list(yaml.safe_load_all(files["kubernetes.yaml"]))
    services = {one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "Service"}
    sets = {one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "StatefulSet"}
    (router,) = (one["spec"] for one in documents if one["kind"] == "Deployment")
    pods = [
        f"{name}-{number}.{spec['serviceName']}" for name, spec in sets.items() for number in range(spec["replicas"])
    ]
    reported = router_addresses(router["template"]["spec"]["containers"][0]["command"])
    assert [host for host, _ in reported] == pods
    gpus = 0
    for name, spec in sets.items():
        assert services[name]["clusterIP"] == "None"
        assert services[name]["selector"] == spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        container = spec["template"]["spec"]["containers"][0]
        assert_taken(engine, container["command"])
        gpus += spec["replicas"] * container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == plan.gpus
    assert services["router"]["selector"] == router["selector"]["matchLabels"]


def test_vllms_engines_on_one_node_are_fetched_from_at_ports_of_their_own() -> None:
    """Ranks of attention with requests of their own take the ports after their engine's."""
    pool = Pool(engines=2, dp_attention=2, ep=2)
    plan = Deployment(engine="vllm", pool=pool, prefill=pool)
    script = serving_files(plan, "m", longest=4096, gpus_per_node=8)["serve.sh"]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    ports = [int(port) for port in re.findall(r"VLLM_NIXL_SIDE_CHANNEL_PORT=(\d+)", script)]
    assert len(ports) == 4
    assert all(after - before >= 2 for before, after in pairwise(ports))
    router = shlex.split(next(line for line in script.splitlines() if "toy_proxy_server.py --host" in line))
    listened = [dict(pairwise(shlex.split(line)))["--port"] for line in script.splitlines() if "vllm serve" in line]
    assert [port for _, port in router_addresses(router[:-1])] == listened
