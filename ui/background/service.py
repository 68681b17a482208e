"""The service's jobs as pages use them: of a service elsewhere (`planner ui --server`), or of its queue in this
process.

In this process it is the queue of `planner service` on this machine, in the same database, so that both show the same
jobs.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

import platformdirs
import streamlit as st

from planner.remote.connect import connect
from planner.remote.errors import ServiceError
from planner.remote.settings import SERVER, Settings
from topology.codec import JsonObject

if TYPE_CHECKING:
    from planner.remote.client import Client
    from planner.service.queue import Queue
    from ui.charts.row_types import Artifact, JobDocument

NEEDS = ("fastapi", "pydantic", "sqlalchemy", "alembic", "httpx")
USER = "local"
NOT_FOUND = 404
PATIENCE_S = 5.0  # seconds to wait for a service that does not answer, while a user waits


class LocalQueue:
    """The queue in this process, with the methods of `planner.remote.client.Client` that pages use."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def submit(self, command: str, flags: JsonObject) -> str:
        return self.queue.ask(USER, command, flags)

    def job(self, job: str) -> JsonObject:
        found = self.queue.read(USER, job)
        if found is None:
            error = ServiceError("there is no such job")
            error.status = NOT_FOUND
            raise error
        return found.model_dump()

    def jobs(self, *, limit: int) -> list[JsonObject]:
        return [one.model_dump() for one in self.queue.newest(USER, limit)]

    def cancel(self, job: str) -> None:
        self.queue.cancel(USER, job)

    def so_far(self, job: str) -> bytes:
        return self.queue.state_so_far(USER, job)

    def content(self, artifact: Artifact) -> bytes:
        return self.queue.files.path(artifact["sha256"]).read_bytes()


def server() -> str | None:
    """Return the address of the service that this explorer uses; None if it works without one."""
    return os.environ.get(SERVER) or None


def missing() -> list[str]:
    """Return the packages that jobs need and that are missing."""
    return [name for name in NEEDS if find_spec(name) is None]


@st.cache_resource(show_spinner=False)
def jobs() -> LocalQueue | Client:
    """Return the jobs that all sessions share. Raises PlannerError where the service or the database cannot be used."""
    return client() if server() else LocalQueue(queue())


def read(job: str) -> JobDocument | None:
    """Return a job's document; None for an unknown id. Raises PlannerError."""
    try:
        return cast("JobDocument", jobs().job(job))
    except ServiceError as error:
        if error.status == NOT_FOUND:
            return None
        raise


@st.cache_resource(show_spinner=False)
def client() -> Client:
    """Return the client of the service of `planner ui --server`."""
    return connect(str(server()), patience_s=PATIENCE_S)


@st.cache_resource(show_spinner=False)
def queue() -> Queue:
    """Return the queue of this process, started."""
    from planner.service.queue import Queue as Shared  # noqa: PLC0415 - needs the extra `service`

    folder = platformdirs.user_data_path("meshwright", appauthor=False) / "service"
    found = Shared(Settings(folder=str(folder), workers=1))
    found.dispatcher.start()
    return found
