"""Slurm, by its commands.

Sources: squeue(1) and its job state codes, scontrol(1), sacct(1), scancel(1).
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from planner.runs.schedulers import launchers
from planner.runs.schedulers.launchers import JobFile
from planner.runs.schedulers.scheduler import SchedulerState, Submission, last_line, log_tail, run

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
            with contextlib.suppress(OSError):
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
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
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
