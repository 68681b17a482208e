"""Kubernetes, by kubectl: the objects of a manifest.

Sources: kubectl get; conditions and their reasons of a Job (batch/v1), of a JobSet and of a TrainJob.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner.runs.schedulers import launchers
from planner.runs.schedulers.launchers import JobFile
from planner.runs.schedulers.scheduler import ASK_S, SchedulerState, Submission, last_line, run
from topology import codec
from topology.codec import JsonObject

ENDINGS = {"Complete": "completed", "Completed": "completed", "Failed": "failed"}  # conditions of a job that has ended
KINDS = frozenset({"Job", "JobSet", "TrainJob"})


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """Jobs are known by their manifests."""

    collects: bool = False

    def named(self, name: str) -> None:
        """Return None: the scheduler's answer names a job."""

    def submit(self, file: JobFile, job: str | None) -> str:
        del job
        return launchers.submit(file.submit)

    def state(self, folder: Path, submission: Submission) -> SchedulerState:
        asked = run([*_kubectl("get", folder, submission), "--output=json"])
        if asked.returncode:
            if "notfound" in asked.stderr.lower().replace(" ", ""):
                return SchedulerState(word="gone", over=True)
            return SchedulerState(word=f"kubectl does not answer: {last_line(asked.stderr)}", over=None)
        true = {str(one.get("type")): one for one in _conditions(asked.stdout) if one.get("status") == "True"}
        for name, word in ENDINGS.items():
            if name in true:
                return SchedulerState(word=_cause(true[name]) or word, over=True)
        return SchedulerState(word="suspended" if "Suspended" in true else "active", over=False)

    def cancel(self, folder: Path, submission: Submission) -> None:
        run([*_kubectl("delete", folder, submission), "--ignore-not-found"])

    def ended_as(self, folder: Path, submission: Submission, word: str) -> str:
        del folder, submission
        return word

    def last_words(self, folder: Path, submission: Submission) -> str:
        del folder, submission
        return ""


def _conditions(text: str) -> list[JsonObject]:
    """Return the conditions of the job among what kubectl shows, which is one object or a list."""
    document = codec.parse_json(text, where="kubectl get")
    found = document if isinstance(document, dict) else {}
    items = found.get("items") if found.get("kind") == "List" else [found]
    for one in items if isinstance(items, list) else ():
        if isinstance(one, dict) and one.get("kind", "Job") in KINDS:
            status = one.get("status")
            conditions = status.get("conditions") if isinstance(status, dict) else None
            return [each for each in (conditions if isinstance(conditions, list) else ()) if isinstance(each, dict)]
    return []


def _cause(condition: JsonObject) -> str:
    """Return our cause for a job that Kubernetes ended."""
    if condition.get("reason") == "DeadlineExceeded":
        return "timeout"
    return "disrupted" if "DisruptionTarget" in str(condition.get("message")) else ""


def _kubectl(verb: str, folder: Path, submission: Submission) -> list[str]:
    return ["kubectl", verb, f"--filename={folder / submission.file}", f"--request-timeout={ASK_S / 2:.0f}s"]
