"""What launchers start: the program of the framework that the plan was made for, with the plan in its arguments."""

from __future__ import annotations

from dataclasses import replace

from planner.export import deepspeed, megatron, torchtitan_cli, torchtitan_toml
from planner.export.draft import Draft
from planner.export.hosts import Hosts
from planner.export.job import Job
from planner.frameworks import framework_of_runtime
from topology.errors import Infeasible

OWN = "YOUR_PROGRAM.py"


def program_of(job: Job) -> tuple[list[str], Draft]:
    """Return the words after torchrun's own, and the draft that says what they set. Raises Infeasible."""
    framework = framework_of_runtime(job.framework).name
    if framework == "torchtitan":
        try:
            if not (job.runtime.version or "").startswith("0.2"):
                return torchtitan_cli.program(job)
        except Infeasible:
            pass
        words, draft = torchtitan_toml.program(job)
        return words, _beside(draft, torchtitan_toml.FILE, f"torchtitan@{torchtitan_toml.VERSION}")
    if framework == "megatron-lm":
        return megatron.program(job)
    if framework == "deepspeed":
        draft = deepspeed.write(job)
        words = [OWN, "--deepspeed", "--deepspeed_config", deepspeed.FILE]
        return words, _beside(draft, deepspeed.FILE, "deepspeed")
    told = (
        f"degrees, batch and recompute: {OWN} is yours, and {job.framework} has no configuration file that holds them",
    )
    return [OWN], Draft(body="", settings={}, unsaid=told, needed=(f"{OWN}, which builds the meshes of the plan",))


def _beside(draft: Draft, file_name: str, target: str) -> Draft:
    needed = (f"{file_name} beside this file: planner export plan.json --to {target} --out {file_name}",)
    return replace(draft, needed=(*needed, *(line for line in draft.needed if not line.startswith("to run:"))))


def network(job: Job, hosts: Hosts) -> dict[str, str]:
    """Return NCCL variables that this cluster needs, each with its reason: none unless something is wrong with it.

    NCCL finds good ports by itself. What it cannot know is that a port which is present should not be used.
    """
    if hosts.count == 1 or len(job.cluster.groups) != 1:
        return {}
    nics = job.cluster.groups[0].node.nics
    down = [nic.name or nic.label for nic in nics if not nic.up]
    if not down or len(down) == len(nics):
        return {}
    return {"NCCL_IB_HCA": f"{', '.join(down)} was found down; the others are named exactly"}


def network_values(job: Job) -> dict[str, str]:
    """Return the values of `network`'s variables: ports that are up, matched exactly (the leading =)."""
    nics = job.cluster.groups[0].node.nics
    return {"NCCL_IB_HCA": "=" + ",".join(nic.name or nic.label for nic in nics if nic.up)}
