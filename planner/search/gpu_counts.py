"""Compare several GPU counts: the best plan on each, and the best count by the objective.

On one GPU count, step time, throughput and cost per token order plans alike. Between counts they do not: more GPUs are
faster, fewer are cheaper per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.search.deadline import NOT_TRIED, over
from planner.search.result import GpuCountRow, SearchResult
from simulator.config.estimate import Estimate
from topology.errors import Infeasible


def cost_per_million_tokens(estimate: Estimate, gpu_price_per_hour: float | None) -> float | None:
    """Return the cost of a million tokens in the currency of the price; None without a price."""
    if gpu_price_per_hour is None:
        return None
    return gpu_price_per_hour / 3600 / estimate.tokens_per_s_per_gpu * 1e6


def objective_value(estimate: Estimate, objective: str) -> float:
    """Return the value that `objective` minimises: bytes, seconds, or GPU-seconds per token."""
    if objective == "memory":
        return estimate.memory.reserved_bytes
    if objective in {"throughput", "cost"}:
        return 1 / estimate.tokens_per_s_per_gpu
    return estimate.step_s.value


def best_gpu_count(
    search: Callable[[int], SearchResult],
    counts: Sequence[int],
    *,
    objective: str,
    gpu_price_per_hour: float | None = None,
    deadline: float | None = None,
) -> SearchResult:
    """Search on each of `counts` and return the best result, with a row for each. Raises Infeasible if none has a plan.

    Of equal counts the smaller wins. After `deadline`, a reading of `time.monotonic`, no other is tried once one has a
    plan.
    """
    best: SearchResult | None = None
    failure: Infeasible | None = None
    rows = []
    for gpus in sorted(set(counts)):
        if best is not None and over(deadline):
            rows.append(GpuCountRow(gpus=gpus, problem=NOT_TRIED))
            continue
        try:
            found = search(gpus)
        except Infeasible as error:
            failure = failure or error
            rows.append(GpuCountRow(gpus=gpus, problem=error.what))
            continue
        first = found.plans[0].estimate
        rows.append(
            GpuCountRow(
                gpus=gpus,
                plan=found.plans[0].plan,
                step_s=first.step_s.value,
                tokens_per_s_per_gpu=first.tokens_per_s_per_gpu,
                reserved_bytes=first.memory.reserved_bytes,
                cost_per_million_tokens=cost_per_million_tokens(first, gpu_price_per_hour),
            )
        )
        if best is None or objective_value(first, objective) < objective_value(best.plans[0].estimate, objective):
            best = found
    if best is None:
        assert failure is not None  # noqa: S101 - some count was tried
        raise failure
    return replace(best, by_gpus=tuple(rows))
