"""GPUs that are off the NVLink fabric: plan with them and without them, and return the better plan.

One GPU without NVLink slows every group it belongs to down to PCIe, so leaving it out often wins although fewer GPUs
work (a GB300 tray with one such GPU: 51.6 against 684.9 GB/s, datacrunch-research/nccl-eBPF, 2026-08-14).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.search.gpu_counts import objective_value
from planner.search.result import SearchResult
from topology.errors import Infeasible, Unproved


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
