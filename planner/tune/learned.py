"""Adds the operators that trials timed within their steps to a profile."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from planner.runs.profile_update import add_run_to_profile
from planner.runs.run_report import load_run
from planner.tune.trials import Trial
from topology.errors import PlannerError


def add_trials(trials: Iterable[Trial], profile: Path) -> list[str]:
    """Add the operators of measured trials to a profile; return a line for each, including those that could not be
    added.
    """
    lines = []
    for trial in trials:
        if not trial.step_s or not trial.directory:
            continue
        try:
            update = add_run_to_profile(load_run(trial.directory, simulate=False), profile)
        except PlannerError as error:
            lines.append(f"{trial.directory} is left out: {error.what}")
            continue
        lines.append(
            f"{Path(trial.directory).name}: {update.samples} operators, {update.fresh} of them new to the profile"
        )
    return lines
