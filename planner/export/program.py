"""The program that launchers start: that of the framework of the plan, with the plan in its arguments."""

from __future__ import annotations

from dataclasses import replace

from planner.export import deepspeed, megatron, torchtitan_cli, torchtitan_toml
from planner.export.draft import Draft
from planner.export.hosts import Hosts
from planner.export.job import ExportJob
from simulator.legality.frameworks import framework_of_runtime
from topology.errors import Infeasible

OWN = "YOUR_PROGRAM.py"


def framework_program(job: ExportJob) -> tuple[list[str], Draft]:
    """Return the arguments after torchrun's own, and the draft of what they set. Raises Infeasible."""
    framework = framework_of_runtime(job.question.framework.name).name
    if framework == "torchtitan":
        try:
            if not (job.question.runtime.version or "").startswith("0.2"):
                return torchtitan_cli.program(job)
        except Infeasible:
            pass
        words, draft = torchtitan_toml.program(job)
        return words, _with_config_file(draft, torchtitan_toml.FILE, f"torchtitan@{torchtitan_toml.VERSION}")
    if framework == "megatron-lm":
        return megatron.program(job)
    if framework == "deepspeed":
        draft = deepspeed.write(job)
        words = [OWN, "--deepspeed", "--deepspeed_config", deepspeed.FILE]
        return words, _with_config_file(draft, deepspeed.FILE, "deepspeed")
    missing = (
        f"degrees, batch and recompute: {OWN} is yours, and {job.question.framework.name} has no configuration file that holds them",
    )
    return [OWN], Draft(
        body="", settings={}, not_expressed=missing, needed=(f"{OWN}, which builds the meshes of the plan",)
    )


def _with_config_file(draft: Draft, file_name: str, target: str) -> Draft:
    needed = (f"{file_name} beside this file: planner export plan.json --to {target} --out {file_name}",)
    return replace(draft, needed=(*needed, *draft.needed), run="")


def node_environment(job: ExportJob, hosts: Hosts, draft: Draft) -> tuple[dict[str, str], dict[str, str]]:
    """Return (reason by name, value by name) of the environment variables of every node.

    NCCL finds its ports itself, but cannot know that a port that is present is down. If there is one, the ports that
    are up are named exactly (the leading =).
    """
    reasons, values = dict(draft.environment), dict.fromkeys(draft.environment, "1")
    if hosts.count == 1 or len(job.question.cluster.groups) != 1:
        return reasons, values
    nics = job.question.cluster.groups[0].node.nics
    up, down = ([nic.name or nic.label for nic in nics if nic.up is state] for state in (True, False))
    if not up or not down:
        return reasons, values
    reasons = {"NCCL_IB_HCA": f"{', '.join(down)} was found down; the others are named exactly", **reasons}
    return reasons, {"NCCL_IB_HCA": "=" + ",".join(up), **values}
