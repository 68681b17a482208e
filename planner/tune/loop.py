"""The loop of a tuning: update beliefs, choose a plan, try it, until nothing better is likely or the budget ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from planner.tune.beliefs import Beliefs, believe
from planner.tune.candidates import Candidates
from planner.tune.choice import MOST_TOGETHER, Best, best_of, choose, untried
from planner.tune.stop import LIKELY, Outlook, outlook
from planner.tune.trials import Chosen, Runner, Status, Trial

MOST_FAILED = 6  # failed trials without any measurement, after which the plans are not the cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to end: after `budget_s` seconds or `trials` trials, or when nothing better by `within` is likely."""

    budget_s: float
    trials: int | None = None
    within: float = 0.01
    together: int = MOST_TOGETHER


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The state of a tuning after its last trial, for display and for the final answer."""

    candidates: Candidates
    trials: tuple[Trial, ...]
    beliefs: Beliefs
    best: Best | None
    outlook: Outlook
    reason: str = ""  # of the stop; empty while the tuning continues
    running: tuple[Chosen, ...] = field(default=())
    left_s: float = 0.0


Show = Callable[[View], None]
Record = Callable[[Trial], None]


def _nothing(_: object) -> None:
    """Take no notice."""


def tune(
    candidates: Candidates,
    runner: Runner,
    limits: Limits,
    *,
    trials: Sequence[Trial] = (),
    unknown_machine: bool = False,
    record: Record = _nothing,
    show: Show = _nothing,
    clock: Callable[[], float] = time.monotonic,
) -> View:
    """Return the result; `trials` were made earlier (in a resumed tuning).

    `record` is called with each trial as soon as its result is known, `show` after every change. Raises
    KeyboardInterrupt when interrupted, after recording the last trial.
    """
    made, began = list(trials), clock()
    while True:
        left_s = limits.budget_s - (clock() - began)
        view = _view(candidates, made, limits.within, left_s, unknown_machine=unknown_machine)
        reason = _reason(view, limits)
        chosen = [] if reason else _chosen(view, runner, limits)
        if not reason and not chosen:
            more = untried(view.candidates, view.beliefs, view.trials)
            reason = (
                f"the budget ended: no plan that is left is expected to end in {left_s:.0f} s"
                if more
                else "every plan that may run was tried"
            )
        if reason:
            view = replace(view, reason=reason)
            show(view)
            return view
        show(replace(view, running=tuple(chosen)))
        before = len(made)
        for trial in runner.run([(candidates.plans[one.row], one) for one in chosen], left_s):
            made.append(trial)
            record(trial)
            now_left_s = limits.budget_s - (clock() - began)
            seen = _view(candidates, made, limits.within, now_left_s, unknown_machine=unknown_machine)
            show(replace(seen, running=tuple(chosen[len(made) - before :])))
        if not any(trial.status.blames_plan for trial in made[before:]):
            # No trial shows anything about a plan: the time left was too short for another start.
            view = _view(candidates, made, limits.within, 0.0, unknown_machine=unknown_machine)
            view = replace(view, reason="the budget ended")
            show(view)
            return view


def _chosen(view: View, runner: Runner, limits: Limits) -> list[Chosen]:
    counted = limits.trials is not None
    together = limits.together if limits.trials is None else min(limits.together, limits.trials - _counted(view))
    return choose(
        view.candidates, view.beliefs, view.trials, runner, together=together, counted=counted, left_s=view.left_s
    )


def _counted(view: View) -> int:
    """Return the number of trials, without those that a user or the time limit ended."""
    return sum(trial.status.blames_plan for trial in view.trials)


def _reason(view: View, limits: Limits) -> str:
    """Return the reason to stop, or an empty string."""
    if view.best is not None and view.outlook.probability <= LIKELY:
        return f"no untried plan is likely to be better by more than {limits.within:.1%}"
    if view.left_s <= 0:
        return "the budget ended"
    if limits.trials is not None and _counted(view) >= limits.trials:
        return f"{limits.trials} trials were asked for"
    failed = [trial for trial in view.trials if trial.status in {Status.FAILED, Status.TIMEOUT}]
    if view.best is None and len(failed) >= MOST_FAILED:
        return f"{len(failed)} trials failed and none was measured, the last with: {failed[-1].cause or 'no word'}"
    return ""


def _view(
    candidates: Candidates, made: Sequence[Trial], within: float, left_s: float, *, unknown_machine: bool
) -> View:
    beliefs = believe(candidates, made, unknown_machine=unknown_machine)
    return View(
        candidates=candidates,
        trials=tuple(made),
        beliefs=beliefs,
        best=best_of(candidates, made),
        outlook=outlook(candidates, beliefs, made, within),
        left_s=left_s,
    )
