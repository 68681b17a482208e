"""Slurm, by its commands; and a check that it has what a job needs, from what it declares and from a short job.

Sources: squeue(1) and its job state codes, scontrol(1), sacct(1), scancel(1), sinfo(1), srun(1), gres.conf(5).
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.runs.schedulers import launchers
from planner.runs.schedulers.launchers import SLURM_PORT, JobFile
from planner.runs.schedulers.node_answers import NODE_CHECK, Checked, answers_in, error, judge_nodes, worst_first
from planner.runs.schedulers.scheduler import SchedulerState, Submission, last_line, log_tail, run
from topology import codec
from topology.errors import PlannerError
from topology.finding import ERROR, INFO, WARNING

LOGS = "slurm-*.txt"
MEMORY = re.compile(r"exceeded memory limit|oom[-_]kill", re.IGNORECASE)  # in slurmstepd's words
ACTIVE = frozenset(
    [
        "PENDING",
        "CONFIGURING",
        "RUNNING",
        "COMPLETING",
        "SUSPENDED",
        "STOPPED",
        "SIGNALING",
        "STAGE_OUT",
        "REQUEUED",
        "REQUEUE_HOLD",
        "REQUEUE_FED",
        "RESIZING",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    ]
)
COMMANDS = ("sinfo", "srun", "sbatch", "squeue", "scontrol", "scancel")
USABLE = frozenset({"idle", "mixed", "allocated", "completing"})
NODES_FREE_S, CHECK_S = 30, 120.0


@dataclass(frozen=True, slots=True)
class Slurm:
    """Jobs are known by the number that sbatch prints."""

    collects: bool = True

    def named(self, name: str) -> None:
        """Return None: the scheduler's answer names a job."""

    def submit(self, file: JobFile, job: str | None) -> str:
        del job
        return launchers.submit(file.submit)

    def state(self, folder: Path, submission: Submission) -> SchedulerState:
        del folder
        number = str(submission.number)
        asked = run(["squeue", "--noheader", f"--jobs={number}", "--states=all", "--format=%T"])
        words = asked.stdout.split()
        if asked.returncode and "invalid job id" not in asked.stderr.lower():
            return SchedulerState(word=f"squeue does not answer: {last_line(asked.stderr)}", over=None)
        if not words:  # squeue forgets a job minutes after its end
            with contextlib.suppress(PlannerError):
                words = run(
                    ["sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={number}", "--format=State"]
                ).stdout.split()
        word = words[0] if words else "ended"
        return SchedulerState(word=word.lower(), over=word not in ACTIVE)

    def cancel(self, folder: Path, submission: Submission) -> None:
        del folder
        if submission.number is not None:
            run(["scancel", submission.number])

    def ended_as(self, folder: Path, submission: Submission, word: str) -> str:
        """Slurm's state is "failed" for a job that ended by itself within the grace time after its nodes were taken,
        and, if memory is watched by polling, for a job that exceeded its memory.
        """
        with contextlib.suppress(PlannerError, subprocess.TimeoutExpired):
            shown = run(["scontrol", "show", "job", str(submission.number), "--oneliner"]).stdout
            if re.search(r"\bPreemptTime=\d", shown):
                return "preempted"
        return "out_of_memory" if _memory_line(folder) else word

    def last_words(self, folder: Path, submission: Submission) -> str:
        del submission
        tail = log_tail(folder, LOGS)
        return _memory_line(folder) or (last_line(tail) if tail else "")


