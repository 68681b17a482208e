"""Between a job's row and its process: the command line from the request, and the outcome from the output."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from planner.jobs.processes import Job
from planner.requests.flag import Flag
from planner.service.requests import INPUTS, JobRequest, arguments, is_scheduled, write_inputs
from planner.service.store.files import Files
from planner.service.store.jobs import DONE, FAILED, Artifact, Claim, JobEnd
from topology import codec
from topology.errors import BadInput, PlannerError

MAX_ARTIFACTS = 2000
ANSWERED = frozenset({0, 3, 4})  # exit codes of a command that has answered, if it printed a document


def request_text(asked: JobRequest, files: Files) -> str:
    """Return a request as it is stored, with its files by digest. Raises PlannerError."""
    kept = {name: {"name": file, "sha256": files.add_text(text)} for name, (file, text) in asked.files.items()}
    return codec.to_json({"values": asked.values, "files": kept}, indent=None)


def scheduled(claim: Claim) -> bool:
    """Return whether a claim is for a run at a scheduler."""
    return is_scheduled(claim.command, codec.parse_json(claim.request, where="request")["values"])


def prepared(claim: Claim, flags: Mapping[str, Flag], files: Files, folder: Path) -> list[str]:
    """Make the folder of a job with its inputs, and return the arguments of its command. Raises PlannerError,
    OSError.
    """
    request = codec.parse_json(claim.request, where="request")
    sent = {name: (one["name"], files.read_text(one["sha256"])) for name, one in request["files"].items()}
    asked = JobRequest(command=claim.command, values=request["values"], files=sent)
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(asked, folder)
    return arguments(flags, asked)


def ending(job: Job, claim: Claim, folder: Path, files: Files) -> JobEnd:
    """Return how a job ended, and store what it wrote."""
    if job.error is not None:
        return JobEnd(state=FAILED, exit_code=job.error.exit_code, error=error_text(job.error))
    code, answer, said = job.result
    request = codec.parse_json(claim.request, where="request")
    try:
        wrote = _artifacts(folder, files, {one["sha256"] for one in request["files"].values()})
    except (PlannerError, OSError) as error:
        return JobEnd(state=FAILED, exit_code=1, error=error_text(error), said=said)
    result = _result(answer, as_text=request["values"].get("json") is False)
    if result is not None and code in ANSWERED:
        return JobEnd(state=DONE, exit_code=code, result=result, said=said, artifacts=wrote)
    failed = _error(said) or _failure(result) or {"message": f"the command ended with code {code}"}
    why = codec.to_json(failed, indent=None)
    return JobEnd(state=FAILED, exit_code=code, result=result, error=why, said=said, artifacts=wrote)


def error_text(error: Exception) -> str:
    """Return an error as JSON: its message, why, and the remedy."""
    if isinstance(error, PlannerError):
        said = {"message": error.what, "why": error.why, "remedy": error.remedy}
    else:
        said = {"message": str(error)}
    return codec.to_json({key: value for key, value in said.items() if value}, indent=None)


def _result(answer: str, *, as_text: bool) -> str | None:
    if not answer.strip():
        return None
    if as_text:
        return codec.to_json({"text": answer}, indent=None)
    try:
        document: Any = codec.parse_json(answer, where="the answer")
    except BadInput:
        return None
    return codec.to_json(document, indent=None)


def _error(said: str) -> dict[str, str]:
    """Return the error that a command printed last (`PlannerError.__str__`), in its parts."""
    _, found, error = said.rpartition("error: ")
    if not found:
        return {}
    message, _, remedy = error.strip()[-4000:].partition("\n  do: ")
    message, _, why = message.partition("\n  why: ")
    parts = {"message": message, "why": why, "remedy": remedy}
    return {key: value for key, value in parts.items() if value}


def _failure(result: str | None) -> dict[str, str]:
    """Return why a run failed, from its report."""
    document = codec.parse_json(result or "{}", where="the answer")
    failure = document.get("failure") if isinstance(document, dict) else None
    message = failure.get("message") if isinstance(failure, dict) else None
    return {"message": message} if isinstance(message, str) else {}


def _artifacts(folder: Path, files: Files, sent: Collection[str]) -> tuple[Artifact, ...]:
    """Store the files that a job wrote, and inputs that it changed.

    Raises PlannerError if there are too many, or no room.
    """
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    if len(found) > MAX_ARTIFACTS:
        raise PlannerError(f"the job wrote {len(found)} files", why=f"{MAX_ARTIFACTS} are kept")
    kept = [
        Artifact(name=path.relative_to(folder).as_posix(), sha256=files.add_file(path), bytes=path.stat().st_size)
        for path in found
    ]
    return tuple(one for one in kept if not (one.name.startswith(f"{INPUTS}/") and one.sha256 in sent))
