"""The interface of schedulers, and the record of a submission."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from planner.runs.schedulers.launchers import JobFile
from topology.errors import PlannerError

ASK_S = 30.0  # seconds for a scheduler to answer
MOST_LOG_BYTES = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A submission. `said` is the scheduler's answer; None before it.

    `job` is the name that we gave the job, if the scheduler allows it; `task` the index of a job in an array.
    """

    launcher: str
    file: str  # name of the job's file in its folder
    said: str | None = None
    job: str | None = None
    task: int | None = None

    @property
    def number(self) -> str | None:
        """Return Slurm's number of the job."""
        found = re.search(r"\b(\d+)\b", self.said or "")
        if found is None:
            return None
        return found[1] if self.task is None else f"{found[1]}_{self.task}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """The state of a job at its scheduler. `over` is None if it did not answer."""

    word: str
    over: bool | None


class Scheduler(Protocol):
    """Raises PlannerError or TimeoutExpired if the scheduler cannot be asked."""

    @property
    def collects(self) -> bool:
        """Whether the job itself makes the report from its nodes' records."""

    def named(self, name: str) -> str | None:
        """Return the name of a new job, if we give it."""

    def submit(self, file: JobFile, job: str | None) -> str:
        """Hand over a job and return the answer. Raises PlannerError if it is refused."""

    def state(self, folder: Path, submission: Submission) -> SchedulerState:
        """Return the state of a job."""

    def cancel(self, folder: Path, submission: Submission) -> None:
        """End a job; a job that has ended is left alone."""

    def ended_as(self, folder: Path, submission: Submission, word: str) -> str:
        """Return the cause for a job that is over with state `word`."""

    def last_words(self, folder: Path, submission: Submission) -> str:
        """Return the last line of a job's output; empty if there is none."""


def run(command: Sequence[str], limit_s: float = ASK_S) -> subprocess.CompletedProcess[str]:
    """Run a scheduler's command. Raises PlannerError where it cannot be started, TimeoutExpired where it hangs."""
    try:
        return subprocess.run(
            list(command), capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except OSError as error:
        raise PlannerError(f"{command[0]} could not be run", why=str(error)) from error


def log_tail(folder: Path, pattern: str) -> str:
    """Return the end of the newest log of a folder."""
    for path in sorted(folder.glob(pattern), reverse=True):
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_LOG_BYTES))
            return file.read().decode("utf-8", errors="replace")
    return ""


def last_line(text: str) -> str:
    """Return the last line of a command's output."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no word"
