"""Run a plan through a scheduler: write the job file, and the argument list that submits it.

Every node runs the same command, an elastic agent with its share of the ranks; afterwards one command collects their
records. All nodes must see the directory of the run. Names and paths are user input: job names are checked, everything
in a script is quoted, and YAML is written by its library.

Source: torchrun (docs.pytorch.org, elastic/run).
"""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.export.job_files import BASH, FIRST_NODE, Pods, directives, indexed_job, job_set, slurm_options, train_job
from planner.export.yaml_text import yaml_text
from topology.errors import BadInput, PlannerError, UserError

LAUNCHERS = ("local", "torchrun", "slurm", "ray", "kubernetes", "jobset", "trainjob")
IN_CONTAINERS, ON_VOLUMES = ("kubernetes", "jobset", "trainjob"), ("kubernetes", "jobset")
PORT = 29400  # torchrun's own default
PORTS = 1000  # ports from PORT on: jobs that share a node meet at different ones
SLURM_PORT = f"$(({PORT} + SLURM_JOB_ID % {PORTS}))"
# A DNS label, which Kubernetes requires; Slurm accepts any name.
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?")
PLAIN_PATH = re.compile(r"[A-Za-z0-9_./@+=-]+")
HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9][A-Za-z0-9.-]*):[0-9]{1,5}")
VOLUME = re.compile(r"([a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?):(/[A-Za-z0-9_./@+=-]*)")
JOIN_S = 30.0  # seconds to wait in a job whose nodes start together
NAMES, NAMED = 'names=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)\n', ' --names="$names"'
STARTING_S = 300  # seconds beyond the budget for the scheduler to start the nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherJob:
    """A run on `nodes` that share its ranks evenly. `endpoint` is HOST:PORT of the rendezvous, if it must be given."""

    name: str
    directory: Path
    ranks: int
    nodes: int
    budget_s: float
    endpoint: str | None = None
    image: str | None = None
    python: str = "python3"
    on_cpus: bool = False
    volume: str | None = None  # CLAIM:/mount/path, of a persistent volume claim that all nodes mount
    exclusive: bool = False  # no other job on its nodes, which would disturb the measurement

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise UserError(
                f"{self.name!r} is not a valid job name",
                why="job names have 1 to 53 lower-case letters, digits and dashes, with a letter or digit at both ends",
                remedy="--job-name another",
            )
        if self.ranks % self.nodes:
            raise UserError(
                f"{self.ranks} ranks cannot be divided evenly over {self.nodes} nodes",
                remedy=f"--nodes {' or '.join(str(n) for n in range(1, self.ranks + 1) if self.ranks % n == 0)}",
            )
        if self.endpoint is not None and not HOST_PORT.fullmatch(self.endpoint):
            raise UserError(f"--endpoint is {self.endpoint!r}", remedy="HOST:PORT of a node that all nodes can reach")

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def gpus_per_node(self) -> int:
        return 0 if self.on_cpus else self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """A job file to be written. `submit` is the argument list that submits it, empty where the user must start it."""

    path: Path
    text: str
    submit: tuple[str, ...]
    advice: tuple[str, ...]


def node_command(job: LauncherJob, *, endpoint: str | None, join_s: float | None = None) -> list[str]:
    """Return the command of each node; without an endpoint the agent reads it from its environment. It waits `join_s`
    for the other nodes, by default half of its budget.
    """
    arguments = [
        job.python,
        "-m",
        "executor.run.apply",
        f"--request={job.directory / 'request.json'}",
        f"--out={job.directory}",
        f"--budget={job.budget_s:g}",
        f"--nodes={job.nodes}",
        f"--meeting={job.name}",
        *([f"--join={join_s:g}"] if join_s else []),
    ]
    return [*arguments, f"--endpoint={endpoint}"] if endpoint else arguments


def collect_command(job: LauncherJob) -> list[str]:
    """Return the command to run once after all nodes have ended."""
    return [
        job.python,
        "-m",
        "executor.run.apply",
        f"--request={job.directory / 'request.json'}",
        f"--out={job.directory}",
        f"--nodes={job.nodes}",
        "--collect",
    ]


def save_advice(job: LauncherJob) -> str:
    """Return how to add the run to the store that planner runs lists; a run on one host is added automatically."""
    return f"to save it: planner runs --add {shlex.quote(str(job.directory))}"


def torchrun(job: LauncherJob) -> JobFile:
    """Return a script to be run on every node. Raises UserError without an endpoint."""
    require_settings("torchrun", endpoint=job.endpoint)
    path = job.directory / "node.sh"
    text = "#!/bin/sh\nset -eu\nexec " + shlex.join(node_command(job, endpoint=job.endpoint)) + "\n"
    collect = shlex.join(collect_command(job))
    advice = (f"on each of {job.nodes} nodes: sh {shlex.quote(str(path))}", f"then once: {collect}", save_advice(job))
    return JobFile(path=path, text=text, submit=(), advice=advice)


