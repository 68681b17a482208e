"""Which runs would teach most: those that make the steps of all candidates surest, one after the other.

A fit leaves its costs with a covariance. A run that is made narrows it by what its step says of the costs (its gradient), so
the next run is the one after which the spreads of all candidates' steps add up to least, the covariance is narrowed as if it
had been made, and so on: greedy I-optimal design (Fedorov, Theory of Optimal Experiments, 1972), by spreads rather than variances,
among which a few plans that nothing is known of would decide. Asking where a single step is least sure would ask for the
extremes of a grid, of which a description knows least and which say least of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.learn.fit import Fit, Floats, Measured, PredictedCases, spread_of_runs
from planner.question.cases import Case
from simulator.legality.rules import is_legal
from topology import codec
from topology.errors import PlannerError

MOST = 5
MOST_CANDIDATES = 60
STEP = 1e-2


def ask_next(
    runs: Sequence[Measured], unmeasured: Sequence[Case], found: Fit, *, compiled: bool
) -> list[dict[str, Any]]:
    """Return the plans whose runs would narrow the fit most, best first, each with how sure the step is without it.

    Candidates are cases without a measurement where there are any, else neighbours of those that were run.
    """
    candidates = _few([*(unmeasured or _neighbours([run.case for run in runs]))])
    kept = [case for case in candidates if _teaches(case, found, compiled=compiled)]
    gradients = _gradients(kept, found, compiled=compiled)
    covariance = found.covariance_of_steps
    spreads = spread_of_runs(gradients[:, found.of_steps.index("kernel_factor")])
    chosen: list[tuple[int, float]] = []
    for _ in range(min(MOST, len(kept))):
        together = gradients @ covariance @ gradients.T
        variances = np.diag(together)
        left = variances[:, None] - together**2 / (spreads**2 + variances)
        unsure = np.sum(np.sqrt(np.maximum(left, 0.0)), axis=0)  # all steps, after each of the runs
        unsure[[place for place, _ in chosen]] = np.inf
        best = int(np.argmin(unsure))
        chosen.append((best, float(np.sqrt(variances[best]))))
        toward = covariance @ gradients[best]
        covariance = covariance - np.outer(toward, toward) / (spreads[best] ** 2 + variances[best])
    return [_described(kept[place], unsure) for place, unsure in chosen]


def _few(cases: list[Case]) -> list[Case]:
    """Return some of many candidates, spread over what they are: files list them by model and degree."""
    return sorted(cases, key=lambda case: codec.fingerprint(case.id))[:MOST_CANDIDATES]


def _described(case: Case, unsure: float) -> dict[str, Any]:
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


def _teaches(case: Case, found: Fit, *, compiled: bool) -> bool:
    """Return whether a plan is predicted at all, and may run."""
    try:
        (here,) = PredictedCases([case]).predicted({"step_s": 0.0, **found.values}, compiled=compiled)
    except PlannerError:
        return False
    return here.memory.reserved_low_bytes <= here.memory.capacity_bytes


def _gradients(cases: Sequence[Case], found: Fit, *, compiled: bool) -> Floats:
    """Return d log(step) / d log(cost), shape (cases, costs)."""
    at, asked = {"step_s": 0.0, **found.values}, PredictedCases(cases)

    def logs(values: dict[str, float]) -> Floats:
        return np.log([one.step_s.value for one in asked.predicted(values, compiled=compiled)])

    base = logs(at)
    return np.stack([(logs(at | {name: at[name] * (1 + STEP)}) - base) / STEP for name in found.of_steps], axis=1)


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
                other = replace(case, id=f"{case.id} with {grown} {getattr(plan, grown)}", plan=plan, measured={})
                key = codec.fingerprint((case.question.model, plan))
                if key not in seen and is_legal(case.question.problems(plan)):
                    seen.add(key)
                    yield other
