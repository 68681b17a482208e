"""A tuning from its state file: what makes its trials here, what was cut short elsewhere, and the loop between them."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from planner.runs.planned_run import require_healthy
from planner.runs.run_document import read_report
from planner.tune.loop import Limits, Show, View, tune
from planner.tune.runners.command_trials import CommandTrials, command_metric, command_words, end_left_over
from planner.tune.runners.executor_trials import ExecutorTrials, trial_of_report
from planner.tune.runners.job_trials import JobTrials
from planner.tune.runners.recorded_trials import RecordedTrials
from planner.tune.state import Journal, State, TrialStart, TuningRequest, read_state, writing
from planner.tune.trials import Runner, Status, Trial
from simulator.legality.frameworks import framework_named
from simulator.legality.networks import torchtitan_family
from topology.cluster import Cluster
from topology.errors import PlannerError, Stale
from topology.health.diagnose import Health, diagnose
from topology.probe.from_machine import probe_machine

MOST_BEGUN = 2  # times that a plan may begin and never end before it is taken to be the reason
MOST_RESTARTS = 4  # of a job by its scheduler, each of which cut a trial short that is not to blame
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
    """Run the tuning of a state file until it ends; `budget_s` replaces what is left of its own, `most_trials` and
    `within` its own where they are given.

    `runner` makes trials in another way than the state says. Raises PlannerError where this machine cannot make them,
    and KeyboardInterrupt after the last trial was written.
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
    """Return where a tuning stands, without a trial more."""
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
    """Return what makes trials on this machine. Raises PlannerError where it cannot."""
    if request.how == "command":
        end_left_over((folder / "trials").resolve())  # by a tuning of this state that was killed here
        question = request.question()
        return CommandTrials(
            question=question,
            words=command_words(request.settings.get("command", "")),
            metric=command_metric(request.settings.get("metric"), question),
            target=question.framework.tools.export,
            folder=folder / "trials",
            limit_s=trial_limit_s,
            timed_steps=request.steps,
            tell=tell,
            began=journal.began,
        )
    if request.how == "jobs":
        return JobTrials(
            question=request.question(),
            launcher=request.settings.get("launcher", "slurm"),
            folder=(folder / "trials").resolve(),
            name=request.settings.get("name", "meshwright"),
            image=request.settings.get("image"),
            volume=request.settings.get("volume"),
            device=request.device,
            limit_s=trial_limit_s,
            timed_steps=request.steps,
            tell=tell,
            began=journal.began,
        )
    here = probe_machine() if request.device == "cuda" else None
    health = None if here is None else diagnose(here)
    if here is not None and health is not None:
        require_here(request, here, health, allow_busy=allow_busy)
    return ExecutorTrials(
        question=request.question(),
        device=request.device,
        folder=folder / "trials",
        here=here,
        health=health,
        limit_s=trial_limit_s,
        timed_steps=request.steps,
        allow_busy=allow_busy,
        profiled="learn" in request.settings,
        trainer=framework_named(request.framework).tools.trainer,
        tell=tell,
        began=journal.began,
    )


def require_here(request: TuningRequest, here: Cluster, health: Health, *, allow_busy: bool) -> None:
    """Raise Stale where the machine is not as planned, and PlannerError where it is not healthy: no trial would say
    more.
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
    """Yield what became of trials of which no end was written; those that a scheduler may still have are followed."""
    followed = set()
    if isinstance(runner, JobTrials):
        for trial in runner.left_over(state.cut_short, state.candidates.plans):
            followed.add(trial.key)
            yield trial
    yield from cut_short(replace(state, cut_short=tuple(one for one in state.cut_short if one.key not in followed)))


def cut_short(state: State) -> list[Trial]:
    """Return what became of trials that began and of which no end was written: their process was killed.

    One whose report is in its directory is a trial like others. One without is tried again, unless it began several
    times and never ended.
    """
    found = []
    restarts = os.environ.get(RESTARTS, "")
    most = MOST_BEGUN + min(MOST_RESTARTS, int(restarts) if restarts.isdecimal() else 0)
    by_plan: dict[str, list[TrialStart]] = {}
    for one in state.cut_short:
        by_plan.setdefault(one.key, []).append(one)
    for key, times in by_plan.items():
        last = times[-1]
        document = read_report(last.directory)
        if document is not None:
            trial = trial_of_report(document, key, last.predicted_s, last.why, last.directory)
            if trial.status.blames_plan:
                found.append(replace(trial, machine=last.machine))
                continue
        if len(times) >= most:
            found.append(
                Trial(
                    key=key,
                    status=Status.FAILED,
                    cause=f"it began {len(times)} times, and each time the tuning was killed before it ended",
                    predicted_s=last.predicted_s,
                    why=last.why,
                    directory=last.directory,
                    machine=last.machine or platform.node(),
                )
            )
    return found


def require_device(request: TuningRequest) -> None:
    """Raise PlannerError where a state's trials cannot be made on this machine at all, whatever the plan."""
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