def _memory_line(folder: Path) -> str:
    """Return the line of a job's log that reports exceeded memory; empty if there is none."""
    lines = log_tail(folder, LOGS).splitlines()
    return next((line.strip() for line in lines if MEMORY.search(line)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Declared:
    """A node as Slurm declares it."""

    name: str
    state: str
    gpus: int


def check_slurm(nodes: int, gpus_per_node: int | None, *, folder: Path, python: str = "python3") -> list[Checked]:
    """Return the checks, faults first. Without `gpus_per_node` a job requests as many as nodes declare."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        why = "they are installed where jobs may be submitted"
        return [error("commands", f"{', '.join(missing)} not found", why, "run this on a login node, or load a module")]
    declared = _declared()
    if isinstance(declared, Checked):
        return [declared]
    most = max((one.gpus for one in declared), default=0)
    gpus = most if gpus_per_node is None else gpus_per_node
    found = _judge_declared(declared, nodes, gpus)
    if not any(one.severity == ERROR for one in found):
        found += _look_at_nodes(nodes, gpus, folder=folder, python=python)
    return worst_first(found)


def _declared() -> list[_Declared] | Checked:
    """Return the nodes of the default partition, or all nodes without one; or why Slurm does not list them."""
    asked = run(["sinfo", "--noheader", "--Node", "--format=%N|%P|%T|%G"])
    if asked.returncode:
        why = asked.stderr.strip().splitlines()[-1] if asked.stderr.strip() else f"code {asked.returncode}"
        return error("controller", "sinfo does not answer", why, "ask whoever runs the cluster: slurmctld is away")
    rows = [line.split("|") for line in asked.stdout.splitlines() if line.count("|") == 3]
    ours = [row for row in rows if row[1].endswith("*")] or rows
    return [
        _Declared(name=name, state=state.rstrip("*~#!%$@^-").lower(), gpus=_gpus_of(gres))
        for name, _, state, gres in ours
    ]


def _gpus_of(gres: str) -> int:
    """Return the GPUs in `gpu:h100:8(S:0-1),shard:4`."""
    return sum(int(number or 1) for number in re.findall(r"\bgpu(?::[\w.-]*[A-Za-z_][\w.-]*)?(?::(\d+))?", gres))


def _judge_declared(declared: Sequence[_Declared], nodes: int, gpus: int) -> list[Checked]:
    able = [one for one in declared if one.gpus >= gpus]
    usable = [one for one in able if one.state in USABLE]
    what = f"nodes of the default partition with {gpus} GPUs" if gpus else "nodes of the default partition"
    if len(able) < nodes:
        most = max((one.gpus for one in declared), default=0)
        why = f"Slurm declares {len(declared)} nodes, at most {most} GPUs each"
        remedy = "--gpus-per-node, --nodes, or GresTypes=gpu in slurm.conf and the devices in gres.conf"
        return [error("gpus", f"{len(able)} {what}, {nodes} are needed", why, remedy)]
    if len(usable) < nodes:
        states = ", ".join(f"{one.name} is {one.state}" for one in able if one.state not in USABLE)
        remedy = "scontrol show node NAME says why; fewer with --nodes"
        return [error("nodes", f"{len(usable)} {what} are up, {nodes} are needed", states, remedy)]
    return [Checked(code="nodes", severity=INFO, what=f"{len(usable)} {what} are up, {nodes} are needed")]


def _look_at_nodes(nodes: int, gpus: int, *, folder: Path, python: str) -> list[Checked]:
    """Run the check on nodes that are free now."""
    token = folder / f".meshwright-{secrets.token_hex(8)}"
    codec.write_text(token, "\n")
    names = "$(scontrol show hostnames $SLURM_JOB_NODELIST | paste -sd, -)"
    options = ["--job-name=meshwright-doctor", f"--nodes={nodes}", "--ntasks-per-node=1", "--time=2", "--quiet"]
    options += [f"--immediate={NODES_FREE_S}", *([f"--gpus-per-node={gpus}"] if gpus else [])]
    # The names are only known inside the job, to a shell with a fixed script whose words are arguments.
    script = (
        f'names="{names}"; exec "$0" -m {NODE_CHECK} --names="$names" --file="$1"'
        f' --endpoint="${{names%%,*}}:{SLURM_PORT}"'
    )
    try:
        asked = run(["srun", *options, "sh", "-c", script, python, str(token)], limit_s=CHECK_S)
    except subprocess.TimeoutExpired:
        return [error("job", f"a job of {nodes} nodes did not end within {CHECK_S:.0f} s", "", "squeue says why")]
    finally:
        token.unlink(missing_ok=True)
    answers = answers_in(asked.stdout)
    said = asked.stderr.strip().splitlines()
    if not answers and re.search(r"immediate|temporarily|busy", asked.stderr, re.IGNORECASE):
        why = "what is on them was not looked at"
        return [
            Checked(code="busy", severity=WARNING, what=f"{nodes} nodes are not free now", why=why, remedy="ask again")
        ]
    if not answers:
        remedy = f"{python} with meshwright and torch must start on every node: activate its environment before"
        return [error("python", "the check did not run on any node", said[0] if said else "", remedy)]
    return judge_nodes(answers, nodes, gpus)
