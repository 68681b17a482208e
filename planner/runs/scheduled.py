"""A run that a scheduler has: submitted once, followed, cancelled, and what it left collected.

A record of the submission stands next to the job's file from before the scheduler is asked. So whoever follows the run
after a crash submits nothing twice, and says so where it cannot be known whether the scheduler took the job.

Sources: squeue(1) and its job state codes, scontrol(1), sacct(1), scancel(1); kubectl get; conditions of a TrainJob
(Kubeflow Trainer).
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from planner.io import child
from planner.runs import launchers
from planner.runs.launchers import JobFile, LauncherJob
from planner.runs.run_document import read_report
from topology import codec
from topology.codec import JsonObject
from topology.errors import PlannerError

RECORD = "submission.json"
ASK_S = 30.0  # for a scheduler to answer
POLL_S = 2.0
COLLECT_S = 60.0
LATE_S = 15.0  # for a shared file system to show what a job wrote before it ended
MOST_LOG_BYTES = 4096
SLURM_ACTIVE = frozenset(
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
# Why a job ended that the scheduler ended, by Slurm's word for its state.
ENDED_BY_SCHEDULER = {
    "preempted": "the scheduler gave the nodes to another job",
    "timeout": "the time limit of the job was over",
    "deadline": "the deadline of the job was over",
    "node_fail": "a node failed",
    "boot_fail": "a node did not start",
    "out_of_memory": "a node had no memory left for the job",
    "cancelled": "the job was cancelled",
    "revoked": "the job was revoked",
}
ENDED_BY_ITSELF = frozenset({"finished", "out_of_memory", "wrong_numbers", "not_as_requested"})
ENDINGS = {"Complete": "completed", "Failed": "failed"}  # conditions of a TrainJob that has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a scheduler was given. `said` is its answer; None while it is being asked."""

    launcher: str
    file: str  # name of the job's file in its folder
    said: str | None = None

    @property
    def number(self) -> str | None:
        """Return Slurm's number of the job."""
        found = re.search(r"\b(\d+)\b", self.said or "")
        return found[1] if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """What a scheduler says of a job. `over` is None where it did not answer."""

    word: str
    over: bool | None


def recorded(folder: Path) -> Submission | None:
    """Return what was submitted from a folder; None where nothing was. Raises PlannerError for a damaged record."""
    path = folder / RECORD
    return codec.convert(codec.read_json(path), Submission, where=str(path)) if path.is_file() else None


def submit(file: JobFile, launcher: str) -> Submission:
    """Hand a job's file to its scheduler, and record it next to the file. Raises PlannerError where it is refused."""
    folder = file.path.parent
    asked = Submission(launcher=launcher, file=file.path.name)
    _record(folder, asked)
    try:
        taken = replace(asked, said=launchers.submit(file.submit))
    except PlannerError:
        (folder / RECORD).unlink(missing_ok=True)
        raise
    _record(folder, taken)
    return taken


def _record(folder: Path, submission: Submission) -> None:
    codec.write_text(folder / RECORD, codec.to_json(submission) + "\n")


def state(folder: Path, submission: Submission) -> SchedulerState:
    """Ask the scheduler about a job."""
    try:
        if submission.launcher == "slurm":
            return _slurm_state(submission)
        return _trainjob_state(folder, submission)
    except (OSError, subprocess.TimeoutExpired, PlannerError) as error:
        return SchedulerState(word=f"the scheduler does not answer: {error}", over=None)


def _slurm_state(submission: Submission) -> SchedulerState:
    number = str(submission.number)
    asked = _run(["squeue", "--noheader", f"--jobs={number}", "--states=all", "--format=%T"])
    words = asked.stdout.split()
    if asked.returncode and "invalid job id" not in asked.stderr.lower():
        return SchedulerState(word=f"squeue does not answer: {_last_line(asked.stderr)}", over=None)
    if not words:  # squeue forgets a job minutes after its end
        with contextlib.suppress(OSError):
            words = _run(
                ["sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={number}", "--format=State"]
            ).stdout.split()
    word = words[0] if words else "ended"
    return SchedulerState(word=word.lower(), over=word not in SLURM_ACTIVE)


def _trainjob_state(folder: Path, submission: Submission) -> SchedulerState:
    asked = _run([*_kubectl("get", folder, submission), "--output=json"])
    if asked.returncode:
        if "notfound" in asked.stderr.lower().replace(" ", ""):
            return SchedulerState(word="gone", over=True)
        return SchedulerState(word=f"kubectl does not answer: {_last_line(asked.stderr)}", over=None)
    document = codec.parse_json(asked.stdout, where="kubectl get")
    status = document.get("status") if isinstance(document, dict) else None
    conditions = status.get("conditions") if isinstance(status, dict) else None
    true = {
        str(one.get("type"))
        for one in (conditions if isinstance(conditions, list) else ())
        if isinstance(one, dict) and one.get("status") == "True"
    }
    for name, word in ENDINGS.items():
        if name in true:
            return SchedulerState(word=word, over=True)
    return SchedulerState(word="suspended" if "Suspended" in true else "active", over=False)


