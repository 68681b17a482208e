"""Jobs in worker processes (`planner.jobs.fork_server`): few, bounded in time and memory, ended at once.

A job waits for its turn, then has a process of its own until it is done. The process and everything it started is
killed when the job is stopped, when its time limit is over, or when nobody asks for it any longer. A long job steps
aside: it gets a lower priority and others may start, so that a short question never waits for a long one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from planner.jobs.fork_server import ForkServer, Worker
from topology.errors import PlannerError
from topology.processes import descendants, kill

SLOTS = max(2, os.cpu_count() or 2)  # jobs at a time, not counting long ones
LONG_S = 3.0
TICK_S = 0.1
END_S = 10.0  # seconds from a process's last message to its end, on a busy machine
# Linux gives a process of this priority a quarter of a core that it shares with one of normal priority: a short
# question next to it takes a third longer at most, and the long one still ends.
NICE = 5


class Stopped(PlannerError):
    """The user stopped the job, or left."""


class ProcessEnded(PlannerError):
    """The worker process died before it answered. `killed`: someone else ended it; it neither crashed nor ran out of
    memory.
    """

    killed = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a job may use. `forgotten_s` is how long it runs without being asked for.

    `aside`: it may be slowed down for others, which a measurement may not.
    """

    limit_s: float = 600.0
    forgotten_s: float = 120.0  # a page in the background asks once a minute
    memory_bytes: int | None = 4 << 30  # searches on 16,384 GPUs take 0.2 GiB, traces of 200,000 spans 1 GiB
    aside: bool = True


class Workers:
    """The processes, and the order of jobs. `module` has the functions that they call, as WORK."""

    def __init__(self, module: str, slots: int | None = None) -> None:
        self._module = module
        self._slots = slots or SLOTS
        self._changed = threading.Condition()
        self._server: ForkServer | None = None
        self._idle: list[Worker] = []
        self._running: list[Job] = []

    def warm(self) -> ForkServer:
        """Start the imports of the processes, so that the first questions need not wait for them."""
        with self._changed:
            if self._server is None or self._server.ended():
                self._server = ForkServer(self._module)
            return self._server

    def free(self) -> int:
        """Return how many further jobs would start at once."""
        with self._changed:
            return max(0, self._free())

    def _free(self) -> int:
        counted = [job for job in self._running if not job.reserved]
        long = sum(job.runs_s > LONG_S for job in counted)
        return self._slots - len(counted) + min(long, self._slots)

    def close(self) -> None:
        """End the processes that wait for work."""
        with self._changed:
            for process in self._idle:
                process.end()
            self._idle.clear()
            if self._server is not None:
                self._server.close()

    def enter(self, job: Job) -> Worker | None:
        """Wait for the turn of a job and return its process; None if the job was stopped before. Raises OSError or
        EOFError if no process can be started.
        """
        with self._changed:
            while not (job.ended or job.reserved or self._free() > 0):
                job.line = f"waiting for {len(self._running)} other questions"
                self._changed.wait(TICK_S)
            if job.ended:
                return None
            job.began = time.monotonic()
            self._running.append(job)
            self._idle = [one for one in self._idle if one.poll() is None]
            if self._idle:
                return self._idle.pop(0)
        return self._fork()

    def _fork(self) -> Worker:
        """Return a new process, of a new server if the old one has been ended."""
        server = self.warm()
        try:
            return server.fork()
        except (OSError, EOFError):
            server.close()
            return self.warm().fork()

    def leave(self, job: Job, process: Worker | None, *, again: bool) -> None:
        """End the turn of a job. With `again` its process is kept for others, else it is killed."""
        with self._changed:
            self._running = [one for one in self._running if one is not job]
            if process is not None and again and len(self._idle) < self._slots and not job.slowed:
                self._idle.append(process)  # a low priority cannot be raised again
            elif process is not None:
                process.end()
            self._changed.notify_all()


