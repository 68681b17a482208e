"""Planning around GPUs that are off the fabric: with them, or with fewer and faster?

One GPU without NVLink slows every group it belongs to down to PCIe, so leaving it out often wins even though fewer GPUs
work (a GB300 tray with one such GPU: 51.6 against 684.9 GB/s, datacrunch-research/nccl-eBPF, 2026-08-14). Both are
costed, and the better by the objective is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from planner.counts import value_of
from topology.errors import Infeasible

if TYPE_CHECKING:
    from planner.search import SearchResult


def with_or_without(
    search: Callable[[int], SearchResult], *, gpus: int, unsound: Sequence[int], objective: str = "time"
) -> SearchResult:
    """Return the better of two answers by `objective`: on all `gpus`, and on the most that do without the `unsound` ones.

    Fewer GPUs than are sound are tried where their number divides nothing. Raises Infeasible when neither has a plan.
    """
    found: SearchResult | None = None
    failure: Infeasible | None = None
    try:
        found = search(gpus)
    except Infeasible as error:
        failure = error
    for count in range(gpus - len(unsound), 0, -1):
        try:
            fewer = search(count)
        except Infeasible:
            continue
        if found is None or _value(fewer, objective) < _value(found, objective):
            found = _explained(fewer, found, unsound)
        break
    if found is None:
        assert failure is not None  # noqa: S101 - one of the two is always set
        raise failure
    return found


def _value(result: SearchResult, objective: str) -> float:
    return value_of(result.plans[0].estimate, objective)


def _explained(fewer: SearchResult, whole: SearchResult | None, unsound: Sequence[int]) -> SearchResult:
    named = ", ".join(f"GPU {index}" for index in unsound)
    used = fewer.plans[0].plan.gpus
    if whole is None:
        reason = "no plan fits with it"
    else:
        slow, fast = whole.plans[0].estimate.step_s.value, fewer.plans[0].estimate.step_s.value
        reason = f"with it the best step takes {slow:.3g} s, on {used} GPUs without it {fast:.3g} s"
    note = f"{named} off the NVLink fabric left out: {reason}"
    return replace(fewer, assumed=(*fewer.assumed, note))
