"""Trials that start one plan at a time, each in a folder of its own: what commands and jobs have in common."""

from __future__ import annotations

import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import ClassVar

from planner.question.question import Question
from planner.tune.candidates import Candidate
from planner.tune.runners.executor_trials import new_folder
from planner.tune.state import TrialStart, started_now
from planner.tune.trials import Chosen, Status, Trial
from topology.errors import PlannerError


@dataclass(slots=True, kw_only=True)
class SingleTrials(ABC):
    """Runs plans of `question` one after the other; fields as of `ExecutorTrials`. A kind of trial says how in
    `run_one`.
    """

    FIRST_START_S: ClassVar[float]  # until a trial has shown what a start takes here
    LEAST_S: ClassVar[float]  # with less left nothing is started
    WARM_UP: ClassVar[int]  # steps that do not count

    question: Question
    folder: Path
    limit_s: float
    timed_steps: int = 10
    tell: Callable[[str], None] = lambda _: None
    began: Callable[[TrialStart], None] = lambda _: None
    starts_s: list[float] = field(default_factory=list)

    def start_s(self, candidate: Candidate) -> float:
        del candidate
        return median(self.starts_s) if self.starts_s else self.FIRST_START_S

    def steps(self) -> int:
        return self.timed_steps + self.WARM_UP

    def shares_start(self, one: Candidate, other: Candidate) -> bool:
        del one, other
        return False

    def run(self, plans: Sequence[tuple[Candidate, Chosen]], left_s: float) -> Iterator[Trial]:
        until = time.monotonic() + left_s
        for candidate, chosen in plans:
            left = until - time.monotonic()
            if left < self.LEAST_S:
                return
            folder = new_folder(self.folder)
            trial = Trial(
                key=candidate.key,
                status=Status.FAILED,
                predicted_s=chosen.predicted_s,
                why=chosen.why,
                directory=str(folder),
                machine=platform.node(),
            )
            try:
                yield self.run_one(candidate, trial, folder, left)
            except PlannerError as error:  # a plan that cannot be written down or submitted is no reason to end
                yield replace(trial, cause=" ".join(str(error).split())[:400])

    @abstractmethod
    def run_one(self, candidate: Candidate, trial: Trial, folder: Path, left_s: float) -> Trial:
        """Return what became of `trial`, in `folder`, within `left_s`. Raises PlannerError where it cannot be
        started.
        """

    def say_begun(self, trial: Trial, folder: Path) -> None:
        self.began(started_now(trial.key, folder, trial.predicted_s, trial.why))
