"""Common parts of the runners that start processes, a command or a job for trials."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import ClassVar

from planner.question.question import Question
from planner.tune.candidates import Candidate
from planner.tune.state import TrialStart
from planner.tune.trials import Chosen, Status, Trial


@dataclass(slots=True, kw_only=True)
class StartedTrials:
    """Runs plans of `question` in folders of `folder`. `limit_s` is the time limit of one trial.

    `tell` receives progress messages, `began` each trial at its beginning; `starts_s` are the seconds of each start on
    this machine so far.
    """

    FIRST_START_S: ClassVar[float]  # assumed start time until a trial on this machine has shown it
    LEAST_S: ClassVar[float]  # seconds below which nothing is started
    WARM_UP: ClassVar[int]  # warm-up steps, which do not count

    question: Question
    folder: Path
    limit_s: float = 120.0
    timed_steps: int = 10
    tell: Callable[[str], None] = lambda _: None
    began: Callable[[TrialStart], None] = lambda _: None
    starts_s: list[float] = field(default_factory=list)

    def start_s(self, candidate: Candidate) -> float:
        del candidate
        return median(self.starts_s) if self.starts_s else self.FIRST_START_S

    def steps(self) -> int:
        return self.timed_steps + self.WARM_UP

    def new_trial(self, candidate: Candidate, chosen: Chosen) -> Trial:
        """Return a trial with its own folder, marked as failed until its result is known."""
        return Trial(
            key=candidate.key,
            status=Status.FAILED,
            predicted_s=chosen.predicted_s,
            why=chosen.why,
            directory=str(new_folder(self.folder)),
            machine=platform.node(),
        )


def new_folder(parent: Path) -> Path:
    """Make the folder of the next trial, with the first free number, since other machines may continue a tuning as
    well.
    """
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / f"trial-{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            continue
        return folder.resolve()


def failed(trial: Trial, cause: object) -> Trial:
    """Return the trial with the reason why it could not be started or read; other trials continue."""
    return replace(trial, cause=" ".join(str(cause).split())[:400])
