"""Runs a tuning from its state file: chooses the runner on this machine, handles interrupted trials, and runs
the loop.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.runs.planned_run import require_healthy
from planner.runs.run_document import read_report
from planner.tune.loop import Limits, Show, View, tune
from planner.tune.runners.command_trials import CommandTrials, command_metric, command_words, end_left_over
from planner.tune.runners.executor_trials import ExecutorTrials, reported
from planner.tune.runners.job_trials import JobTrials
from planner.tune.runners.recorded_trials import RecordedTrials
from planner.tune.state import Journal, State, TrialStart, TuningRequest, read_state, writing
from planner.tune.trials import Runner, Trial
from simulator.legality.frameworks import framework_named, torchtitan_family
from topology.cluster import Cluster
from topology.errors import PlannerError, Stale
from topology.health.diagnose import Health, diagnose
from topology.probe.from_machine import probe_machine

MOST_BEGUN = 2  # times that a trial of a plan may begin without an end before the plan is taken as the cause
MOST_RESTARTS = 4  # restarts of a job by its scheduler, each of which ended a trial for reasons other than its plan
RESTARTS = "SLURM_RESTART_COUNT"

Tell = Callable[[str], None]


def run_session(
    path: Path,
    *,
    budget_s: float | None = None,
    most_trials: int | None = None,
    within: float | None = None,
    trial_limit_s: float = 120.0,
    allow_busy: bool = False,
    tell: Tell,
    show: Show,
    runner: Runner | None = None,
) -> View:
    """Run the tuning of a state file until it ends; `budget_s` replaces the rest of its own budget, and `most_trials`
    and `within` its own if given.

    `runner` replaces the runner of the state. Raises PlannerError if this machine cannot make trials, and
    KeyboardInterrupt after the last trial was written.
    """
    with writing(path) as journal:
        state = read_state(path)
        trials = list(state.trials)
        request = state.request
        left_s = max(0.0, request.budget_s - state.spent_s) if budget_s is None else budget_s
        made = runner or runner_for(
            request, path.parent, journal, tell=tell, allow_busy=allow_busy, trial_limit_s=trial_limit_s
        )
        for trial in _left_over(state, made):
            journal.ended(trial)
            trials.append(trial)
        return tune(
            state.candidates,
            made,
            Limits(
                budget_s=left_s,
                trials=request.most_trials if most_trials is None else most_trials,
                within=request.within if within is None else within,
            ),
            trials=trials,
            unknown_machine=request.unknown_machine,
            record=journal.ended,
            show=show,
        )


def shown(state: State) -> View:
    """Return the state of a tuning without making trials."""
    view = tune(
        state.candidates,
        RecordedTrials(recorded={}),
        Limits(budget_s=0.0, within=state.request.within),
        trials=[*state.trials, *cut_short(state)],
        unknown_machine=state.request.unknown_machine,
    )
    return replace(view, reason="not running" if view.reason == "the budget ended" else view.reason)


def runner_for(
    request: TuningRequest, folder: Path, journal: Journal, *, tell: Tell, allow_busy: bool, trial_limit_s: float
) -> Runner:
    """Return the runner for this machine. Raises PlannerError if it cannot make trials."""
    common: dict[str, Any] = {
        "question": request.question(),
        "folder": folder / "trials",
        "limit_s": trial_limit_s,
        "timed_steps": request.steps,
        "tell": tell,
        "began": journal.began,
    }
    settings, question = request.settings, common["question"]
    if request.how == "command":
        end_left_over((folder / "trials").resolve())  # left by a process of this tuning that was killed here
        return CommandTrials(
            **common,
            words=command_words(settings.get("command", "")),
            metric=command_metric(settings.get("metric"), question),
            target=question.framework.tools.export,
        )
    if request.how == "jobs":
        return JobTrials(
            **{**common, "folder": (folder / "trials").resolve()},
            launcher=settings.get("launcher", "slurm"),
            name=settings.get("name", "meshwright"),
            image=settings.get("image"),
            volume=settings.get("volume"),
            device=request.device,
        )
    here = probe_machine() if request.device == "cuda" else None
    health = None if here is None else diagnose(here)
    if here is not None and health is not None:
        require_here(request, here, health, allow_busy=allow_busy)
    return ExecutorTrials(
        **common,
        device=request.device,
        here=here,
        health=health,
        allow_busy=allow_busy,
        profiled="learn" in settings,
        trainer=framework_named(request.framework).tools.trainer,
    )


def require_here(request: TuningRequest, here: Cluster, health: Health, *, allow_busy: bool) -> None:
    """Raise Stale if the machine differs from the planned one, and PlannerError if it is not healthy: trials would be
    useless.
    """
    kinds = [sorted({gpu.kind for group in one.groups for gpu in group.node.gpus}) for one in (request.cluster, here)]
    if here.gpu_count < request.gpus or kinds[0] != kinds[1]:
        raise Stale(
            "the tuning is for another machine",
            why=f"{request.gpus} GPUs of {', '.join(kinds[0])} are asked for, here are {here.gpu_count} of"
            f" {', '.join(kinds[1])}",
            remedy="resume it on such a machine, or begin anew with --cluster local",
        )
    require_healthy(health, allow_busy=allow_busy)


def _left_over(state: State, runner: Runner) -> Iterator[Trial]:
    """Yield the results of trials without a written end; those that a scheduler may still have are followed."""
    followed = set()
    if isinstance(runner, JobTrials):
        for trial in runner.left_over(state.cut_short, state.candidates.plans):
            followed.add(trial.key)
            yield trial
    yield from cut_short(replace(state, cut_short=tuple(one for one in state.cut_short if one.key not in followed)))


def cut_short(state: State) -> list[Trial]:
    """Return the results of trials that began but have no written end, because their process was killed.

    A trial with a report in its directory counts like any other. One without is tried again, unless it began several
    times and never ended.
    """
    found = []
    restarts = os.environ.get(RESTARTS, "")
    most = MOST_BEGUN + min(MOST_RESTARTS, int(restarts) if restarts.isdecimal() else 0)
    by_plan: dict[str, list[TrialStart]] = {}
    for one in state.cut_short:
        by_plan.setdefault(one.key, []).append(one)
    for times in by_plan.values():
        last = times[-1]
        document = read_report(last.directory)
        if document is not None:
            trial = reported(last.failed(), document)
            if trial.status.blames_plan:
                found.append(trial)
                continue
        if len(times) >= most:
            cause = f"it began {len(times)} times, and each time the tuning was killed before it ended"
            found.append(last.failed(cause))
    return found


def require_device(request: TuningRequest) -> None:
    """Raise PlannerError if this machine can make no trial of a state, whatever the plan."""
    trainer = framework_named(request.framework).tools.trainer
    if trainer == "torchtitan":
        torchtitan_family(request.model)
    if trainer not in {"", "own"} and importlib.util.find_spec(trainer) is None:
        raise PlannerError(
            f"{trainer} is not installed, so its plans cannot be run",
            remedy="pip install torchtitan==0.2.2; or --command, with a torchtitan of its own",
        )
    if request.device == "cuda" and request.how == "executor" and not probe_machine().gpu_count:
        raise PlannerError(
            "this machine has no GPU to try plans on",
            why=f"the tuning is for {request.cluster.name}",
            remedy="resume it on such a machine; --device cpu tries plans on processes of the CPU,"
            " where times mean little",
        )
