"""The service's documents about jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel

from planner.io.output import SCHEMA_VERSION
from topology import codec
from topology.codec import JsonObject

State = Literal["queued", "running", "done", "failed", "cancelled"]


class Accepted(BaseModel):
    """A job that was accepted: its id, and where to read and to follow it."""

    job: str
    url: str
    events: str


class Error(BaseModel):
    """Why a job failed: what happened, why, and what to do."""

    message: str
    why: str = ""
    remedy: str = ""


class Written(BaseModel):
    """A file that a job wrote."""

    name: str
    bytes: int
    sha256: str
    url: str


class JobSummary(BaseModel):
    """A job without its result. Times are ISO 8601, UTC."""

    job: str
    command: str
    state: State
    progress: str
    created_at: str
    started_at: str | None
    finished_at: str | None


class JobDocument(JobSummary):
    """A job. `result` is the document that the command prints with --json, or {"text": ...} without."""

    schema_version: int
    starts: int
    exit_code: int | None
    result: Any
    error: Error | None
    warnings: str
    artifacts: list[Written]


class JobList(BaseModel):
    """Jobs, newest first."""

    jobs: list[JobSummary]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> JobList:
        return cls(jobs=[JobSummary(**_summary(row)) for row in rows])


def document(row: Mapping[str, Any]) -> JobDocument:
    """Return the document of a job, from its row with `artifacts`."""
    job = row["id"]
    wrote = [
        Written(name=one.name, bytes=one.bytes, sha256=one.sha256, url=f"/v1/jobs/{job}/artifacts/{one.name}")
        for one in row["artifacts"]
    ]
    return JobDocument(
        **_summary(row),
        schema_version=SCHEMA_VERSION,
        starts=row["fence"],
        exit_code=row["exit_code"],
        result=_json(row["result"]),
        error=_json(row["error"]),
        warnings=row["said"],
        artifacts=wrote,
    )


def _summary(row: Mapping[str, Any]) -> JsonObject:
    return {
        "job": row["id"],
        **{name: row[name] for name in ("command", "state", "progress")},
        "created_at": _time(row["created_s"]),
        "started_at": _time(row["started_s"]),
        "finished_at": _time(row["finished_s"]),
    }


def _json(text: str | None) -> Any:
    return None if text is None else codec.parse_json(text, where="job")


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
