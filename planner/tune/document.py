"""The result of a tuning as one JSON document."""

from __future__ import annotations

from planner.io.output import SCHEMA_VERSION
from planner.tune.loop import View
from planner.tune.trials import Trial
from topology import codec
from topology.codec import JsonObject

FINALISTS = 8


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
