"""Takes waiting jobs from the database, lets worker processes answer them, and records how they ended.

One thread repeats all of it: renew leases, end finished jobs, start waiting ones. A database that does not answer is
asked again; results are kept until it does.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from planner.jobs.processes import Bounds, Job, ProcessEnded, Workers
from planner.remote.settings import Settings
from planner.requests.flag import Flag
from planner.requests.known import RUNS, SHORT, SO_FAR
from planner.runs.scheduled import cancel_below
from planner.service.outcome import ending, error_text, prepared, scheduled
from planner.service.store.files import Files
from planner.service.store.jobs import FAILED, Claim, JobEnd, Jobs
from topology.errors import PlannerError

TELL_S = 0.3  # seconds between two lines of a job's progress in the database
BUSY_S, IDLE_S = 0.1, 0.5
RUN_LIMIT_S = 24 * 3600.0  # a run has a time budget of its own
FORGET_EVERY_S = 3600.0
MOST_STATE_BYTES = 16 << 20
MOST_FOLDERS = 5000  # folders of jobs that are looked at in one pass
LATE_S = 10.0  # seconds without a pass after which the service counts as unhealthy


@dataclass(slots=True, kw_only=True)
class _Running:
    claim: Claim
    folder: Path
    alone: bool  # whether it has the machine to itself
    reserved: bool  # whether it is in a slot of short questions
    job: Job | None = None
    ending: JobEnd | None = None
    shown: str = ""
    shown_at: float = field(default_factory=time.monotonic)


class Dispatcher:
    """The loop between the database and the worker processes."""

    def __init__(self, jobs: Jobs, files: Files, flags: dict[str, Mapping[str, Flag]], settings: Settings) -> None:
        self._jobs, self._files, self._flags, self._settings = jobs, files, flags, settings
        self._server = f"{socket.gethostname()[:24]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._workers = Workers("planner.service.worker", settings.workers)
        self._running: dict[str, _Running] = {}
        self._work = Path(settings.folder) / "work"
        self._wake = threading.Event()
        self._over = threading.Event()
        self._renew_at = self._forget_at = 0.0
        self._turned_at = time.monotonic()
        self._cancelled: set[str] = set()  # jobs whose scheduler was asked to cancel
        self._cancelling = threading.Lock()
        self.on_news: Callable[[str], None] = lambda _: None  # called with every job that has news
        self._thread = threading.Thread(target=self._loop, daemon=True, name="dispatcher")

    def start(self) -> None:
        self._workers.warm()
        self._thread.start()

    def stop(self) -> None:
        """End the loop and the processes; jobs that had not ended are given back."""
        self._over.set()
        self._wake.set()
        self._thread.join()
        for running in self._running.values():
            if running.job is not None:
                running.job.stop()
                running.job.done.wait(BUSY_S * 50)
            with suppress(SQLAlchemyError):
                self._jobs.give_back(running.claim, started=running.alone)
        self._workers.close()

    def wake(self) -> None:
        """Look for work at once."""
        self._wake.set()

    def cancel(self, job: str) -> None:
        """End a job's process at once, if it runs here; the database already has it as cancelled."""
        running = self._running.get(job)
        if running is not None and running.job is not None:
            running.job.stop()
        self._cancel_scheduled(job)
        self._wake.set()

    def _cancel_scheduled(self, job: str) -> None:
        """Cancel what a job submitted to a scheduler, whichever process follows it; once for both threads."""
        with self._cancelling:
            if job in self._cancelled:
                return
            self._cancelled.add(job)
        for folder in self._work.glob(f"{job}*"):
            threading.Thread(target=cancel_below, args=(folder,), daemon=True, name="cancel").start()

    def state_so_far(self, job: str) -> bytes:
        """Return the state file of a tuning that runs here, or the records of a run's first rank, as far as they are
        written; empty without one.
        """
        running = self._running.get(job)
        if running is None or running.claim.command not in SO_FAR:
            return b""
        with suppress(OSError), (running.folder / SO_FAR[running.claim.command]).open("rb") as file:
            return file.read(MOST_STATE_BYTES)
        return b""

    @property
    def well(self) -> bool:
        """Return whether the loop is alive."""
        return self._thread.is_alive() and time.monotonic() - self._turned_at < LATE_S

    def _loop(self) -> None:
        while not self._over.is_set():
            try:
                self._turn()
                self._turned_at = time.monotonic()
            except SQLAlchemyError:
                time.sleep(IDLE_S)  # the database is unreachable: running jobs continue
            except Exception as error:  # noqa: BLE001 - the loop must not end before the service does
                print(f"dispatcher: {type(error).__name__}: {error}", flush=True)
                time.sleep(IDLE_S)
            self._wake.wait(BUSY_S if self._running else IDLE_S)
            self._wake.clear()

    def _turn(self) -> None:
        now = time.monotonic()
        if now >= self._renew_at:
            # Before the sweep: after an outage this server's jobs must be renewed first.
            for job in self._jobs.renew([running.claim for running in self._running.values()], self._settings.lease_s):
                if self._jobs.is_cancelled(job):
                    self._cancel_scheduled(job)
                self._drop(job)
            self._jobs.sweep()
            self._renew_at = now + self._settings.lease_s / 4
        if now >= self._forget_at:
            self._forget(self._settings.keep_days * 86400)
            self._forget_at = now + FORGET_EVERY_S
        for running in list(self._running.values()):
            self._follow(running)
        while self._claim_next():
            pass

    def _forget(self, older_s: float) -> None:
        """Delete jobs that ended long ago, files that only they can name, and folders of questions that nobody works
        on.
        """
        self._jobs.forget(older_s)
        self._cancelled.clear()
        self._files.forget(older_s)
        folders = {folder: folder.name.partition("-")[0] for folder in islice(self._work.glob("*"), MOST_FOLDERS)}
        left = self._jobs.left(set(folders.values()))  # by a server that was killed
        for folder, job in folders.items():
            with suppress(OSError):
                if job in left or time.time() - folder.stat().st_mtime > older_s:
                    shutil.rmtree(folder, ignore_errors=True)

    def _claim_next(self) -> bool:
        """Start the longest-waiting job that may start; return whether there was one.

        One user's long questions take at most as many slots as there are workers, and as many again are for other
        users. Short questions have as many slots of their own, so that they never wait for long ones.
        """
        server, lease_s, slots = self._server, self._settings.lease_s, self._settings.workers
        claim = None
        if self._free() > 0:
            claim = self._jobs.claim(server, lease_s, without=self._left_out(), most_running=slots)
        reserved = claim is None and sum(running.reserved for running in self._running.values()) < slots
        if reserved:
            claim = self._jobs.claim(server, lease_s, without=(), only=SHORT)
        if claim is None:
            return False
        self._begin(claim, reserved=reserved)
        return True

    def _free(self) -> int:
        waits = [one.job for one in self._running.values() if one.job is not None and not one.reserved]
        starting = sum(job.began is None for job in waits)
        return self._workers.free() - starting

    def _left_out(self) -> frozenset[str]:
        """Return the commands that may not start now: a run has the machine to itself."""
        return RUNS if any(running.alone for running in self._running.values()) else frozenset()

    def _begin(self, claim: Claim, *, reserved: bool) -> None:
        # A submission to a scheduler is found again in the same folder by whichever process follows it next.
        elsewhere = scheduled(claim)
        folder = self._work / (claim.job if elsewhere else f"{claim.job}-{claim.fence}")
        runs = claim.command in RUNS
        running = self._running[claim.job] = _Running(
            claim=claim, folder=folder, alone=runs and not elsewhere, reserved=reserved
        )
        self.on_news(claim.job)
        try:
            words = prepared(claim, self._flags[claim.command], self._files, folder)
        except (PlannerError, OSError) as error:
            running.ending = JobEnd(state=FAILED, exit_code=1, error=error_text(error))
            self._follow(running)
            return
        bounds = Bounds(
            limit_s=math.inf if elsewhere else RUN_LIMIT_S if runs else self._settings.limit_s,
            forgotten_s=math.inf,
            memory_bytes=None if runs else self._settings.memory_bytes,
            aside=not runs,
        )
        running.job = Job(
            self._workers,
            "command",
            words,
            str(folder),
            self._data_folder(claim.owner),
            bounds=bounds,
            on_progress=self._wake.set,
            reserved=reserved,
        )

    def _data_folder(self, owner: str) -> str | None:
        """Return the folder of a user's runs; the user of this machine has the one of the command line."""
        return None if self._settings.users is None else str(Path(self._settings.folder) / "users" / owner)

    def _follow(self, running: _Running) -> None:
        """Report a job's progress, or how it ended."""
        job, claim = running.job, running.claim
        if running.ending is None and job is not None:
            if not job.done.is_set():
                if job.line != running.shown and time.monotonic() - running.shown_at > TELL_S:
                    running.shown, running.shown_at = job.line, time.monotonic()
                    self._jobs.tell(claim, job.line)
                    self.on_news(claim.job)
                return
            if isinstance(job.error, ProcessEnded):
                self._jobs.give_back(claim, started=claim.command in RUNS or not job.error.killed)
                self._drop(claim.job)
                return
            running.ending = ending(job, claim, running.folder, self._files)
        if running.ending is not None:
            self._jobs.end(claim, running.ending)
            self._drop(claim.job)

    def _drop(self, job: str) -> None:
        running = self._running.pop(job)
        if running.job is not None:
            running.job.stop()
        if running.claim.command not in RUNS:  # reports of runs name their folder
            shutil.rmtree(running.folder, ignore_errors=True)
        self.on_news(job)
