"""What every scheduler is asked, and what it was given."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from planner.runs.schedulers.launchers import JobFile

ASK_S = 30.0  # for a scheduler to answer
MOST_LOG_BYTES = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a scheduler was given. `said` is its answer; None while it is being asked.

    `job` is the name that we gave to the job, where the scheduler lets us; `task` the index of a job in an array.
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
    """What a scheduler says of a job. `over` is None where it did not answer."""

    word: str
    over: bool | None


class Scheduler(Protocol):
    """Raises PlannerError, OSError or TimeoutExpired where the scheduler cannot be asked."""

    @property
    def collects(self) -> bool:
        """Whether the job makes the report of its nodes' records itself."""

    def named(self, name: str) -> str | None:
        """Return the name of a new job, where we give it."""

    def submit(self, file: JobFile, job: str | None) -> str:
        """Hand over a job and return the answer. Raises PlannerError where it is refused."""

    def state(self, folder: Path, submission: Submission) -> SchedulerState:
        """Return how a job stands."""

    def cancel(self, folder: Path, submission: Submission) -> None:
        """End a job; one that has ended stays as it is."""

    def ended_as(self, folder: Path, submission: Submission, word: str) -> str:
        """Return why a job ended that is over with `word`, in our words for causes."""

    def last_words(self, folder: Path, submission: Submission) -> str:
        """Return the last line that a job printed; nothing where there is none."""


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a scheduler's command."""
    return subprocess.run(list(command), capture_output=True, text=True, errors="replace", timeout=ASK_S, check=False)


def log_tail(folder: Path, pattern: str) -> str:
    """Return the end of the newest log of a folder."""
    for path in sorted(folder.glob(pattern), reverse=True):
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_LOG_BYTES))
            return file.read().decode("utf-8", errors="replace")
    return ""


def last_line(text: str) -> str:
    """Return the last line of what a command said."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no word"
