"""Compare several GPU counts: the best plan on each, the best count by the objective, and the fewest that fit.

On one GPU count, step time, throughput and cost per token order plans alike. Between counts they do not: more GPUs are
faster, fewer are cheaper per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice

from planner.search.deadline import NOT_TRIED, over
from planner.search.result import GpuCountRow, SearchResult
from simulator.config.estimate import SURE, Estimate
from topology.errors import Infeasible, Unproved

MOST_COUNTS = 12  # GPU counts, from the first on which a plan may fit, that are searched for one that surely fits


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

    Of equal counts the smaller wins. After `deadline`, a reading of `time.monotonic`, no further count is tried once
    one has a plan.
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
        except Unproved:
            if best is None:
                raise
            rows.append(GpuCountRow(gpus=gpus, problem=NOT_TRIED))
            continue
        first = found.plans[0].estimate
        rows.append(_row(gpus, found, gpu_price_per_hour))
        if best is None or objective_value(first, objective) < objective_value(best.plans[0].estimate, objective):
            best = found
    if best is None:
        assert failure is not None  # noqa: S101 - some count was tried
        raise failure
    return replace(best, by_gpus=tuple(rows))


def fewest_gpus(
    search: Callable[[int], SearchResult],
    counts: Iterable[int],
    *,
    gpu_price_per_hour: float | None = None,
    deadline: float | None = None,
) -> SearchResult:
    """Return the result of the first of `counts` with a plan that surely fits, with a row for each tried count.

    If none of the first MOST_COUNTS, or none tried by the deadline, has one, the first with a plan that may fit is
    returned. Raises Infeasible if there is none either, Unproved if time was over before.
    """
    may_fit: SearchResult | None = None
    failure: Infeasible | None = None
    rows: list[GpuCountRow] = []
    for gpus in islice(counts, MOST_COUNTS):
        try:
            if rows:
                _require_time(deadline, gpus)
            found = search(gpus)
        except Infeasible as error:
            failure = failure or error
            rows.append(GpuCountRow(gpus=gpus, problem=error.what))
            continue
        except Unproved:
            if may_fit is None:
                raise
            break
        rows.append(_row(gpus, found, gpu_price_per_hour))
        if found.plans[0].fit_probability >= SURE:
            return replace(found, by_gpus=tuple(rows))
        may_fit = may_fit or found
    if may_fit is None:
        raise failure or Infeasible("no number of GPUs was tried", remedy="--gpus with a number")
    return replace(may_fit, by_gpus=tuple(rows))


def _require_time(deadline: float | None, gpus: int) -> None:
    """Raise Unproved if a deadline has passed before a plan was found on fewer GPUs than `gpus`."""
    if over(deadline):
        raise Unproved(
            "the time limit ended before a number of GPUs was found on which a plan fits",
            why=f"on fewer than {gpus} none does, and {gpus} and more were not tried",
            remedy="a longer --time-limit, or --gpus with a number",
        )


def _row(gpus: int, found: SearchResult, gpu_price_per_hour: float | None) -> GpuCountRow:
    first = found.plans[0].estimate
    return GpuCountRow(
        gpus=gpus,
        plan=found.plans[0].plan,
        step_s=first.step_s.value,
        tokens_per_s_per_gpu=first.tokens_per_s_per_gpu,
        reserved_bytes=first.memory.reserved_bytes,
        cost_per_million_tokens=cost_per_million_tokens(first, gpu_price_per_hour),
        fit_probability=first.memory.fit_probability,
    )


# --- without GPUs that are off the NVLink fabric ----------------------------------------------------------------------


def with_or_without_off_fabric(
    search: Callable[[int], SearchResult], *, gpus: int, off_fabric: Sequence[int], objective: str = "time"
) -> SearchResult:
    """Return the better of two results by `objective`: on all `gpus`, and on those without the `unsound` ones.

    If the GPUs without them have no plan, fewer are tried. Raises Infeasible when neither has a plan.
    """
    found: SearchResult | None = None
    failure: Infeasible | None = None
    try:
        found = search(gpus)
    except Infeasible as error:
        failure = error
    for count in range(gpus - len(off_fabric), 0, -1):
        try:
            fewer = search(count)
        except Infeasible:
            continue
        except Unproved:
            if found is None:
                raise
            break
        if found is None or _best_value(fewer, objective) < _best_value(found, objective):
            found = _with_note(fewer, found, off_fabric)
        break
    if found is None:
        assert failure is not None  # noqa: S101 - one of the two is always set
        raise failure
    return found


def _best_value(result: SearchResult, objective: str) -> float:
    return objective_value(result.plans[0].estimate, objective)


def _with_note(fewer: SearchResult, whole: SearchResult | None, off_fabric: Sequence[int]) -> SearchResult:
    named = ", ".join(f"GPU {index}" for index in off_fabric)
    used = fewer.plans[0].plan.gpus
    if whole is None:
        reason = "no plan fits with it"
    else:
        slow, fast = whole.plans[0].estimate.step_s.value, fewer.plans[0].estimate.step_s.value
        reason = f"with it the best step takes {slow:.3g} s, on {used} GPUs without it {fast:.3g} s"
    note = f"{named} off the NVLink fabric left out: {reason}"
    return replace(fewer, assumed=(*fewer.assumed, note))
