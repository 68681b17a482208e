"""Ray, by the job API of its dashboard, which needs no package of Ray here; and a check that it has what a job needs.

The address is found as by Ray's command line: RAY_API_SERVER_ADDRESS, else RAY_ADDRESS if it is an HTTP address, else
port 8265 of this machine; RAY_AUTH_TOKEN is sent if it is set.

Source: Ray's documentation, "Ray Jobs REST API" (/api/jobs/, states of a job) and the state API (/api/v0/nodes).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from planner.runs.schedulers.launchers import JobFile
from planner.runs.schedulers.node_answers import NODE_CHECK, Checked, answers_in, error, judge_nodes, worst_first
from planner.runs.schedulers.scheduler import ASK_S, SchedulerState, Submission, last_line
from topology import codec
from topology.codec import JsonObject
from topology.errors import PlannerError, UserError
from topology.finding import INFO, WARNING
from topology.units import MIB

LOCAL = "http://127.0.0.1:8265"
OVER = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})
WORDS = {"STOPPED": "cancelled"}
LOST_CODE = "exit code 75"  # of executor.launch.ray_nodes
ROOM_S, CHECK_S, POLL_S = 30, 120.0, 1.0


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


def check_ray(nodes: int, gpus_per_node: int | None, *, folder: Path, python: str = "python3") -> list[Checked]:
    """Return the checks, faults first. Without `gpus_per_node` a job requests as many as nodes declare."""
    try:
        version = ask("GET", "/api/version")
        listed = ask("GET", "/api/v0/nodes")
    except PlannerError as away:
        return [error("controller", away.what, away.why, away.remedy)]
    alive = [one for one in _rows(listed) if one.get("state") == "ALIVE"]
    declared = [int(one["resources_total"].get("GPU", 0)) for one in alive]
    gpus = max(declared, default=0) if gpus_per_node is None else gpus_per_node
    able = sum(has >= gpus for has in declared)
    what = f"{able} nodes of Ray {version.get('ray_version', '?')} with {gpus} GPUs are up, {nodes} are needed"
    if able < nodes:
        why = ", ".join(f"{one.get('node_ip')} has {has}" for one, has in zip(alive, declared, strict=True))
        return [error("gpus", what, why, "--gpus-per-node, --nodes; or ray start on more nodes")]
    found = [Checked(code="nodes", severity=INFO, what=what)]
    try:
        found += _look_at_nodes(nodes, gpus, folder=folder, python=python)
    except PlannerError as refused:
        found.append(error("job", refused.what, refused.why, refused.remedy))
    return worst_first(found)


def _rows(document: Any) -> list[Any]:
    """Return the nodes in an answer of the state API."""
    found = document
    for name in ("data", "result", "result"):
        found = found.get(name) if isinstance(found, dict) else None
    rows = found if isinstance(found, list) else []
    return [one for one in rows if isinstance(one, dict) and isinstance(one.get("resources_total"), dict)]


def _look_at_nodes(nodes: int, gpus: int, *, folder: Path, python: str) -> list[Checked]:
    """Run the check on nodes that are free now. Raises PlannerError."""
    token = folder / f".meshwright-{secrets.token_hex(8)}"
    codec.write_text(token, "\n")
    job = f"meshwright-doctor-{secrets.token_hex(4)}"
    own: Sequence[str] = (python, "-m", NODE_CHECK, f"--file={token}")
    runner = (python, "-m", "executor.launch.ray_nodes", f"--nodes={nodes}", f"--gpus-per-node={gpus}")
    words = [*runner, f"--room={ROOM_S}", "--names", "--meet", "--", *own]
    try:
        ask("POST", "/api/jobs/", {"entrypoint": shlex.join(words), "submission_id": job})
        word, ends = "", time.monotonic() + CHECK_S
        while word not in OVER and time.monotonic() < ends:
            time.sleep(POLL_S)
            word = str(ask("GET", f"/api/jobs/{quote(job)}").get("status"))
        printed = job_log(job)
    finally:
        token.unlink(missing_ok=True)
        with contextlib.suppress(PlannerError):
            ask("POST", f"/api/jobs/{quote(job)}/stop")
    answers = answers_in(printed)
    if answers:
        return judge_nodes(answers, nodes, gpus)
    if word not in OVER:
        return [error("job", f"a job of {nodes} nodes did not end within {CHECK_S:.0f} s", "", "ray job list")]
    if "Ray found no" in printed:
        return [Checked(code="busy", severity=WARNING, what=last_line(printed), remedy="ask again")]
    remedy = f"{python} with meshwright, torch and ray must start on every node: ray start in their environment"
    return [error("python", "the check did not run on any node", last_line(printed), remedy)]
