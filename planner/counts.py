"""Several numbers of GPUs, one question: which is best by the objective, and what each of the others comes to.

On a given number of GPUs the step, the throughput and the cost of a token order plans alike. Between numbers they do
not: more GPUs are quicker, fewer are cheaper a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from simulator.estimate import Estimate
from simulator.plan import Plan
from topology.errors import Infeasible

if TYPE_CHECKING:
    from planner.search import SearchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRow:
    """The best plan on one number of GPUs, or why there is none. Cost is of a million tokens, where a price was given."""

    gpus: int
    plan: Plan | None = None
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    reserved_bytes: float | None = None
    cost_per_million_tokens: float | None = None
    problem: str = ""


def cost_per_million_tokens(estimate: Estimate, gpu_price_per_hour: float | None) -> float | None:
    """Return what a million tokens cost, in the currency of the price; None without one."""
    if gpu_price_per_hour is None:
        return None
    return gpu_price_per_hour / 3600 / estimate.tokens_per_s_per_gpu * 1e6


def value_of(estimate: Estimate, objective: str) -> float:
    """Return what `objective` has the best plan have least of; comparable between numbers of GPUs."""
    if objective == "memory":
        return estimate.memory.reserved_bytes
    if objective in {"throughput", "cost"}:
        return 1 / estimate.tokens_per_s_per_gpu
    return estimate.step_s.value


def best_count(
    search: Callable[[int], SearchResult],
    counts: Sequence[int],
    *,
    objective: str,
    gpu_price_per_hour: float | None = None,
) -> SearchResult:
    """Return the answer on the best of `counts`, with a row for each. Raises Infeasible when none has a plan.

    Of equals the smaller number wins.
    """
    best: SearchResult | None = None
    failure: Infeasible | None = None
    rows = []
    for gpus in sorted(set(counts)):
        try:
            found = search(gpus)
        except Infeasible as error:
            failure = failure or error
            rows.append(CountRow(gpus=gpus, problem=error.what))
            continue
        first = found.plans[0].estimate
        rows.append(
            CountRow(
                gpus=gpus,
                plan=found.plans[0].plan,
                step_s=first.step_s.value,
                tokens_per_s_per_gpu=first.tokens_per_s_per_gpu,
                reserved_bytes=first.memory.reserved_bytes,
                cost_per_million_tokens=cost_per_million_tokens(first, gpu_price_per_hour),
            )
        )
        if best is None or value_of(first, objective) < value_of(best.plans[0].estimate, objective):
            best = found
    if best is None:
        assert failure is not None  # noqa: S101 - some count was tried
        raise failure
    return replace(best, by_gpus=tuple(rows))