def _kubectl(verb: str, folder: Path, submission: Submission) -> list[str]:
    return ["kubectl", verb, f"--filename={folder / submission.file}", f"--request-timeout={ASK_S / 2:.0f}s"]


def cancel(folder: Path) -> None:
    """Cancel what was submitted from a folder; a job that has ended stays as it is, and so does one that cannot be
    asked.
    """
    with contextlib.suppress(PlannerError, OSError, subprocess.TimeoutExpired):
        submission = recorded(folder)
        if submission is None or submission.said is None:
            return
        if submission.launcher != "slurm":
            _run([*_kubectl("delete", folder, submission), "--ignore-not-found"])
        elif submission.number is not None:
            _run(["scancel", submission.number])


def cancel_below(folder: Path) -> None:
    """Cancel all that was submitted from a folder and those in it, and has left no report."""
    for record in sorted(folder.rglob(RECORD)):
        if read_report(record.parent) is None:
            cancel(record.parent)


def collected(job: LauncherJob, launcher: str, *, over: bool = False) -> JsonObject | None:
    """Return the report of a run; where its nodes left records only, make it of them, all nodes' or those of a job that
    is over.
    """
    folder = job.directory
    ended_nodes = len([*folder.glob("agents/*.json")])
    enough = ended_nodes >= (1 if over else job.nodes)
    # A Slurm job collects by itself, unless it is ended before.
    alone = launcher == "trainjob" or over
    if not (folder / "run.json").is_file() and alone and job.nodes > 1 and enough:
        command = launchers.collect_command(job)
        try:
            with (folder / "collect.txt").open("wb") as log:
                child.run_module(command[2], command[3:], budget_s=COLLECT_S, output=log)
        except KeyboardInterrupt:  # also where it has collected a run that was interrupted
            if not (folder / "run.json").is_file():
                raise
    return read_report(folder)


def follow(
    job: LauncherJob,
    submission: Submission,
    patience_s: float,
    *,
    tell: Callable[[str], None],
    poll_s: float = POLL_S,
    late_s: float = LATE_S,
) -> JsonObject:
    """Wait until a run has left its report, and return it. What is left in the queue at the end is cancelled.

    Raises PlannerError where it ended without one, or did not end within `patience_s`.
    """
    folder, ends = job.directory, time.monotonic() + patience_s
    if submission.said is None:
        raise PlannerError(
            "it is not known whether the job was submitted",
            why=f"the process that asked the scheduler ended before its answer; see {folder / RECORD}",
            remedy=f"look for {job.name} in the queue, cancel it, and ask again",
        )
    given_up: float | None = None
    while (document := collected(job, submission.launcher)) is None:
        now = time.monotonic()
        found = state(folder, submission)
        tell(f"{submission.said}: {found.word}")
        given_up = None if not found.over else given_up or now + late_s
        if given_up is not None and now >= given_up:
            if (document := collected(job, submission.launcher, over=True)) is not None:
                break
            raise PlannerError(
                f"the job ended ({found.word}) and left no report",
                why=_log(folder) or "it may have been cancelled before it started",
                remedy=f"see {folder}",
            )
        if now > ends:
            cancel(folder)
            raise PlannerError(
                f"the job did not end within {patience_s / 60:.0f} minutes, and was cancelled",
                why=f"{submission.said}: {found.word}",
                remedy="--wait longer",
            )
        time.sleep(poll_s)
    if document["status"] not in ENDED_BY_ITSELF:
        _add_cause(document, _ended_as(folder, submission, late_s, poll_s))
    return document


def _ended_as(folder: Path, submission: Submission, late_s: float, poll_s: float) -> str:
    """Return the scheduler's word for the end of a job that leaves the queue; nothing where it does not come."""
    ends = time.monotonic() + late_s
    while not (found := state(folder, submission)).over:
        if time.monotonic() > ends:
            return ""
        time.sleep(poll_s)
    return "preempted" if submission.launcher == "slurm" and _was_preempted(submission) else found.word


def _was_preempted(submission: Submission) -> bool:
    """Return whether Slurm took the nodes of a job away: it has "failed" where it ended by itself within its grace."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        shown = _run(["scontrol", "show", "job", str(submission.number), "--oneliner"]).stdout
        return re.search(r"\bPreemptTime=\d", shown) is not None
    return False


def _add_cause(document: JsonObject, word: str) -> None:
    """Add why a run was ended from outside to its failure."""
    why = ENDED_BY_SCHEDULER.get(word)
    if why is None and document["status"] == "interrupted":
        why = "SIGTERM came from outside, as from a scheduler that needs the nodes or whose time limit is over"
    if why is None:
        return
    failure = document["failure"] or {"rank": None, "message": ""}
    said = f"; the run says: {failure['message']}" if failure["message"] else ""
    document["failure"] = {**failure, "rank": None, "message": f"{why} ({word}){said}"}


def _log(folder: Path) -> str:
    """Return the last line that a job printed."""
    for path in sorted(folder.glob("slurm-*.txt"), reverse=True):
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_LOG_BYTES))
            return _last_line(file.read().decode("utf-8", errors="replace"))
    return ""


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no word"


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(command), capture_output=True, text=True, errors="replace", timeout=ASK_S, check=False)
