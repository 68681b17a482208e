"""Ray, by the job API of its dashboard, which needs no package of Ray here.

The address is found as by Ray's command line: RAY_API_SERVER_ADDRESS, else RAY_ADDRESS if it is an HTTP address, else
port 8265 of this machine; RAY_AUTH_TOKEN is sent if it is set.

Source: Ray's documentation, "Ray Jobs REST API" (/api/jobs/, states of a job).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from planner.runs.schedulers.launchers import JobFile
from planner.runs.schedulers.scheduler import ASK_S, SchedulerState, Submission, last_line
from topology import codec
from topology.codec import JsonObject
from topology.errors import PlannerError, UserError
from topology.units import MIB

LOCAL = "http://127.0.0.1:8265"
OVER = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})
WORDS = {"STOPPED": "cancelled"}
LOST_CODE = "exit code 75"  # of executor.launch.ray_nodes


@dataclass(frozen=True, slots=True)
class Ray:
    """We give jobs their names, so a lost answer leaves no job unknown."""

    collects: bool = True

    def named(self, name: str) -> str | None:
        return f"{name}-{secrets.token_hex(4)}"

    def submit(self, file: JobFile, job: str | None) -> str:
        ask("POST", "/api/jobs/", {**codec.parse_json(file.text, where=str(file.path)), "submission_id": job})
        return f"Ray job {job}"

    def state(self, folder: Path, submission: Submission) -> SchedulerState:
        del folder
        try:
            word = str(ask("GET", f"/api/jobs/{quote(str(submission.job))}").get("status"))
        except NotThere:
            return SchedulerState(word="gone", over=True)
        return SchedulerState(word=WORDS.get(word, word.lower()), over=word in OVER)

    def cancel(self, folder: Path, submission: Submission) -> None:
        del folder
        ask("POST", f"/api/jobs/{quote(str(submission.job))}/stop")

    def ended_as(self, folder: Path, submission: Submission, word: str) -> str:
        del folder
        with contextlib.suppress(PlannerError):
            said = str(ask("GET", f"/api/jobs/{quote(str(submission.job))}").get("message"))
            if word == "failed" and LOST_CODE in said:
                return "node_fail"
        return word

    def last_words(self, folder: Path, submission: Submission) -> str:
        del folder
        with contextlib.suppress(PlannerError):
            return last_line(job_log(str(submission.job)))
        return ""


class NotThere(PlannerError):
    """What was asked for does not exist."""


def address() -> str:
    """Return the address of the dashboard. Raises UserError for an invalid setting."""
    named = os.environ.get("RAY_API_SERVER_ADDRESS", "")
    other = os.environ.get("RAY_ADDRESS", "")
    found = named or (other if other.startswith("http") else LOCAL)
    parts = urlsplit(found)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise UserError(f"RAY_API_SERVER_ADDRESS is {found!r}", remedy="http://HOST:8265, the dashboard of the cluster")
    return found.rstrip("/")


def job_log(job: str) -> str:
    """Return the output of a job. Raises PlannerError."""
    return str(ask("GET", f"/api/jobs/{quote(job)}/logs").get("logs", ""))


def ask(method: str, path: str, body: JsonObject | None = None) -> JsonObject:
    """Return the dashboard's answer. Raises NotThere, or PlannerError if it refuses or is unreachable."""
    url = address()
    token = os.environ.get("RAY_AUTH_TOKEN")
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, method=method, headers=headers)  # noqa: S310 - see address
    try:
        with urllib.request.urlopen(request, timeout=ASK_S) as answer:  # noqa: S310
            text = answer.read(8 * MIB).decode("utf-8", errors="replace")
    except urllib.error.HTTPError as error:
        said = error.read(65536).decode("utf-8", errors="replace")
        kind = NotThere if error.code == 404 else PlannerError
        raise kind("Ray refused", why=f"{error.code}: {last_line(said)}") from error
    except OSError as error:
        raise PlannerError(
            f"Ray's dashboard at {url} does not answer",
            why=str(getattr(error, "reason", error)),
            remedy="RAY_API_SERVER_ADDRESS=http://HOST:8265",
        ) from error
    found = codec.parse_json(text, where=f"{url}{path}") if text.strip() else {}
    return found if isinstance(found, dict) else {"items": found}