class Job:
    """One request: `result` or `error` is set when `done` is, `early` when the work has a preliminary answer. `ask`
    keeps the job wanted; `on_progress` is called at each change; a `reserved` job begins at once, outside the slots.
    """

    def __init__(
        self,
        workers: Workers,
        kind: str,
        *arguments: Any,
        bounds: Bounds | None = None,
        on_progress: Callable[[], None] = lambda: None,
        reserved: bool = False,
    ) -> None:
        self.line = ""
        self.done = threading.Event()
        self.result: Any = None
        self.early: Any = None
        self.error: PlannerError | None = None
        self.last_request_at = self.started = time.monotonic()
        self.began: float | None = None
        self.slowed = False
        self.reserved = reserved
        self._workers = workers
        self._bounds = bounds or Bounds()
        self._on_progress = on_progress
        self._request = (kind, arguments, self._bounds.memory_bytes)
        self._stopped: PlannerError | None = None
        self._process: Worker | None = None
        self._worked_before_s = 0.0
        threading.Thread(target=self._run, daemon=True, name=kind).start()
        threading.Thread(target=self._watch, daemon=True, name=f"{kind} watch").start()

    @property
    def ended(self) -> bool:
        return self._stopped is not None or self.done.is_set()

    @property
    def runs_s(self) -> float:
        """Return for how many seconds the job has had a process."""
        return 0.0 if self.began is None else time.monotonic() - self.began

    def ask(self, patience_s: float) -> bool:
        """Return whether the job is done, after waiting for it for at most `patience_s`."""
        self.last_request_at = time.monotonic()
        return self.done.wait(patience_s)

    def stop(self, reason: PlannerError | None = None) -> None:
        """Kill the process and everything that it started. Callers that wait get the reason as the error."""
        self._stopped = self._stopped or reason or Stopped("stopped")
        if (process := self._process) is not None and not self.done.is_set():
            started = descendants(process.pid)
            process.kill()
            kill(started)

    def _run(self) -> None:
        again = False
        process: Worker | None = None
        killed_before = _killed_for_memory()
        try:
            process = self._workers.enter(self)
            if process is not None:
                self._worked_before_s = _worked_s(process)
                self._process = process
                if self._stopped is None:
                    again = self._converse(process)
        except Exception as error:  # noqa: BLE001 - a job that never ended would be waited for
            self.error = ended = ProcessEnded(
                "the process that worked on this ended",
                why=f"{type(error).__name__}; the system may have run out of memory",
                remedy="ask again, or for fewer GPUs",
            )
            by_signal = process is None or process.wait(END_S) in {-signal.SIGKILL, -signal.SIGTERM}
            ended.killed = by_signal and _killed_for_memory() == killed_before
        self._process = None
        self._workers.leave(self, process, again=again and self._stopped is None)
        if self._stopped is not None:
            self.error, self.result = self._stopped, None
        self.done.set()
        self._on_progress()

    def _converse(self, process: Worker) -> bool:
        """Send the request and follow the answer; return whether the process accepts another request."""
        process.pipe.send(self._request)
        while True:
            kind, value = process.pipe.recv()
            if kind in {"progress", "early"}:
                self.line, self.early = (value, self.early) if kind == "progress" else (self.line, value)
                self._on_progress()
                continue
            self.result, self.error = (value, None) if kind == "result" else (None, value)
            return bool(process.pipe.recv())

    def _watch(self) -> None:
        """Step aside when the job takes long; stop at the time limit, and when nobody asks any more."""
        while not self.done.wait(TICK_S):
            if self.runs_s > self._bounds.limit_s:
                self.stop(
                    PlannerError(
                        f"no answer within {self._bounds.limit_s / 60:.0f} minutes",
                        why="this machine is shared with others",
                        remedy="ask in a terminal, which has no limit",
                    )
                )
            elif time.monotonic() - self.last_request_at > self._bounds.forgotten_s:
                self.stop()
            elif self._may_slow() and (process := self._process) is not None:
                self._slow(process)

    def _may_slow(self) -> bool:
        return self._bounds.aside and not self.slowed and self.runs_s > LONG_S

    def _slow(self, process: Worker) -> None:
        """Lower the priority of a process that has worked for long; waiting for the processor does not count."""
        if _worked_s(process) - self._worked_before_s > LONG_S:
            self.slowed = True
            with suppress(psutil.Error):
                psutil.Process(process.pid).nice(NICE)
            # Where Linux schedules sessions as groups, a process's priority counts only inside its session, and the
            # session has one too.
            with suppress(OSError):
                Path(f"/proc/{process.pid}/autogroup").write_text(str(NICE), encoding="ascii")


def _killed_for_memory() -> int:
    """Return how many processes Linux has killed since it started because memory ran out; 0 on other systems."""
    with suppress(OSError):
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines())
        return int(counts.get("oom_kill", 0))
    return 0


def _worked_s(process: Worker) -> float:
    """Return the processor time of a process, in seconds."""
    try:
        return float(sum(psutil.Process(process.pid).cpu_times()[:2]))
    except psutil.Error:
        return 0.0
