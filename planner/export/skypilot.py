"""SkyPilot: a task file. Fields: `sky/utils/schemas.py` of 0.14.1.

`num_nodes` machines run the same `run` script, each with its number in SKYPILOT_NODE_RANK and all addresses in
SKYPILOT_NODE_IPS.
"""

from __future__ import annotations

from typing import Any

from planner.export.draft import Draft, Target
from planner.export.job import Job
from planner.export.program import network, network_values, program_of
from planner.export.script import Raw, command, device_lines, host_order, torchrun
from planner.export.slug import slug
from planner.export.yaml_text import yaml_text
from topology.errors import Infeasible

VERSION = "0.14.1"
TITLE = f"SkyPilot {VERSION}"
NODE = Raw('"$SKYPILOT_NODE_RANK"')
ADDRESS = Raw('"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"')
# Names of SkyPilot's catalogue (sky/catalog), for the kinds whose name it spells with a size.
ACCELERATORS = {
    "a100-sxm-40": "A100",
    "a100-sxm": "A100-80GB",
    "a100-pcie": "A100-80GB",
    "h100-sxm": "H100",
    "h200-sxm": "H200",
    "b200": "B200",
    "gb200": "GB200",
    "l40s": "L40S",
    "a6000": "RTXA6000",
    "rtx4090": "RTX4090",
    "v100-sxm": "V100",
}


def write(job: Job) -> Draft:
    """Return a task. Raises Infeasible."""
    words, draft = program_of(job)
    hosts = job.hosts()
    kinds = sorted({gpu.kind for group in job.cluster.groups for gpu in group.node.gpus})
    if len(kinds) > 1:
        raise Infeasible(f"{TITLE} asks for one kind of GPU", why=f"the cluster has {', '.join(kinds)}")
    accelerator = ACCELERATORS.get(kinds[0], kinds[0].split("-")[0].upper())
    devices, reasons = device_lines(hosts, NODE)
    variables = network(job, hosts) | draft.environment
    envs = (network_values(job) if network(job, hosts) else {}) | dict.fromkeys(draft.environment, "1")
    started = torchrun(hosts, node_rank=NODE, address=ADDRESS)
    resources: dict[str, Any] = {"accelerators": {accelerator: hosts.gpus_to_ask}}
    if hosts.count > 1:
        resources["network_tier"] = "best"
    document: dict[str, Any] = {"name": slug(job.name), "num_nodes": hosts.count, "resources": resources}
    if envs:
        document["envs"] = envs
    document["run"] = f"set -eu\n{devices}exec {command([*started, *words])}\n"
    unsaid = draft.unsaid
    if slug(job.name) != job.name:
        unsaid = (*unsaid, f"the job's name {job.name!r}: written as {slug(job.name)!r}")
    if hosts.order_matters:
        unsaid = (*unsaid, "the order of hosts: SkyPilot numbers the machines it gets")
    return Draft(
        body=yaml_text(document),
        settings={**{k: v for k, v in document.items() if k != "resources"}}
        | {f"resources.{key}": value for key, value in resources.items()},
        unsaid=unsaid,
        needed=("setup and file_mounts: the framework, data and tokenizer on every machine", *draft.needed),
        notes=(*draft.notes, *host_order(hosts), *(f"{name}: {why}" for name, why in variables.items())),
        environment=variables | reasons,
    )


TARGET = Target(name="skypilot", version=VERSION, title="SkyPilot", file_name="skypilot.yaml", write=write)
