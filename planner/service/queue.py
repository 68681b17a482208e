"""The interface to the queue of jobs for other code of this process: the HTTP routes, and the explorer when it is
alone.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import SQLAlchemyError

from planner.remote.settings import Settings
from planner.requests.flag import Flag
from planner.requests.known import RUNS
from planner.service.dispatcher import Dispatcher
from planner.service.documents import JobDocument, JobList, JobSummary, document
from planner.service.outcome import request_text
from planner.service.requests import is_scheduled, job_request, request_type, served
from planner.service.store.database import connect
from planner.service.store.files import Files
from planner.service.store.jobs import Jobs
from topology.codec import JsonObject
from topology.errors import UserError

LEAST_FREE_BYTES = 64 << 20
STARTS, RUN_STARTS = 2, 1  # a question whose process dies is started once more; a run never is
FOLLOWERS = 100  # a run at a scheduler is submitted once, and followed again after every restart


class Queue:
    """Jobs that are accepted here, and started once `dispatcher` runs."""

    def __init__(self, settings: Settings) -> None:
        folder = Path(settings.folder)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._settings = settings
        self.flags: dict[str, Mapping[str, Flag]] = served()
        self.files = Files(folder / "objects")
        self.jobs = Jobs(connect(settings.database_url, folder))
        self.dispatcher = Dispatcher(self.jobs, self.files, self.flags, settings)

    def ready(self) -> str:
        """Return why no work can be accepted; empty if it can."""
        if not self.dispatcher.well:
            return "the dispatcher does not turn"
        if shutil.disk_usage(self._settings.folder).free < LEAST_FREE_BYTES:
            return "the disk is full"
        try:
            self.jobs.answers()
        except SQLAlchemyError:
            return "the database does not answer"
        return ""

    def submit(self, user: str, command: str, request: BaseModel, *, key: str | None = None) -> str:
        """Accept a request as a job and return its id; a request with a known key returns the earlier job.

        Raises UserError for an invalid request, KeyTaken, TooMany, and PlannerError without room.
        """
        trusted = self._settings.users is None
        asked = job_request(command, self.flags[command], request, may_read=trusted, programs=self._settings.programs)
        text = request_text(asked, self.files)
        job, _ = self.jobs.submit(
            owner=user,
            command=command,
            request=text,
            digest=hashlib.sha256(f"{command} {text}".encode()).hexdigest(),
            key=key,
            starts=starts_of(command, asked.values),
            most_waiting=self._settings.most_waiting,
        )
        self.dispatcher.wake()
        return job

    def ask(self, user: str, command: str, said: JsonObject) -> str:
        """Accept stated flags as a job and return its id. Raises as `submit` does."""
        try:
            request = request_type(command, self.flags[command]).model_validate(said)
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"{command} cannot be asked so", why=f"{first['loc'][0]}: {first['msg']}") from error
        return self.submit(user, command, request)

    def read(self, user: str, job: str) -> JobDocument | None:
        """Return a job of a user; None for an unknown id."""
        row = self.jobs.read(user, job)
        return None if row is None else document(row)

    def newest(self, user: str, limit: int) -> list[JobSummary]:
        """Return the newest jobs of a user, without their results."""
        return JobList.of(self.jobs.newest(user, limit)).jobs

    def state_so_far(self, user: str, job: str) -> bytes:
        """Return what a tuning or a run of a user has written here so far; empty if nothing."""
        return self.dispatcher.state_so_far(job) if self.jobs.read(user, job) is not None else b""

    def cancel(self, user: str, job: str) -> None:
        """Cancel a job that has not ended; its process ends at once."""
        self.jobs.cancel(user, job)
        self.dispatcher.cancel(job)


def starts_of(command: str, values: Mapping[str, Any]) -> int:
    """Return how often a job may be started until it counts as failed."""
    if is_scheduled(command, values):
        return FOLLOWERS
    return RUN_STARTS if command in RUNS else STARTS
