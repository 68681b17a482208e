"""A run at a scheduler: submitted once, followed, cancelled, and its records collected.

A record of the submission is written next to the job's file before the scheduler is asked. So a process that follows
the run after a crash submits nothing twice, and reports it if it cannot know whether the scheduler took the job.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from planner.io import child
from planner.runs.run_document import read_report
from planner.runs.schedulers import launchers
from planner.runs.schedulers.kubernetes import Kubernetes
from planner.runs.schedulers.launchers import JobFile, LauncherJob
from planner.runs.schedulers.ray import Ray
from planner.runs.schedulers.scheduler import Scheduler, SchedulerState, Submission
from planner.runs.schedulers.slurm import Slurm
from topology import codec
from topology.codec import JsonObject
from topology.errors import PlannerError

SCHEDULERS: dict[str, Scheduler] = {
    "slurm": Slurm(),
    "ray": Ray(),
    **dict.fromkeys(("kubernetes", "jobset", "trainjob"), Kubernetes()),
}
RECORD = "submission.json"
POLL_S = 2.0
COLLECT_S = 60.0
LATE_S = 15.0  # seconds for a shared file system to show what a job wrote before it ended
# Cause for each state in which a scheduler ends a job itself.
ENDED_BY_SCHEDULER = {
    "preempted": "the scheduler gave the nodes to another job",
    "disrupted": "the scheduler took a node away, or it failed",
    "timeout": "the time limit of the job was over",
    "deadline": "the deadline of the job was over",
    "node_fail": "a node failed",
    "boot_fail": "a node did not start",
    "out_of_memory": "a node had no memory left for the job",
    "cancelled": "the job was cancelled",
    "revoked": "the job was revoked",
}
TAKEN_AWAY = frozenset({"preempted", "disrupted", "node_fail", "boot_fail", "revoked"})  # they say nothing of what ran
ENDED_BY_ITSELF = frozenset({"finished", "out_of_memory", "wrong_numbers", "not_as_requested"})


class NotEnded(PlannerError):
    """A job did not end within its time, and was cancelled."""


class NoReport(PlannerError):
    """A job ended without a report. `taken_away`: the scheduler took its nodes."""

    taken_away = False


def recorded(folder: Path) -> Submission | None:
    """Return the submission recorded in a folder; None without one. Raises PlannerError for a damaged record."""
    path = folder / RECORD
    return codec.convert(codec.read_json(path), Submission, where=str(path)) if path.is_file() else None


def submit(file: JobFile, launcher: str, *, name: str = "meshwright") -> Submission:
    """Hand a job's file to its scheduler, and record it next to the file. Raises PlannerError if it is refused."""
    return submit_array(file, launcher, [file.path.parent], name=name)[0]


def submit_array(file: JobFile, launcher: str, folders: Sequence[Path], *, name: str) -> list[Submission]:
    """Submit one job file that runs a job in each of `folders`, and record it in each. Raises as `submit`."""
    scheduler = SCHEDULERS[launcher]
    one = len(folders) == 1
    asked = [
        Submission(launcher=launcher, file=file.path.name, job=scheduler.named(name), task=None if one else number)
        for number, _ in enumerate(folders)
    ]
    for folder, each in zip(folders, asked, strict=True):
        _record(folder, each)
    try:
        said = scheduler.submit(file, asked[0].job)
    except PlannerError:
        for folder in folders:
            (folder / RECORD).unlink(missing_ok=True)
        raise
    taken = [replace(each, said=said) for each in asked]
    for folder, each in zip(folders, taken, strict=True):
        _record(folder, each)
    return taken


def _record(folder: Path, submission: Submission) -> None:
    codec.write_text(folder / RECORD, codec.to_json(submission) + "\n")


def state(folder: Path, submission: Submission) -> SchedulerState:
    """Ask the scheduler about a job."""
    try:
        return SCHEDULERS[submission.launcher].state(folder, submission)
    except (OSError, subprocess.TimeoutExpired, PlannerError) as error:
        return SchedulerState(word=f"the scheduler does not answer: {error}", over=None)


def cancel(folder: Path) -> None:
    """Cancel the job submitted from a folder; a job that has ended, or cannot be asked about, is left alone."""
    with contextlib.suppress(PlannerError, OSError, subprocess.TimeoutExpired):
        submission = recorded(folder)
        if submission is not None and submission.said is not None:
            SCHEDULERS[submission.launcher].cancel(folder, submission)


def cancel_below(folder: Path) -> None:
    """Cancel all jobs submitted from a folder and the folders in it that have left no report."""
    for record in sorted(folder.rglob(RECORD)):
        if read_report(record.parent) is None:
            cancel(record.parent)