def slurm(job: LauncherJob) -> JobFile:
    """Return a Slurm batch script; the rendezvous is on the first node of the allocation."""
    directory = str(job.directory)
    if not PLAIN_PATH.fullmatch(directory):
        raise BadInput(f"{directory!r} cannot be written in an #SBATCH line", remedy="--out with a plain name")
    minutes = math.ceil((job.budget_s + STARTING_S) / 60)
    agent = shlex.join(node_command(job, endpoint=None, join_s=JOIN_S)) + f' --endpoint="$head:{SLURM_PORT}"'
    # A job that is preempted or loses a node is not requeued: it would repeat measurements that may be reported
    # already.
    options = {**slurm_options(job.name, nodes=job.nodes, gpus_per_node=job.gpus_per_node), "no-requeue": None}
    options |= {"exclusive": None} if job.exclusive else {}
    agent, names = (agent + NAMED, NAMES) if job.nodes > 1 else (agent, "")
    collect = f"{shlex.join(collect_command(job))}{NAMED}\n" if job.nodes > 1 else ""
    text = (
        f"{BASH}\n{directives({**options, 'time': minutes, 'output': f'{directory}/slurm-%j.txt'})}"
        f'set -uo pipefail\n{FIRST_NODE}{names}srun --kill-on-bad-exit=1 {agent}\nended=$?\n{collect}exit "$ended"\n'
    )
    path = job.directory / "job.sbatch"
    submit = ("sbatch", str(path))
    return JobFile(path=path, text=text, submit=submit, advice=(f"submit: {shlex.join(submit)}", save_advice(job)))


def slurm_array(jobs: Sequence[LauncherJob], name: str) -> JobFile:
    """Return one batch script for jobs of equal size, each the script of its own folder."""
    first = jobs[0]
    folder = first.directory.parent
    options = {
        **slurm_options(name, nodes=first.nodes, gpus_per_node=first.gpus_per_node),
        "no-requeue": None,
        "exclusive": None,
        "array": f"0-{len(jobs) - 1}",
        "time": math.ceil((max(job.budget_s for job in jobs) + STARTING_S) / 60),
        "output": "/dev/null",
    }
    lines = "".join(
        f"  {number}) exec bash {slurm(job).path} > {job.directory}/slurm-$SLURM_JOB_ID.txt 2>&1 ;;\n"
        for number, job in enumerate(jobs)
    )
    path = folder / f"array-{first.directory.name}.sbatch"
    text = f'{BASH}\n{directives(options)}case "$SLURM_ARRAY_TASK_ID" in\n{lines}esac\n'
    return JobFile(path=path, text=text, submit=("sbatch", str(path)), advice=())


def ray_job(job: LauncherJob) -> JobFile:
    """Return a job of Ray whose entry point takes a bundle on each node and runs the nodes' agents there."""
    agent = node_command(job, endpoint=None, join_s=JOIN_S)
    then = ["--names", "--then", json.dumps(collect_command(job))] if job.nodes > 1 else []
    words = [
        *(
            job.python,
            "-m",
            "executor.launch.ray_nodes",
            f"--nodes={job.nodes}",
            f"--gpus-per-node={job.gpus_per_node}",
        ),
        *("--meet", *then, "--", *agent),
    ]
    return ray_file(words, job.directory / "job.json", job.name, (save_advice(job),))


def ray_file(words: Sequence[str], path: Path, name: str, advice: tuple[str, ...], gpus: int = 0) -> JobFile:
    """Return the body of a job's submission to Ray; its entry point may need GPUs itself."""
    needs = {"entrypoint_num_gpus": gpus} if gpus else {}
    body = {"entrypoint": shlex.join(words), "metadata": {"name": name}, **needs}
    own = [f"--entrypoint-num-gpus={gpus}"] if gpus else []
    submit = ("ray", "job", "submit", "--no-wait", *own, "--", *words)
    return JobFile(
        path=path,
        text=json.dumps(body, indent=1) + "\n",
        submit=submit,
        advice=(f"submit: {shlex.join(submit)}", *advice),
    )


