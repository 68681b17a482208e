"""Running jobs that sessions share: one per question, which ends when its last session leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from planner.jobs.processes import Stopped
from topology.errors import PlannerError


class PendingAnswer(Protocol):
    """A job, of a process here (`planner.jobs.processes.Job`) or of a service (`ui.background.remote.RemoteJob`)."""

    started: float
    line: str
    result: Any
    early: Any
    error: PlannerError | None

    def ask(self, patience_s: float) -> bool: ...
    def stop(self) -> None: ...


@dataclass(slots=True)
class _Shared:
    job: PendingAnswer
    sessions: set[str] = field(default_factory=set)


class SharedJobs:
    """Jobs by kind and question. `is_open` returns whether a session still has a page; a reload closes it."""

    def __init__(self, is_open: Callable[[str], bool]) -> None:
        self._is_open = is_open
        self._lock = threading.Lock()
        self._jobs: dict[tuple[str, str], _Shared] = {}

    def join(self, session: str, kind: str, key: str, start: Callable[[], PendingAnswer]) -> PendingAnswer:
        """Return the job of a question, started if it is not running; ends jobs that only closed pages waited for."""
        with self._lock:
            shared = self._jobs.get((kind, key))
            if shared is None or isinstance(shared.job.error, Stopped):
                shared = self._jobs[kind, key] = _Shared(start())
            shared.sessions.add(session)
            for other, one in [*self._jobs.items()]:
                one.sessions = {each for each in one.sessions if each == session or self._is_open(each)}
                self._end_if_left(other)
            return shared.job

    def leave(self, session: str, kind: str, key: str) -> None:
        """Remove a session from a job; a job without sessions is ended."""
        with self._lock:
            if (kind, key) in self._jobs:
                self._jobs[kind, key].sessions.discard(session)
                self._end_if_left((kind, key))

    def ended(self, kind: str, key: str) -> None:
        """Record that a job has ended: the next request starts another."""
        with self._lock:
            self._jobs.pop((kind, key), None)

    def _end_if_left(self, question: tuple[str, str]) -> None:
        if not self._jobs[question].sessions:
            self._jobs.pop(question).job.stop()
