"""SLURM: a batch script with one torchrun per node.

Options: sbatch(1). A job name is quoted as sbatch reads `#SBATCH` lines.
"""

from __future__ import annotations

from planner.export.draft import Draft, Target
from planner.export.job import ExportJob
from planner.export.job_files import BASH, FIRST_NODE, directives, slurm_options
from planner.export.program import framework_program, node_environment
from planner.export.script import ShellExpression, command, device_lines, export_lines, host_order_notes, torchrun_words
from planner.export.slug import slug

VERSION = "22.05"
NODE = ShellExpression('"$SLURM_NODEID"')
ADDRESS = ShellExpression('"$head"')


def write(job: ExportJob) -> Draft:
    """Return a batch script. Raises Infeasible."""
    words, draft = framework_program(job)
    hosts = job.hosts()
    options = slurm_options(slug(job.name), nodes=hosts.count, gpus_per_node=hosts.gpus_to_request)
    not_expressed = draft.not_expressed
    if slug(job.name) != job.name:
        not_expressed = (*not_expressed, f"the job's name {job.name!r}: written as {slug(job.name)!r}")
    rack: tuple[str, ...] = ()
    trays = {gpu.tray for gpu in job.question.cluster.groups[0].node.gpus}
    if len(trays) > 1:
        segment = min(hosts.count, len(trays))
        rack = (
            f"hosts of one NVLink domain belong together: with topology/block add --segment={segment} (SLURM 24.11)",
        )
    lines, reasons = device_lines(hosts, NODE)
    reasons_by_name, values = node_environment(job, hosts, draft)
    started = torchrun_words(hosts, node_rank=NODE, address=ADDRESS)
    # Every node runs the same lines; the shell on the node fills in its number.
    inner = f"{lines}exec {command([*started, *words])}\n"
    # Otherwise SLURM may give the job some of the GPUs, renumbered.
    exclusive = {"exclusive": None} if hosts.devices_matter else {}
    head = f"{FIRST_NODE}export head\n" if hosts.count > 1 else ""
    body = (
        f"{directives({**options, **exclusive})}\nset -eu\n{export_lines(reasons_by_name, values)}{head}"
        f"srun --kill-on-bad-exit=1 {command(['sh', '-euc', inner])}\n"
    )
    return Draft(
        body=body,
        settings=options,
        not_expressed=not_expressed,
        needed=(
            "partition, account, time limit and container, which depend on your site",
            "--cpus-per-task: the cores of a node; SLURM gives a task one unless told",
            *draft.needed,
        ),
        notes=(*draft.notes, *rack, *host_order_notes(hosts)),
        environment=reasons_by_name | reasons,
    )


TARGET = Target(name="slurm", version=VERSION, title="SLURM", file_name="job.sbatch", write=write, first_line=BASH)
