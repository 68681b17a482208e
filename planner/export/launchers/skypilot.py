"""SkyPilot: a task file. Fields: `sky/utils/schemas.py` of 0.14.1.

`num_nodes` machines run the same `run` script, with their number in SKYPILOT_NODE_RANK and all addresses in
SKYPILOT_NODE_IPS. The folder of the task file is copied to them (`workdir`). `sky launch --env ARGUMENTS=...` passes
arguments to the program.
"""

from __future__ import annotations

from planner.export.draft import Draft, Target
from planner.export.job import ExportJob
from planner.export.job_files import renamed, slug
from planner.export.launchers.program import framework_program, node_environment
from planner.export.script import ShellExpression, command, device_lines, file_lines, host_order_notes, torchrun_words
from planner.export.yaml_text import yaml_text
from topology.catalog.gpus import gpu_names
from topology.codec import JsonObject
from topology.errors import Infeasible

VERSION = "0.14.1"
TITLE = f"SkyPilot {VERSION}"
NODE = ShellExpression('"$SKYPILOT_NODE_RANK"')
ADDRESS = ShellExpression('"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"')


def write(job: ExportJob) -> Draft:
    """Return a task. Raises Infeasible."""
    words, draft = framework_program(job)
    hosts = job.hosts()
    kinds = sorted({gpu.kind for group in job.question.cluster.groups for gpu in group.node.gpus})
    if len(kinds) > 1:
        raise Infeasible(f"{TITLE} requests one kind of GPU", why=f"the cluster has {', '.join(kinds)}")
    accelerator = gpu_names().skypilot.get(kinds[0])
    if accelerator is None:
        raise Infeasible(f"{TITLE} has no name for {kinds[0]}", why="it requests GPUs by the names of its catalogue")
    devices, placed = device_lines(hosts, NODE)
    extra = node_environment(job, hosts, draft)
    variables = (*job.environment(), *extra)
    started = torchrun_words(hosts, node_rank=NODE, address=ADDRESS)
    resources: JsonObject = {"accelerators": {accelerator: hosts.gpus_to_request}}
    if hosts.count > 1:
        resources["network_tier"] = "best"
    document: JsonObject = {
        "name": slug(job.name),
        "num_nodes": hosts.count,
        "workdir": ".",
        "resources": resources,
        "envs": {"ARGUMENTS": "", **{one.name: one.value for one in variables}},
        "run": (
            f"set -eu\nset -- ${{ARGUMENTS:-}}\n{devices}{file_lines(draft.files)}{draft.body}"
            f"exec {command([*started, *words])}\n"
        ),
    }
    not_expressed = (*draft.not_expressed, *renamed(job.name))
    if hosts.order_matters:
        not_expressed = (*not_expressed, "the order of hosts: SkyPilot numbers the machines it gets")
    return Draft(
        body=yaml_text(document),
        settings={**{k: v for k, v in document.items() if k != "resources"}}
        | {f"resources.{key}": value for key, value in resources.items()},
        not_expressed=not_expressed,
        needed=("setup and file_mounts: framework, data and tokenizer on every machine", *draft.needed),
        notes=(*draft.notes, *host_order_notes(hosts), *(f"{one.name}: {one.reason}" for one in variables)),
        environment=(*extra, *placed),
    )


TARGET = Target(
    name="skypilot",
    version=VERSION,
    title="SkyPilot",
    file_name="skypilot.yaml",
    write=write,
    run="sky launch skypilot.yaml",
)
