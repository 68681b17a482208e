"""Trials as jobs of a scheduler, one job per trial: for plans on several nodes, when this process has no GPUs itself.

The job is that of `planner apply --launcher`: an agent on each node, and their records collected into one report. Plans
that are tried together wait for their nodes at the same time, with Slurm as an array. All nodes and this process must
see the folder of the trials. A job without a report within its time is cancelled. A job whose nodes the scheduler took
away shows nothing about its plan and is submitted again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from planner.question.plan_file import plan_file
from planner.runs import runs_store, scheduled
from planner.runs.planned_run import cpu_run, job_run
from planner.runs.scheduled import Followed, NoReport, NotEnded
from planner.runs.schedulers import launchers
from planner.runs.schedulers.launchers import LauncherJob
from planner.runs.schedulers.scheduler import Submission
from planner.tune.candidates import Candidate
from planner.tune.runners.executor_trials import reported
from planner.tune.runners.started_trials import StartedTrials, failed, new_folder
from planner.tune.state import TrialStart
from planner.tune.trials import Chosen, Status, Trial
from topology import codec
from topology.codec import JsonObject
from topology.errors import PlannerError

POLL_S = 1.0
MOST_TAKEN = 2  # times that a scheduler may take away the nodes of one trial


@dataclass(slots=True)
class _Begun:
    """A trial whose job was submitted."""

    candidate: Candidate
    trial: Trial
    followed: Followed
    began: float
    cut: bool  # whether the budget ends before the job's own time limit


@dataclass(slots=True, kw_only=True)
class JobTrials(StartedTrials):
    """Submits a job for each plan. `queue_s` is the time that a job may wait for its nodes; fields such as `launcher`
    and `volume` are those of `LauncherJob`.
    """

    FIRST_START_S = 60.0  # of a job in an empty queue
    LEAST_S = 30.0
    WARM_UP = 3

    launcher: str
    name: str = "meshwright"
    image: str | None = None
    volume: str | None = None
    device: str = "cuda"
    limit_s: float = 300.0
    queue_s: float = 600.0
    late_s: float = scheduled.LATE_S
    store: Path | None = None

    def shares_start(self, one: Candidate, other: Candidate) -> bool:
        """Jobs of equal size wait for their nodes at the same time."""
        return one.plan.gpus == other.plan.gpus

    def run(self, plans: Sequence[tuple[Candidate, Chosen]], left_s: float) -> Iterator[Trial]:
        if left_s < self.LEAST_S:
            return
        until = time.monotonic() + left_s
        waiting = [(candidate, self.new_trial(candidate, chosen)) for candidate, chosen in plans]
        for _ in range(1 + MOST_TAKEN):
            taken: list[tuple[Candidate, Trial]] = []
            for candidate, trial in self._round(waiting, until):
                yield trial
                if trial.status is Status.INTERRUPTED:
                    again = replace(trial, status=Status.FAILED, cause="", directory=str(new_folder(self.folder)))
                    taken.append((candidate, again))
            waiting = taken
            if not waiting or until - time.monotonic() < self.LEAST_S:
                return

    def left_over(self, starts: Sequence[TrialStart], candidates: Sequence[Candidate]) -> Iterator[Trial]:
        """Yield trials that a killed process of the tuning had submitted: they are followed, not repeated."""
        by_key = {one.key: one for one in candidates}
        begun = []
        for start in {one.key: one for one in starts}.values():
            folder = Path(start.directory)
            with contextlib.suppress(PlannerError):
                submission = scheduled.recorded(folder)
                if submission is None or start.key not in by_key:
                    continue
                candidate = by_key[start.key]
                now = time.monotonic()
                ends = now + self.limit_s + self.queue_s
                followed = Followed(
                    job=self._job(candidate, folder, self.limit_s),
                    submission=submission,
                    ends=ends,
                    tell=self.tell,
                    late_s=self.late_s,
                )
                begun.append(_Begun(candidate, start.failed(), followed, now, cut=False))
        yield from (trial for _, trial in self._followed(begun) if trial.status is not Status.INTERRUPTED)

    def _round(self, plans: Sequence[tuple[Candidate, Trial]], until: float) -> Iterator[tuple[Candidate, Trial]]:
        """Submit the plans' jobs and yield the result of each. Jobs are cancelled when this process is interrupted."""
        budget_s = min(self.limit_s, max(1.0, until - time.monotonic()))
        written, jobs = [], []
        for candidate, trial in plans:
            try:
                jobs.append(self._written(candidate, Path(trial.directory), budget_s))
                written.append((candidate, trial))
            except PlannerError as error:  # a plan that cannot be written does not end the tuning
                yield candidate, failed(trial, error)
        for _, trial in written:
            self.began(TrialStart.now(trial))
        try:
            submissions = self._submitted(jobs)
        except PlannerError as error:
            yield from ((candidate, failed(trial, error)) for candidate, trial in written)
            return
        now = time.monotonic()
        ends = min(until, now + budget_s + self.queue_s)
        begun = []
        for (candidate, trial), job, submission in zip(written, jobs, submissions, strict=True):
            followed = Followed(job=job, submission=submission, ends=ends, tell=self.tell, late_s=self.late_s)
            begun.append(_Begun(candidate, trial, followed, now, cut=until < now + budget_s + self.queue_s))
        yield from self._followed(begun)

    def _submitted(self, jobs: Sequence[LauncherJob]) -> list[Submission]:
        """Submit jobs, as one array if the scheduler has arrays. Raises PlannerError, after cancelling all of them."""
        files = [launchers.write_job(self.launcher, job) for job in jobs]
        for file in files:
            codec.write_text(file.path, file.text)
        folders = [job.directory for job in jobs]
        if self.launcher == "slurm" and len(jobs) > 1:
            array = launchers.slurm_array(jobs, self.name)
            codec.write_text(array.path, array.text)
            return scheduled.submit_array(array, self.launcher, folders, name=self.name)
        found = []
        try:
            for job, file in zip(jobs, files, strict=True):
                found.append(scheduled.submit(file, self.launcher, name=job.name))
        except (PlannerError, KeyboardInterrupt):
            for folder in folders[: len(found)]:
                scheduled.cancel(folder)
            raise
        return found

    def _followed(self, begun: Sequence[_Begun]) -> Iterator[tuple[Candidate, Trial]]:
        left = list(begun)
        try:
            while left:
                for one in list(left):
                    if (trial := self._looked(one)) is not None:
                        left.remove(one)
                        yield one.candidate, trial
                if left:
                    time.sleep(POLL_S)
        finally:
            for one in left:
                scheduled.cancel(one.followed.job.directory)

    def _looked(self, one: _Begun) -> Trial | None:
        """Return the result of a trial; None while its job runs."""
        try:
            document = one.followed.look()
        except NotEnded:
            took, said = time.monotonic() - one.began, one.followed.submission.said
            status = Status.OUT_OF_TIME if one.cut else Status.TIMEOUT
            return replace(one.trial, status=status, cause=f"{said}: it left no report in {took:.0f} s", seconds=took)
        except PlannerError as error:
            took = time.monotonic() - one.began
            away = isinstance(error, NoReport) and error.taken_away
            found = replace(failed(one.trial, error), seconds=took)
            return replace(found, status=Status.INTERRUPTED) if away else found
        return None if document is None else self._reported(one, document)

    def _reported(self, one: _Begun, document: JsonObject) -> Trial:
        folder, took = one.followed.job.directory, time.monotonic() - one.began
        word = scheduled.ended_as(document, folder, one.followed.submission, late_s=self.late_s)
        scheduled.add_cause(document, word)
        with contextlib.suppress(PlannerError):
            runs_store.save_run(document, folder, self.store, tell=self.tell)
        found = reported(one.trial, document)
        if word in scheduled.TAKEN_AWAY:
            found = replace(found, status=Status.INTERRUPTED)
        if found.step_s:
            self.starts_s.append(max(1.0, took - self.steps() * found.step_s))
        return replace(found, seconds=took)

    def _written(self, candidate: Candidate, folder: Path, budget_s: float) -> LauncherJob:
        """Write the request and return the job."""
        question = replace(self.question, runtime=candidate.runtime)
        content = plan_file(question, candidate.plan, candidate.estimate)
        run = cpu_run(content, None) if self.device == "cpu" else job_run(content)
        request = run.request(steps=self.timed_steps, budget_s=budget_s, own_table=False)
        codec.write_text(folder / "request.json", codec.to_json(request | {"profile": False}) + "\n")
        return self._job(candidate, folder, budget_s)

    def _job(self, candidate: Candidate, folder: Path, budget_s: float) -> LauncherJob:
        return LauncherJob(
            name=f"{self.name}-{folder.name}",
            directory=folder,
            ranks=candidate.plan.gpus,
            nodes=-(-candidate.plan.gpus // self.question.cluster.gpus_per_node),
            budget_s=budget_s,
            image=self.image,
            volume=self.volume,
            on_cpus=self.device == "cpu",
            exclusive=True,
        )
