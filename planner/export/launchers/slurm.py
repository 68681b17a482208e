"""SLURM: a batch script with one torchrun per node.

Options: sbatch(1). A job name is quoted as sbatch reads `#SBATCH` lines. `sbatch job.sbatch WORD...` appends words to
the program's arguments.
"""

from __future__ import annotations

from planner.export.draft import Draft, Target
from planner.export.hosts import Hosts
from planner.export.job import ExportJob
from planner.export.job_files import BASH, FIRST_NODE, directives, renamed, slug, slurm_options
from planner.export.launchers.program import framework_program, node_environment
from planner.export.script import (
    ShellExpression,
    command,
    device_lines,
    export_lines,
    file_lines,
    host_order_notes,
    torchrun_words,
)
from topology.codec import JsonObject

VERSION = "22.05"
NODE = ShellExpression('"$SLURM_NODEID"')
ADDRESS = ShellExpression('"$head"')
CORES_PER_GPU = 8  # cores per GPU for a part of a node, for data loading; a whole node comes with all its cores
GIB_PER_GPU = 64
TIME = "01:00:00"


def write(job: ExportJob) -> Draft:
    """Return a batch script. Raises Infeasible."""
    words, draft = framework_program(job)
    hosts = job.hosts()
    options = {
        **slurm_options(slug(job.name), nodes=hosts.count, gpus_per_node=hosts.gpus_to_request),
        **_resources(hosts),
        "time": TIME,
        "output": "%x-%j.log",
    }
    not_expressed = (*draft.not_expressed, *renamed(job.name))
    rack: tuple[str, ...] = ()
    trays = {gpu.tray for gpu in job.question.cluster.groups[0].node.gpus}
    if len(trays) > 1:
        segment = min(hosts.count, len(trays))
        rack = (
            f"hosts of one NVLink domain belong together: with topology/block add --segment={segment} (SLURM 24.11)",
        )
    lines, placed = device_lines(hosts, NODE)
    extra = node_environment(job, hosts, draft)
    started = torchrun_words(hosts, node_rank=NODE, address=ADDRESS)
    # Every node runs the same lines; the shell on the node fills in its number. Words after the script's name are that
    # shell's arguments.
    inner = f"{lines}{draft.body}exec {command([*started, *words])}\n"
    node = [
        "srun",
        "--kill-on-bad-exit=1",
        ShellExpression('--cpus-per-task="$cores"'),
        "sh",
        "-euc",
        inner,
        "sh",
        ShellExpression('"$@"'),
    ]
    head = f"{FIRST_NODE}export head\n" if hosts.count > 1 else ""
    cores = "cores=${SLURM_CPUS_ON_NODE:-1}\n"  # srun gives a task one core by default
    return Draft(
        body=(
            f"{directives(options)}\nset -eu\n{export_lines((*job.environment(), *extra))}{file_lines(draft.files)}"
            f"{head}{cores}{command(node)}\n"
        ),
        settings={name: value for name, value in options.items() if value is not None},
        not_expressed=not_expressed,
        needed=(
            "partition, account and container, which depend on your site; a folder that all nodes see",
            *draft.needed,
        ),
        notes=(
            *draft.notes,
            *rack,
            *host_order_notes(hosts),
            f"time {TIME}, cores and memory are assumed: sbatch --time=... --mem=... goes before the file",
        ),
        environment=(*extra, *placed),
    )


def _resources(hosts: Hosts) -> JsonObject:
    """Return the options for a job's resources: whole nodes, or a part that goes with its GPUs."""
    # Whole nodes also if the plan chooses GPUs: SLURM may otherwise allocate others and renumber them.
    if hosts.gpus_to_request == hosts.installed:
        return {"exclusive": None, "mem": 0}
    return {"cpus-per-gpu": CORES_PER_GPU, "mem-per-gpu": f"{GIB_PER_GPU}G"}


TARGET = Target(
    name="slurm",
    version=VERSION,
    title="SLURM",
    file_name="job.sbatch",
    write=write,
    first_line=BASH,
    run="sbatch job.sbatch",
)
