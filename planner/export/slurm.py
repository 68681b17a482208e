"""SLURM: a batch script with one torchrun per node.

Options: sbatch(1). A job's name is quoted the way sbatch reads its `#SBATCH` lines, which hold one line of text.
"""

from __future__ import annotations

import shlex
from typing import Any

from planner.export.draft import Draft, Target
from planner.export.job import Job
from planner.export.program import network, network_values, program_of
from planner.export.script import Raw, command, device_lines, exports, host_order, torchrun
from planner.export.slug import slug

VERSION = "22.05"
NODE = Raw('"$SLURM_NODEID"')
ADDRESS = Raw('"$head"')


def write(job: Job) -> Draft:
    """Return a batch script. Raises Infeasible."""
    words, draft = program_of(job)
    hosts = job.hosts()
    options: dict[str, Any] = {
        "job-name": slug(job.name),
        "nodes": hosts.count,
        "ntasks-per-node": 1,
        "gpus-per-node": hosts.gpus_to_ask,
    }
    unsaid = draft.unsaid
    if slug(job.name) != job.name:
        unsaid = (*unsaid, f"the job's name {job.name!r}: written as {slug(job.name)!r}")
    rack: tuple[str, ...] = ()
    trays = {gpu.tray for gpu in job.cluster.groups[0].node.gpus}
    if len(trays) > 1:
        segment = min(hosts.count, len(trays))
        rack = (
            f"hosts of one NVLink domain belong together: with topology/block add --segment={segment} (SLURM 24.11)",
        )
    lines, reasons = device_lines(hosts, NODE)
    variables = network(job, hosts) | draft.environment
    values = (network_values(job) if network(job, hosts) else {}) | dict.fromkeys(draft.environment, "1")
    started = torchrun(hosts, node_rank=NODE, address=ADDRESS)
    # Every node runs the same few lines; what differs is its number, which the shell on the node fills in.
    inner = f"{lines}exec {command([*started, *words])}\n"
    directives = "".join(f"#SBATCH --{name}={shlex.quote(str(value))}\n" for name, value in options.items())
    if hosts.devices_matter:
        # Else SLURM would show each job some GPUs under numbers of its own.
        directives += "#SBATCH --exclusive\n"
    head = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\nexport head\n' if hosts.count > 1 else ""
    body = (
        f"{directives}\nset -eu\n{exports(variables, values)}{head}"
        f"srun --kill-on-bad-exit=1 {command(['sh', '-euc', inner])}\n"
    )
    return Draft(
        body=body,
        settings=options,
        unsaid=unsaid,
        needed=(
            "partition, account, time limit and container, which your site decides",
            "--cpus-per-task: the cores of a node; SLURM gives a task one unless told",
            *draft.needed,
        ),
        notes=(*draft.notes, *rack, *host_order(hosts)),
        environment=variables | reasons,
    )


TARGET = Target(
    name="slurm", version=VERSION, title="SLURM", file_name="job.sbatch", write=write, first_line="#!/bin/bash"
)
