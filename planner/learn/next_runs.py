"""The runs that would teach most: those after which every candidate is similar to a run that was made.

The distance of two steps is the uncertainty of their ratio before any run, from the spreads of a runtime's costs around
its description and the gradients of both steps. The next run is the one that minimises the sum of all candidates'
distances to the nearest run, and so on (greedy k-medoids: Cornuejols, Fisher, Nemhauser, Management Science 23, 1977).
Runs that minimise the uncertainty of costs would be the extremes of a grid, where a description is worst. If the form
of the model is wrong rather than its numbers, runs spread like the candidates are better (Box, Draper, J. Am. Statist.
Assoc. 54, 1959).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from planner.learn.fit import Fit, Floats, Measured, PredictedCases, priors, usual_values
from planner.question.cases import Case
from simulator.legality.rules import is_legal
from topology import codec
from topology.codec import JsonObject
from topology.errors import PlannerError

ENOUGH = 20  # number of runs that learning aims for
LEAST = 5  # runs suggested, for any number of candidates
MOST_CANDIDATES = 60
STEP = 1e-2
FARTHEST = 100.0  # distance of a candidate while there are no runs: beyond all distances


def ask_next(
    runs: Sequence[Measured], unmeasured: Sequence[Case], found: Fit, like: str, *, compiled: bool
) -> list[JsonObject]:
    """Return the plans whose runs would narrow the fit most, best first, each with the uncertainty of its step.

    As many as `runs` are fewer than `ENOUGH`, at least `LEAST`. Candidates are cases without a measurement if there are
    any, else neighbours of cases that were run.
    """
    ran = [run.case for run in runs]
    candidates = _few([*(unmeasured or _neighbours(ran))])
    kept = _that_teach(candidates, found, compiled=compiled)
    if not kept:
        return []
    found = found.with_costs_of(kept, like)
    gradients = _gradients([*kept, *ran], found.of_steps, like, compiled=compiled)
    distances = _distances(gradients * priors(found.of_steps))[: len(kept)]
    unsure = np.sqrt(np.einsum("ri,ij,rj->r", gradients, found.covariance_of_steps, gradients))
    nearest = distances[:, len(kept) :].min(axis=1, initial=FARTHEST)
    chosen: list[int] = []
    for _ in range(min(max(LEAST, ENOUGH - len(runs)), len(kept))):
        after = np.minimum(nearest[:, None], distances[:, : len(kept)]).sum(axis=0)
        after[chosen] = np.inf
        best = int(np.argmin(after))
        chosen.append(best)
        nearest = np.minimum(nearest, distances[:, best])
    return [_described(kept[place], float(unsure[place])) for place in chosen]


def _distances(places: Floats) -> Floats:
    """Return the distances between all rows, shape (rows, rows)."""
    return np.asarray(np.sqrt(((places[:, None] - places[None]) ** 2).sum(axis=-1)))


def _few(cases: list[Case]) -> list[Case]:
    """Return at most MOST_CANDIDATES, drawn by a hash of their names, since files are sorted by model and degree."""
    return sorted(cases, key=lambda case: codec.fingerprint(case.id))[:MOST_CANDIDATES]


def _described(case: Case, unsure: float) -> JsonObject:
    question = case.question
    return {
        "id": case.id,
        "model": question.model.name,
        "gpus": case.plan.gpus,
        "seq_len": question.workload.seq_len,
        "global_batch": question.workload.global_batch_size,
        "plan": codec.to_builtins(case.plan),
        "step_unsure": round(unsure, 3),  # spread of the logarithm of its step
    }


def _that_teach(cases: Sequence[Case], found: Fit, *, compiled: bool) -> list[Case]:
    """Return the cases whose plans can be predicted and may run."""
    try:
        predicted = PredictedCases(cases).predicted({"step_s": 0.0, **found.values}, compiled=compiled)
    except PlannerError:
        half = len(cases) // 2
        parts = (cases[:half], cases[half:]) if half else ()
        return [case for some in parts for case in _that_teach(some, found, compiled=compiled)]
    return [
        case
        for case, one in zip(cases, predicted, strict=True)
        if one.memory.reserved_low_bytes <= one.memory.capacity_bytes
    ]


def _gradients(cases: Sequence[Case], names: Sequence[str], like: str, *, compiled: bool) -> Floats:
    """Return d log(step) / d log(cost) at the described costs, shape (cases, costs)."""
    at = usual_values(like)
    moved = [at | {name: at[name] * (1 + STEP)} for name in names]
    base, *logs = np.log(PredictedCases(cases).steps_s([at, *moved], compiled=compiled))
    return np.asarray((np.array(logs) - base).T / STEP)


def _neighbours(cases: Sequence[Case]) -> Iterable[Case]:
    """Yield legal plans that differ from one that was run by a factor of two between two degrees, each once."""
    seen = {codec.fingerprint((case.question.model, case.plan)) for case in cases}
    for case in cases:
        for grown in ("tp", "pp", "dp_replicate", "dp_shard", "micro_batch_size"):
            for shrunk in ("tp", "pp", "dp_replicate", "dp_shard", "micro_batch_size"):
                if grown == shrunk or getattr(case.plan, shrunk) % 2:
                    continue
                if (grown == "micro_batch_size") != (shrunk == "micro_batch_size"):
                    continue
                plan = replace(
                    case.plan,
                    **{grown: getattr(case.plan, grown) * 2, shrunk: getattr(case.plan, shrunk) // 2},
                    placement=(),
                    layers_per_stage=(),
                    recompute_per_stage=(),
                )
                changed = f"{grown} {getattr(plan, grown)} and {shrunk} {getattr(plan, shrunk)}"
                other = replace(case, id=f"{case.id} with {changed}", plan=plan, measured={})
                key = codec.fingerprint((case.question.model, plan))
                if key not in seen and is_legal(case.question.problems(plan)):
                    seen.add(key)
                    yield other