def require_settings(
    launcher: str, *, image: str | None = None, volume: str | None = None, endpoint: str | None = None
) -> None:
    """Raise UserError if a launcher lacks one of these settings, or has one that it does not use."""
    uses = {"image": (image, IN_CONTAINERS), "volume": (volume, ON_VOLUMES), "endpoint": (endpoint, ("torchrun",))}
    for name, (value, launchers) in uses.items():
        if value is not None and launcher not in launchers:
            raise UserError(f"--launcher {launcher} has no use for --{name}", why=f"it is for {', '.join(launchers)}")
    if launcher == "torchrun" and endpoint is None:
        raise UserError(
            "--launcher torchrun needs --endpoint",
            why="its agents need the address of their rendezvous",
            remedy="--endpoint HOST:29500, with the name of one of the nodes",
        )
    if launcher in IN_CONTAINERS and image is None:
        raise UserError(
            f"--launcher {launcher} needs --image",
            why="it runs in a container image with meshwright and torch",
            remedy="--image NAME, as your registry has it; examples/service/Dockerfile shows how one is built",
        )
    if launcher in ON_VOLUMES and not VOLUME.fullmatch(volume or ""):
        raise UserError(
            f"--launcher {launcher} needs --volume" if volume is None else f"--volume is {volume!r}",
            why="all pods and whoever submits write into one folder",
            remedy="--volume CLAIM:/mount/path, of a persistent volume claim that many pods may mount",
        )


def trainjob(job: LauncherJob, command: Sequence[str] = ()) -> JobFile:
    """Return a Kubernetes TrainJob of the runtime torch-distributed, which provides the rendezvous.

    It runs the agent of a run on each node, or `command`.
    """
    require_settings("trainjob", image=job.image)
    manifest = train_job(
        job.name,
        nodes=job.nodes,
        ranks_per_node=job.ranks_per_node,
        gpus_per_node=job.gpus_per_node,
        command=command or node_command(job, endpoint=None, join_s=JOIN_S),
        image=job.image,
    )
    mounted = f"the directory {job.directory} must be a volume that the runtime mounts on every node"
    return _kubectl_job(job, yaml_text(manifest), mounted)


def kubernetes(job: LauncherJob, command: Sequence[str] = ()) -> JobFile:
    """Return an Indexed Job and a headless service, which need no operator; `command` as of `trainjob`."""
    names = [f"{job.name}-{number}" for number in range(job.nodes)]
    manifests = indexed_job(_pods(job, "kubernetes", names, command))
    return _kubectl_job(job, "---\n".join(yaml_text(one) for one in manifests))


def jobset(job: LauncherJob, command: Sequence[str] = ()) -> JobFile:
    """Return a JobSet, which schedulers such as Kueue admit as a whole; `command` as of `trainjob`."""
    names = [f"{job.name}-node-0-{number}" for number in range(job.nodes)]
    return _kubectl_job(job, yaml_text(job_set(_pods(job, "jobset", names, command))))


def _pods(job: LauncherJob, launcher: str, names: Sequence[str], command: Sequence[str]) -> Pods:
    """Return the pods of a job. Raises UserError if image or volume are missing."""
    require_settings(launcher, image=job.image, volume=job.volume)
    claim, _, mount = str(job.volume).partition(":")
    if not job.directory.is_relative_to(mount):
        raise UserError(
            f"{job.directory} is not below {mount}, where the pods mount it",
            remedy=f"--out {mount}/run, or --state {mount}/tune/state.jsonl",
        )
    if not command:
        meeting = f"{names[0]}.{job.name}:{PORT}" if job.nodes > 1 else None
        command = node_command(job, endpoint=meeting, join_s=JOIN_S)
        command += [f"--names={','.join(names)}"] if job.nodes > 1 else []
    return Pods(
        name=job.name,
        nodes=job.nodes,
        gpus_per_node=job.gpus_per_node,
        command=command,
        image=str(job.image),
        claim=claim,
        mount=mount,
        limit_s=math.ceil(job.budget_s + STARTING_S),
    )


def _kubectl_job(job: LauncherJob, text: str, *advice: str) -> JobFile:
    path = job.directory / "job.yaml"
    submit = ("kubectl", "apply", "--filename", str(path))
    collect = (f"when it has ended: {shlex.join(collect_command(job))}",) if job.nodes > 1 else ()
    lines = (f"submit: {shlex.join(submit)}", *advice, *collect, save_advice(job))
    return JobFile(path=path, text=text, submit=submit, advice=lines)


def write_job(launcher: str, job: LauncherJob) -> JobFile:
    """Return the job file of a launcher. Raises UserError for a missing setting."""
    writers = {"torchrun": torchrun, "slurm": slurm, "ray": ray_job, "kubernetes": kubernetes, "jobset": jobset}
    return {**writers, "trainjob": trainjob}[launcher](job)


def submit(command: Sequence[str]) -> str:
    """Run the scheduler's submit command and return its output. Raises PlannerError when it is missing or fails."""
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError as error:
        raise PlannerError(
            f"there is no {command[0]} here",
            why="jobs are submitted where the scheduler's commands are, such as a login node",
            remedy=f"there: {shlex.join(command)}",
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PlannerError(f"{command[0]} could not be run", why=str(error), remedy=shlex.join(command)) from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise PlannerError(f"{command[0]} refused the job", why=words[-1] if words else f"code {done.returncode}")
    return done.stdout.strip()
