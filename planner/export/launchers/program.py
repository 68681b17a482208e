"""The program that launchers start: the program of the plan's framework, with the plan in its arguments and files."""

from __future__ import annotations

from dataclasses import replace

from planner.export.draft import Draft
from planner.export.frameworks import deepspeed, megatron, torchtitan_cli, torchtitan_toml
from planner.export.hosts import Hosts
from planner.export.job import ExportJob
from planner.export.script import ShellExpression
from simulator.runtimes.environment import Variable
from topology import codec
from topology.errors import Infeasible

OWN = "YOUR_PROGRAM.py"
# Arguments appended to a job's command are passed to the program.
APPENDED = ShellExpression('"$@"')


def framework_program(job: ExportJob) -> tuple[list[str], Draft]:
    """Return the arguments after torchrun's own, and the draft of what they set. Raises Infeasible.

    The draft's `files` hold what the program reads: the job has to put them into its working directory.
    """
    program = job.question.framework.tools.program
    if program == "torchtitan":
        try:
            if not (job.question.runtime.version or "").startswith("0.2"):
                return torchtitan_cli.program(job)
        except Infeasible:
            pass
        words, draft = torchtitan_toml.program(job)
        return [*words, APPENDED], _with_file(draft, torchtitan_toml.FILE, str(draft.body))
    if program == "megatron":
        return megatron.program(job)
    if program == "deepspeed":
        draft = deepspeed.write(job)
        words = [OWN, "--deepspeed", "--deepspeed_config", deepspeed.FILE, APPENDED]
        return words, _with_file(draft, deepspeed.FILE, codec.to_json(draft.body))
    missing = (
        (
            f"degrees, batch and recompute: {OWN} is yours, and {job.question.framework.name} has no configuration file"
            " that holds them"
        ),
    )
    return [OWN, APPENDED], Draft(
        body="", settings={}, not_expressed=missing, needed=(f"{OWN}, which builds the meshes of the plan",)
    )


def _with_file(draft: Draft, name: str, text: str) -> Draft:
    return replace(draft, body="", run="", files={**draft.files, name: text})


def node_environment(job: ExportJob, hosts: Hosts, draft: Draft) -> tuple[Variable, ...]:
    """Return the variables set on every node, besides those that every plan assumes.

    NCCL finds its ports itself but does not recognise ports that are down; if there are any, the ports that are up are
    named exactly (the leading =).
    """
    if hosts.count == 1 or len(job.question.cluster.groups) != 1:
        return draft.environment
    nics = job.question.cluster.groups[0].node.nics
    up, down = ([nic.name or nic.label for nic in nics if nic.up is state] for state in (True, False))
    if not up or not down:
        return draft.environment
    reason = f"{', '.join(down)} was found down; the others are named exactly"
    return (Variable(name="NCCL_IB_HCA", value="=" + ",".join(up), reason=reason), *draft.environment)
