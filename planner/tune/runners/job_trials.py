"""Trials as jobs of a scheduler, one job a trial: for plans on several nodes, where this process has no GPUs of its
own.

The job is that of `planner apply --launcher`: an agent on each node, and their records collected into one report. All
nodes and this process must see the folder of the trials. A job that leaves no report in its time is cancelled.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from planner.question.plan_file import plan_file
from planner.runs import launchers, runs_store, scheduled
from planner.runs.launchers import LauncherJob
from planner.runs.planned_run import job_run
from planner.tune.candidates import Candidate
from planner.tune.runners.executor_trials import trial_of_report
from planner.tune.runners.single_trials import SingleTrials
from planner.tune.trials import Status, Trial
from topology import codec
from topology.errors import PlannerError

POLL_S = 1.0


@dataclass(slots=True, kw_only=True)
class JobTrials(SingleTrials):
    """Submits a job for each plan. `queue_s` is how long a job may wait for its nodes; `launcher` is slurm or trainjob,
    which needs an `image`.
    """

    FIRST_START_S: ClassVar[float] = 60.0  # of a job in a queue that is empty
    LEAST_S: ClassVar[float] = 30.0
    WARM_UP: ClassVar[int] = 3

    launcher: str
    name: str = "meshwright"
    image: str | None = None
    limit_s: float = 300.0
    queue_s: float = 600.0
    store: Path | None = None

    def run_one(self, candidate: Candidate, trial: Trial, folder: Path, left_s: float) -> Trial:
        began = time.monotonic()
        budget_s = min(self.limit_s, left_s)
        job = self._written(candidate, folder, budget_s)
        file = launchers.write_job(self.launcher, job)
        codec.write_text(file.path, file.text)
        self.say_begun(trial, folder)
        said = scheduled.submit(file, self.launcher).said
        self.tell(f"{folder.name}: {said}")
        cut = left_s < budget_s + self.queue_s
        deadline = began + min(left_s, budget_s + self.queue_s)
        try:
            while (document := scheduled.collected(job, self.launcher)) is None and time.monotonic() < deadline:
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            scheduled.cancel(folder)
            raise
        took = time.monotonic() - began
        if document is None:
            scheduled.cancel(folder)
            status = Status.OUT_OF_TIME if cut else Status.TIMEOUT
            return replace(trial, status=status, cause=f"{said}: it left no report in {took:.0f} s", seconds=took)
        with contextlib.suppress(PlannerError):
            runs_store.save_run(document, folder, self.store, tell=self.tell)
        found = trial_of_report(document, trial.key, trial.predicted_s, trial.why, folder)
        if found.step_s:
            self.starts_s.append(max(1.0, took - self.steps() * found.step_s))
        return replace(found, seconds=took)

    def _written(self, candidate: Candidate, folder: Path, budget_s: float) -> LauncherJob:
        """Write the request and return the job."""
        question = replace(self.question, runtime=candidate.runtime)
        content = plan_file(question, candidate.plan, candidate.estimate)
        request = job_run(content).request(steps=self.timed_steps, budget_s=budget_s, own_table=False)
        codec.write_text(folder / "request.json", codec.to_json(request | {"profile": False}) + "\n")
        return LauncherJob(
            name=f"{self.name}-{folder.name}",
            directory=folder,
            ranks=candidate.plan.gpus,
            nodes=-(-candidate.plan.gpus // self.question.cluster.gpus_per_node),
            budget_s=budget_s,
            image=self.image,
        )
