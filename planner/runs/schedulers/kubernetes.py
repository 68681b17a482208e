"""Kubernetes, by kubectl: what a manifest creates.

Sources: kubectl get; conditions of a TrainJob (Kubeflow Trainer).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planner.runs.schedulers import launchers
from planner.runs.schedulers.launchers import JobFile
from planner.runs.schedulers.scheduler import ASK_S, SchedulerState, Submission, last_line, run
from topology import codec

ENDINGS = {"Complete": "completed", "Failed": "failed"}  # conditions of a TrainJob that has ended


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

    def cancel(self, folder: Path, submission: Submission) -> None:
        run([*_kubectl("delete", folder, submission), "--ignore-not-found"])

    def ended_as(self, submission: Submission, word: str) -> str:
        del submission
        return word

    def last_words(self, folder: Path, submission: Submission) -> str:
        del folder, submission
        return ""


def _kubectl(verb: str, folder: Path, submission: Submission) -> list[str]:
    return ["kubectl", verb, f"--filename={folder / submission.file}", f"--request-timeout={ASK_S / 2:.0f}s"]
