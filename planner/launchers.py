"""A plan's run as a job of someone else's scheduler: files to be looked at, and the argument list that submits them.

Every node starts the same command, an agent with its share of the ranks; afterwards one command collects what they
left. The run's directory must be one that all nodes see. Names and paths come from people: job names are checked,
everything in a script is quoted, YAML is written by its library.

Sources: torchrun (docs.pytorch.org, elastic/run), sbatch(1), Kubeflow Trainer v2's TrainJob
(trainer.kubeflow.org/v1alpha1).
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from topology.errors import BadInput, UserError

LAUNCHERS = ("local", "torchrun", "slurm", "trainjob")
PORT = 29400  # torchrun's own default
# A DNS label: what Kubernetes takes, and Slurm takes anything.
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?")
PLAIN_PATH = re.compile(r"[A-Za-z0-9_./@+=-]+")
HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9][A-Za-z0-9.-]*):[0-9]{1,5}")
STARTING_S = 300  # beyond the budget, for the scheduler to start nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is launched where. `nodes` share the ranks evenly; `endpoint` is where agents meet, where we must say it."""

    name: str
    directory: Path
    ranks: int
    nodes: int
    budget_s: float
    endpoint: str | None = None
    image: str | None = None
    python: str = "python3"

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise UserError(
                f"{self.name!r} is no name for a job",
                why="schedulers take 1 to 53 lower-case letters, digits and dashes, a letter or digit at both ends",
                remedy="--job-name another",
            )
        if self.ranks % self.nodes:
            raise UserError(f"{self.ranks} ranks do not share out evenly over {self.nodes} nodes")
        if self.endpoint is not None and not HOST_PORT.fullmatch(self.endpoint):
            raise UserError(f"--endpoint is {self.endpoint!r}", remedy="HOST:PORT, of a node that all nodes reach")

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file to be written and what to do with it. `submit` is an argument list, empty where a person must act."""

    path: Path
    text: str
    submit: tuple[str, ...]
    advice: tuple[str, ...]


def node_command(job: Job, *, endpoint: str | None) -> list[str]:
    """Return what each node runs; without an endpoint the agent asks its environment."""
    arguments = [
        job.python,
        "-m",
        "executor.apply_run",
        f"--request={job.directory / 'request.json'}",
        f"--out={job.directory}",
        f"--budget={job.budget_s:g}",
        f"--nodes={job.nodes}",
        f"--meeting={job.name}",
    ]
    return [*arguments, f"--endpoint={endpoint}"] if endpoint else arguments


def collect_command(job: Job) -> list[str]:
    """Return what is run once, when all nodes have ended."""
    return [
        job.python,
        "-m",
        "executor.apply_run",
        f"--request={job.directory / 'request.json'}",
        f"--out={job.directory}",
        f"--nodes={job.nodes}",
        "--collect",
    ]


def keep_advice(job: Job) -> str:
    """Say how the run comes to be among those that planner runs lists, as a run on one host does by itself."""
    return f"to keep it: planner runs --add {shlex.quote(str(job.directory))}"


def torchrun(job: Job) -> Written:
    """Return a script that is to be run on every node, by hand or by whatever starts things there."""
    if job.endpoint is None:
        raise UserError("--launcher torchrun needs --endpoint", why="its agents must be told where to meet")
    path = job.directory / "node.sh"
    text = "#!/bin/sh\nset -eu\nexec " + shlex.join(node_command(job, endpoint=job.endpoint)) + "\n"
    collect = shlex.join(collect_command(job))
    advice = (f"on each of {job.nodes} nodes: sh {shlex.quote(str(path))}", f"then once: {collect}", keep_advice(job))
    return Written(path=path, text=text, submit=(), advice=advice)


def slurm(job: Job) -> Written:
    """Return a batch script; agents meet on the first node of the allocation."""
    directory = str(job.directory)
    if not PLAIN_PATH.fullmatch(directory):
        raise BadInput(f"{directory!r} cannot stand in an #SBATCH line", remedy="--out with a plain name")
    minutes = math.ceil((job.budget_s + STARTING_S) / 60)
    # The host is known in the job alone, so it is the one thing that the script's shell expands.
    agent = shlex.join(node_command(job, endpoint=None)) + f' --endpoint="$head:{PORT}"'
    text = "\n".join(
        (
            "#!/bin/bash",
            f"#SBATCH --job-name={job.name}",
            f"#SBATCH --nodes={job.nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={job.ranks_per_node}",
            f"#SBATCH --time={minutes}",
            f"#SBATCH --output={directory}/slurm-%j.txt",
            "set -uo pipefail",
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"srun {agent}",
            "ended=$?",
            *((shlex.join(collect_command(job)),) if job.nodes > 1 else ()),
            'exit "$ended"',
            "",
        )
    )
    path = job.directory / "job.sbatch"
    submit = ("sbatch", str(path))
    return Written(path=path, text=text, submit=submit, advice=(f"submit: {shlex.join(submit)}", keep_advice(job)))


def trainjob(job: Job) -> Written:
    """Return a Kubernetes TrainJob of the runtime torch-distributed, which tells the agents where to meet."""
    import yaml  # noqa: PLC0415 - for this launcher alone

    if job.image is None:
        raise UserError("--launcher trainjob needs --image", why="a container with meshwright and torch in it")
    gpus = {"nvidia.com/gpu": job.ranks_per_node}
    manifest = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": job.image,
                "numNodes": job.nodes,
                "numProcPerNode": job.ranks_per_node,
                "command": node_command(job, endpoint=None),
                "resourcesPerNode": {"limits": gpus, "requests": gpus},
            },
        },
    }
    path = job.directory / "job.yaml"
    text = yaml.safe_dump(manifest, sort_keys=False)
    submit = ("kubectl", "apply", "--filename", str(path))
    advice = (
        f"submit: {shlex.join(submit)}",
        f"the directory {job.directory} must be a volume that the runtime mounts on every node",
        *((f"when it has ended: {shlex.join(collect_command(job))}",) if job.nodes > 1 else ()),
        keep_advice(job),
    )
    return Written(path=path, text=text, submit=submit, advice=advice)


def write_job(launcher: str, job: Job) -> Written:
    """Return the file of a launcher. Raises UserError for what it lacks."""
    return {"torchrun": torchrun, "slurm": slurm, "trainjob": trainjob}[launcher](job)


def submit(command: Sequence[str]) -> str:
    """Run the scheduler's own command and return what it said. Raises PlannerError when it is absent or refuses."""
    import subprocess  # noqa: PLC0415 - for submitting alone

    from topology.errors import PlannerError  # noqa: PLC0415 - as above

    try:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PlannerError(f"{command[0]} could not be run", why=str(error), remedy=shlex.join(command)) from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise PlannerError(f"{command[0]} refused the job", why=words[-1] if words else f"code {done.returncode}")
    return done.stdout.strip()
