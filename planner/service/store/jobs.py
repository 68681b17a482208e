"""Jobs in the database: accepted once, started by one server at a time, ended once.

A server that starts a job holds it by a lease, which it renews, and by a fence, the number of that start. What it
writes counts only while the job runs with this fence, so a server that was believed dead cannot end a job that another
one has restarted. Times are those of the database, so servers need no common clock.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Engine, case, delete, func, insert, literal_column, select, update
from sqlalchemy.exc import IntegrityError

from planner.requests.known import RUNS
from planner.service.store.tables import ARTIFACTS, JOBS
from topology import codec
from topology.codec import JsonObject
from topology.errors import PlannerError

QUEUED, RUNNING, DONE, FAILED, CANCELLED = "queued", "running", "done", "failed", "cancelled"
ENDED = frozenset({DONE, FAILED, CANCELLED})
MAX_LINE = 500
MOST_STARTS = 100  # starts of a job whose server or process keeps dying: the job itself may be the cause

ENDED_TWICE = codec.to_json(
    {
        "message": "the process that worked on this ended before it answered",
        "why": "it was killed, the machine may have run out of memory, or the service was ended",
        "remedy": "ask again, or for fewer GPUs",
    },
    indent=None,
)


class KeyTaken(PlannerError):
    """The idempotency key belongs to another request."""


class TooMany(PlannerError):
    """A user has reached the limit of waiting jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A job that this server may start. Everything that it writes about the job includes `fence`."""

    job: str
    owner: str
    command: str
    request: str
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file that a job wrote, below the folder that it worked in."""

    name: str
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended. `result` and `error` are JSON."""

    state: str
    exit_code: int | None = None
    result: str | None = None
    error: str | None = None
    said: str = ""
    artifacts: tuple[Artifact, ...] = ()


class Jobs:
    """The jobs of one database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = engine.execution_options(reads=True)
        seconds = {"sqlite": "(julianday('now') - 2440587.5) * 86400.0"}
        self._now: ColumnElement[float] = literal_column(
            seconds.get(engine.dialect.name, "extract(epoch FROM clock_timestamp())::float8")
        )

    # --- who asks ------------------------------------------------------------------------------------------------

    def submit(
        self, *, owner: str, command: str, request: str, digest: str, key: str | None, starts: int, most_waiting: int
    ) -> tuple[str, bool]:
        """Accept a job and return its id and whether it is new: a request with a known key returns the earlier job.

        Raises KeyTaken if the key belongs to another request, TooMany if `most_waiting` jobs of the owner wait.
        """
        # SQLite's clock has milliseconds: of jobs accepted within one, ids say which was first.
        job = f"{time.time_ns():016x}{secrets.token_hex(8)}"
        with self._engine.begin() as connection:
            if key is not None and (known := self._by_key(connection, owner, key)) is not None:
                return _same(known, digest), False
            waiting = select(func.count()).where(JOBS.c.owner == owner, JOBS.c.state == QUEUED)
            if connection.execute(waiting).scalar_one() >= most_waiting:
                raise TooMany(f"{most_waiting} jobs wait already", remedy="wait for some of them, or cancel them")
            row: JsonObject = {"id": job, "owner": owner, "command": command, "request": request, "digest": digest}
            row |= {"idempotency_key": key, "state": QUEUED, "progress": "", "created_s": self._now}
            row |= {"fence": 0, "starts_left": starts, "said": ""}
            try:
                with connection.begin_nested():
                    connection.execute(insert(JOBS).values(**row))
            except IntegrityError:
                known = self._by_key(connection, owner, str(key))
                if known is None:
                    raise
                return _same(known, digest), False
        return job, True

    def read(self, owner: str, job: str) -> JsonObject | None:
        """Return a job's row with its `artifacts`; None if this user has no job with this id."""
        with self._reading.connect() as connection:
            row = connection.execute(select(JOBS).where(JOBS.c.id == job, JOBS.c.owner == owner)).mappings().first()
            if row is None:
                return None
            wrote = connection.execute(select(ARTIFACTS).where(ARTIFACTS.c.job == job).order_by(ARTIFACTS.c.name))
            kept = [Artifact(name=one.name, sha256=one.sha256, bytes=one.bytes) for one in wrote]
        return {**row, "artifacts": kept}

    def states(self, jobs: Collection[str]) -> dict[str, tuple[str, str]]:
        """Return the state and the progress of some jobs."""
        asked = select(JOBS.c.id, JOBS.c.state, JOBS.c.progress).where(JOBS.c.id.in_(jobs))
        with self._reading.connect() as connection:
            return {job: (state, progress) for job, state, progress in connection.execute(asked)}

    def is_cancelled(self, job: str) -> bool:
        """Return whether a job was cancelled."""
        with self._reading.connect() as connection:
            return connection.execute(select(JOBS.c.state).where(JOBS.c.id == job)).scalar() == CANCELLED

    def newest(self, owner: str, limit: int) -> list[JsonObject]:
        """Return the rows of a user's newest jobs, without requests and results."""
        brief = [
            JOBS.c[name] for name in ("id", "command", "state", "progress", "created_s", "started_s", "finished_s")
        ]
        newest = (JOBS.c.created_s.desc(), JOBS.c.id.desc())
        asked = select(*brief).where(JOBS.c.owner == owner).order_by(*newest).limit(limit)
        with self._reading.connect() as connection:
            return [dict(row) for row in connection.execute(asked).mappings()]

    def cancel(self, owner: str, job: str) -> None:
        """Cancel a job that has not ended. Its server finds that the lease is lost."""
        change = update(JOBS).where(JOBS.c.id == job, JOBS.c.owner == owner, JOBS.c.state.in_([QUEUED, RUNNING]))
        with self._engine.begin() as connection:
            connection.execute(change.values(state=CANCELLED, finished_s=self._now, lease_until_s=None, progress=""))

    def answers(self) -> None:
        """Ask the database anything. Raises SQLAlchemyError where it does not answer."""
        with self._reading.connect() as connection:
            connection.execute(select(self._now))

    # --- who works -----------------------------------------------------------------------------------------------

    def claim(
        self,
        server: str,
        lease_s: float,
        *,
        without: Iterable[str],
        only: Iterable[str] | None = None,
        most_running: int | None = None,
    ) -> Claim | None:
        """Start the oldest waiting job of the user with the fewest running jobs; None if none waits.

        Commands in `without`, commands not in `only`, and jobs of users with `most_running` running jobs are left for
        later.
        """
        others = JOBS.alias()
        running = (
            select(func.count()).where(others.c.owner == JOBS.c.owner, others.c.state == RUNNING).scalar_subquery()
        )
        columns = (JOBS.c.id, JOBS.c.owner, JOBS.c.command, JOBS.c.request, JOBS.c.fence)
        waiting = select(*columns).where(JOBS.c.state == QUEUED, JOBS.c.command.not_in(list(without)))
        if only is not None:
            waiting = waiting.where(JOBS.c.command.in_(list(only)))
        if most_running is not None:
            waiting = waiting.where(running < most_running)
        first = waiting.order_by(running, JOBS.c.created_s, JOBS.c.id).limit(1)
        with self._engine.begin() as connection:
            row = connection.execute(first.with_for_update(skip_locked=True, of=JOBS)).first()
            if row is None:
                return None
            fence = row.fence + 1
            started = {"state": RUNNING, "server": server, "fence": fence, "starts_left": JOBS.c.starts_left - 1}
            started |= {"started_s": self._now, "lease_until_s": self._now + lease_s, "progress": "starting"}
            mine = update(JOBS).where(JOBS.c.id == row.id, JOBS.c.state == QUEUED, JOBS.c.fence == row.fence)
            if connection.execute(mine.values(**started)).rowcount != 1:
                return None
        return Claim(job=row.id, owner=row.owner, command=row.command, request=row.request, fence=fence)

    def renew(self, held: Sequence[Claim], lease_s: float) -> set[str]:
        """Renew the leases of held jobs; return the ids of those whose lease is lost."""
        lost = set()
        with self._engine.begin() as connection:
            for claim in held:
                renewed = _held(claim).values(lease_until_s=self._now + lease_s)
                if connection.execute(renewed).rowcount != 1:
                    lost.add(claim.job)
        return lost

    def tell(self, claim: Claim, line: str) -> None:
        """Keep a line of progress."""
        with self._engine.begin() as connection:
            connection.execute(_held(claim).values(progress=line[:MAX_LINE]))

    def end(self, claim: Claim, ending: JobEnd) -> bool:
        """End a job; return False, and change nothing, if another server or a cancellation was first."""
        values = {"state": ending.state, "exit_code": ending.exit_code, "result": ending.result, "error": ending.error}
        with self._engine.begin() as connection:
            ended = _held(claim).values(
                **values, said=ending.said, finished_s=self._now, lease_until_s=None, progress=""
            )
            if connection.execute(ended).rowcount != 1:
                return False
            rows = [{"job": claim.job, "name": a.name, "sha256": a.sha256, "bytes": a.bytes} for a in ending.artifacts]
            if rows:
                connection.execute(insert(ARTIFACTS), rows)
        return True

    def give_back(self, claim: Claim, *, started: bool) -> None:
        """Let another start a job that this server cannot finish. One that may not start again fails.

        With `started` False this start does not count (at most MOST_STARTS times), since the work itself did not fail.
        """
        with self._engine.begin() as connection:
            if not started:
                again = _held(claim).where(JOBS.c.fence < MOST_STARTS)
                connection.execute(again.values(starts_left=JOBS.c.starts_left + 1))
            connection.execute(_held(claim).values(**self._again()))

    def sweep(self) -> int:
        """Give back the jobs whose leases expired because their server is gone; return how many.

        The start of a question does not count, since the server failed; that of a run does, since it may have been
        measuring.
        """
        gone = (JOBS.c.state == RUNNING) & (JOBS.c.lease_until_s < self._now)
        asked = update(JOBS).where(gone, JOBS.c.command.not_in(RUNS), JOBS.c.fence < MOST_STARTS)
        with self._engine.begin() as connection:
            connection.execute(asked.values(starts_left=JOBS.c.starts_left + 1))
            return int(connection.execute(update(JOBS).where(gone).values(**self._again())).rowcount)

    def left(self, jobs: Collection[str]) -> set[str]:
        """Return those of these ids that are questions on which no server works."""
        asked = JOBS.c.id.in_(jobs) & JOBS.c.command.not_in(RUNS) & (JOBS.c.state != RUNNING)
        with self._reading.connect() as connection:
            return set(connection.execute(select(JOBS.c.id).where(asked)).scalars())

    def forget(self, older_s: float) -> int:
        """Delete jobs that ended more than `older_s` seconds ago; return how many."""
        old = JOBS.c.state.in_(ENDED) & (JOBS.c.finished_s < self._now - older_s)
        with self._engine.begin() as connection:
            connection.execute(delete(ARTIFACTS).where(ARTIFACTS.c.job.in_(select(JOBS.c.id).where(old))))
            return int(connection.execute(delete(JOBS).where(old)).rowcount)

    def _again(self) -> JsonObject:
        """Return the changes that let a running job wait again, or fail if it has no start left."""
        may = JOBS.c.starts_left > 0
        return {
            "state": case((may, QUEUED), else_=FAILED),
            "error": case((may, None), else_=ENDED_TWICE),
            "exit_code": case((may, None), else_=1),
            "finished_s": case((may, None), else_=self._now),
            "lease_until_s": None,
            "progress": "",
        }

    @staticmethod
    def _by_key(connection: Any, owner: str, key: str) -> Any:
        asked = select(JOBS.c.id, JOBS.c.digest).where(JOBS.c.owner == owner, JOBS.c.idempotency_key == key)
        return connection.execute(asked).first()


def _held(claim: Claim) -> Any:
    """Return an update of a job that applies only while its claim holds."""
    return update(JOBS).where(JOBS.c.id == claim.job, JOBS.c.fence == claim.fence, JOBS.c.state == RUNNING)


def _same(known: Any, digest: str) -> str:
    if known.digest != digest:
        raise KeyTaken(
            "this Idempotency-Key was used for another request", remedy="use a new key for each different request"
        )
    return str(known.id)
