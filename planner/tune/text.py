"""A tuning as text: trials and remaining candidates while it runs, and the final answer, also as one JSON document."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from planner.io.grids import grid
from planner.io.output import SCHEMA_VERSION
from planner.io.printable import printable
from planner.tune.history import candidate_words
from planner.tune.loop import View
from planner.tune.trials import Trial
from topology import codec
from topology.codec import JsonObject

SHOWN = 12  # trials in the table of a terminal
FINALISTS = 8


def words(view: View, row: int) -> str:
    """Return a candidate as text."""
    return candidate_words(view.candidates.plans[row])


def progress_table(view: View, phase: str = "") -> Table:
    """Return the trials, the present one, the best so far, the probability of a better plan, and the remaining time."""
    table = grid(("trial", "plan", "status", "believed s", "measured s"), text=("trial", "plan", "status"))
    table.title_justify = table.caption_justify = "left"
    table.title, table.caption = printable(_standing(view)), printable(phase) if phase else None
    first = max(0, len(view.trials) - SHOWN)
    for number, trial in enumerate(view.trials[first:], start=first + 1):
        row = view.candidates.row(trial.key)
        plan = words(view, row) if row is not None else ""
        measured = "" if trial.step_s is None else f"{trial.step_s:.4g}"
        table.add_row(str(number), printable(plan), trial.status.value, _range(trial.predicted_s), measured)
    for number, one in enumerate(view.running, start=len(view.trials) + 1):
        table.add_row(str(number), printable(words(view, one.row)), "running", _range(one.predicted_s), "")
    return table


def _standing(view: View) -> str:
    best = "no plan measured yet" if view.best is None else f"best {view.best.step_s:.4g} s"
    chance = "" if view.best is None else f" · {chance_text(view.outlook.probability)} that a better plan is left"
    left = "" if view.left_s > 1e6 else f" · {max(0.0, view.left_s):.0f} s left"
    return f"{best}{chance}{left}"


def trial_line(view: View, trial: Trial, number: int) -> str:
    """Return one trial as a line, for logs."""
    row = view.candidates.row(trial.key)
    plan = words(view, row) if row is not None else trial.key
    came = f"{trial.step_s:.4g} s" if trial.step_s is not None else f"{trial.status.value}: {trial.cause}".rstrip(": ")
    return f"trial {number}: {plan}: {came} (believed {_range(trial.predicted_s)} s, took {trial.seconds:.0f} s)"


def lines(view: View, *, within: float) -> Iterator[str]:
    """Return the answer as lines of text."""
    for number, trial in enumerate(view.trials, start=1):
        yield trial_line(view, trial, number)
        if trial.why:
            yield f"          {trial.why}"
    best = view.best
    if best is None:
        yield "best      no plan could be measured"
    else:
        predicted = view.candidates.plans[best.row].estimate.step_s.value
        off = predicted / best.step_s - 1
        yield from [
            f"best      {words(view, best.row)}",
            (
                f"          {best.step_s:.4g} s a step, measured; predicted {predicted:.4g} s ({off:+.1%}) before any"
                " trial"
            ),
        ]
    spent_s = sum(trial.seconds for trial in view.trials)
    each = f" ({60 * len(view.trials) / spent_s:.1f} a minute)" if spent_s else ""
    yield f"stopped   {view.reason}, after {len(view.trials)} trials in {spent_s:.0f} s{each}"
    if view.outlook.candidate is not None and best is not None:
        value, low, high = view.beliefs.step.interval(view.outlook.candidate)
        chance = chance_text(view.outlook.probability)
        yield from [
            f"left      {chance} that an untried plan is better by more than {within:.1%}; the likeliest is",
            f"          {words(view, view.outlook.candidate)},",
            f"          believed {value:.4g} s (80% range {low:.4g} to {high:.4g})",
        ]
    learned = [one for one in view.beliefs.corrections if one.low > 1 or one.high < 1]
    yield from (
        f"learned   {one.term} takes {one.factor:.2f} times its prediction (80% range {one.low:.2f} to {one.high:.2f})"
        for one in learned
    )


def chance_text(probability: float) -> str:
    """Return a probability in percent, with no more certainty than its sample allows."""
    if probability < 0.01:
        return "less than 1%"
    return "more than 99%" if probability > 0.99 else f"{probability:.0%}"


def _range(predicted_s: tuple[float, float, float]) -> str:
    value, low, high = predicted_s
    return f"{value:.4g} ({low:.3g} to {high:.3g})"


def tune_document(view: View, *, within: float, state: str | None, learned: str | None) -> JsonObject:
    """Return the trials in order, the best measured plan, the reason for the end, possibly better plans, and what was
    learned.

    `profile` has the path of the profile to which trials were added (None if not requested), and a factor on each
    term's predicted seconds.
    """
    best, outlook = view.best, view.outlook
    return {
        "schema_version": SCHEMA_VERSION,
        "candidates": len(view.candidates),
        "legal": view.candidates.legal,
        "trials": [_trial(view, trial) for trial in view.trials],
        "best": None
        if best is None
        else {
            "plan": codec.to_builtins(view.candidates.plans[best.row].plan),
            "measured_s": best.step_s,
            "first_predicted_s": _estimated(view, best.row),
        },
        "stop": {
            "reason": view.reason,
            "better_exists_probability": outlook.probability,
            "within": within,
            "expected_gain": outlook.expected,
            "likeliest": None if outlook.candidate is None else finalist(view, outlook.candidate),
        },
        "finalists": [finalist(view, row) for row in finalists(view)],
        "profile": {
            "path": learned,
            "corrections": codec.to_builtins(view.beliefs.corrections),
            "scales": list(view.beliefs.scales),
        },
        "state": state,
    }


def finalists(view: View, count: int = FINALISTS) -> list[int]:
    """Return the plans with the fastest believed steps among those that may run."""
    step, beliefs = view.beliefs.step, view.beliefs
    rows = [row for row in range(len(view.candidates)) if beliefs.fits[row] * beliefs.runs[row] > 0.05]
    return sorted(rows, key=lambda row: float(step.mean[row]))[:count]


def finalist(view: View, row: int) -> JsonObject:
    """Return the beliefs about a plan."""
    value, low, high = view.beliefs.step.interval(row)
    return {
        "plan": codec.to_builtins(view.candidates.plans[row].plan),
        "believed_s": {"value": value, "low": low, "high": high},
        "fit_probability": float(view.beliefs.fits[row]),
    }


def _trial(view: View, trial: Trial) -> JsonObject:
    row = view.candidates.row(trial.key)
    one = view.candidates.plans[row] if row is not None else None
    value, low, high = trial.predicted_s
    return {
        "plan": None if one is None else codec.to_builtins(one.plan),
        "predicted_s": {"value": value, "low": low, "high": high},
        "first_predicted_s": None if row is None else _estimated(view, row),
        "measured_s": trial.step_s,
        "status": trial.status.value,
        "seconds": trial.seconds,
        "reserved_bytes": trial.reserved_bytes,
        "why": trial.why,
        "cause": trial.cause,
        "directory": trial.directory or None,
        "machine": trial.machine,
    }


def _estimated(view: View, row: int) -> JsonObject:
    return dict(codec.to_builtins(view.candidates.plans[row].estimate.step_s))