def collected(job: LauncherJob, launcher: str, *, over: bool = False) -> JsonObject | None:
    """Return the report of a run; if its nodes left only records, make it from these, once all nodes have left theirs
    or the job is over.
    """
    folder = job.directory
    ended_nodes = len([*folder.glob("agents/*.json")])
    enough = ended_nodes >= (1 if over else job.nodes)
    alone = over or not SCHEDULERS[launcher].collects
    if not (folder / "run.json").is_file() and alone and job.nodes > 1 and enough:
        command = launchers.collect_command(job)
        try:
            with (folder / "collect.txt").open("wb") as log:
                child.run_module(command[2], command[3:], budget_s=COLLECT_S, output=log)
        except KeyboardInterrupt:  # also if it has collected an interrupted run
            if not (folder / "run.json").is_file():
                raise
    return read_report(folder)


@dataclass(slots=True, kw_only=True)
class Followed:
    """A job that is followed until `ends`, a value of time.monotonic()."""

    job: LauncherJob
    submission: Submission
    ends: float
    tell: Callable[[str], None]
    late_s: float = LATE_S
    given_up: float | None = None

    def look(self) -> JsonObject | None:
        """Return the report, with the scheduler's cause if the run was ended from outside; None while it runs.

        Raises NoReport if it ended without one, NotEnded when its time is over, and PlannerError if it is unknown
        whether it was submitted.
        """
        folder, submission = self.job.directory, self.submission
        if submission.said is None:
            raise PlannerError(
                "it is not known whether the job was submitted",
                why=f"the process that asked the scheduler ended before its answer; see {folder / RECORD}",
                remedy=f"look for {self.job.name} in the queue, cancel it, and ask again",
            )
        if (document := collected(self.job, submission.launcher)) is not None:
            return document
        now = time.monotonic()
        found = state(folder, submission)
        self.tell(f"{submission.said}: {found.word}")
        self.given_up = None if not found.over else self.given_up or now + self.late_s
        if self.given_up is not None and now >= self.given_up:
            if (document := collected(self.job, submission.launcher, over=True)) is not None:
                return document
            raise self._no_report(found.word)
        if now > self.ends:
            cancel(folder)
            raise NotEnded(
                "the job did not end within its time, and was cancelled",
                why=f"{submission.said}: {found.word}",
                remedy="--wait longer",
            )
        return None

    def _no_report(self, word: str) -> NoReport:
        folder = self.job.directory
        scheduler = SCHEDULERS[self.submission.launcher]
        words = scheduler.last_words(folder, self.submission)
        word = scheduler.ended_as(folder, self.submission, word)
        error = NoReport(
            f"the job ended ({word}) and left no report",
            why="; ".join(filter(None, (ENDED_BY_SCHEDULER.get(word), words)))
            or "it may have been cancelled before it started",
            remedy=f"see {folder}",
        )
        error.taken_away = word in TAKEN_AWAY
        return error


def follow(
    job: LauncherJob,
    submission: Submission,
    patience_s: float,
    *,
    tell: Callable[[str], None],
    poll_s: float = POLL_S,
    late_s: float = LATE_S,
) -> JsonObject:
    """Wait until a run has left its report, and return it. A job that is still queued at the end is cancelled.

    Raises PlannerError if it ended without a report, or did not end within `patience_s`.
    """
    followed = Followed(job=job, submission=submission, ends=time.monotonic() + patience_s, tell=tell, late_s=late_s)
    while (document := followed.look()) is None:
        time.sleep(poll_s)
    add_cause(document, ended_as(document, job.directory, submission, late_s=late_s, poll_s=poll_s))
    return document


def ended_as(
    document: JsonObject, folder: Path, submission: Submission, *, late_s: float = LATE_S, poll_s: float = POLL_S
) -> str:
    """Return the scheduler's state of a run that was ended from outside, after waiting at most `late_s`; empty if there
    is none.
    """
    if document["status"] in ENDED_BY_ITSELF:
        return ""
    ends = time.monotonic() + late_s
    while not (found := state(folder, submission)).over:
        if time.monotonic() > ends:
            return ""
        time.sleep(poll_s)
    return SCHEDULERS[submission.launcher].ended_as(folder, submission, found.word)


def add_cause(document: JsonObject, word: str) -> None:
    """Add the cause of a run's end from outside to its failure; `word` is from `ended_as`."""
    if document["status"] in ENDED_BY_ITSELF:
        return
    why = ENDED_BY_SCHEDULER.get(word)
    if why is None and document["status"] == "interrupted":
        why = "SIGTERM came from outside, as from a scheduler that needs the nodes or whose time limit is over"
    if why is None:
        return
    failure = document["failure"] or {"rank": None, "message": ""}
    said = f"; the run says: {failure['message']}" if failure["message"] else ""
    document["failure"] = {**failure, "rank": None, "message": f"{why} ({word}){said}" if word else f"{why}{said}"}
