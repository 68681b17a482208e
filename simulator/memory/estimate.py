"""Replace the memory bound of an estimate by the replayed memory, and add the time that a full GPU costs: retries of
allocations, and paged optimizer states that move between GPU and host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simulator.analytical.scenario import Scenario
from simulator.calibration.intervals import replayed_memory_factors
from simulator.config.estimate import Estimate, MemoryEstimate
from simulator.config.plan import Plan
from simulator.memory.plan_memory import PlanMemory
from simulator.memory.replay import ReservedMemory

THROUGHOUT = ("parameters", "optimizer", "symmetric_buffers")


def with_replay(scenario: Scenario, plan: Plan, estimate: Estimate, held: PlanMemory | None = None) -> Estimate:
    """Return the estimate of a plan with its replayed memory; pass `held` if it has been replayed."""
    held = held or PlanMemory(scenario, plan)
    factors = replayed_memory_factors()
    memory = replace(
        _memory(estimate.memory, held.ranks, held.worst, factors),
        fits=held.fits,
        retries_per_step=held.retries_per_step,
        communicator_bytes=held.communicator_bytes,
        worst_rank=held.worst * (plan.gpus // plan.pp),
        host_bytes=held.host_bytes if estimate.memory.host_bytes or held.paged_bytes else 0.0,
        host_capacity_bytes=held.host_left_bytes,
        paged_bytes=held.paged_bytes,
        paging_s=held.paging_s(),
    )
    found = _with_allocator(replace(estimate, memory=memory), held.flush_s)
    return _with_paging(
        found, estimate.memory.paging_s, [held.paging_s(factor) for factor in (factors[0], 1, factors[1])]
    )


def _memory(
    counted: MemoryEstimate, held: Sequence[ReservedMemory], worst: int, factors: tuple[float, float]
) -> MemoryEstimate:
    """Return the memory of the fullest rank; the categories are those of the step, reduced to the peak that was
    found.
    """
    peak = float(held[worst].allocated_bytes)
    by_stage = tuple(_scaled(one, rank.allocated_bytes) for one, rank in zip(counted.by_stage, held, strict=True))
    return replace(
        counted,
        peak_bytes=replace(counted.peak_bytes, value=peak, low=peak * factors[0], high=peak * factors[1]),
        reserved_bytes=float(held[worst].reserved_bytes),
        by_category=by_stage[worst],
        by_stage=by_stage,
        reserved_by_stage=tuple(float(rank.reserved_bytes) for rank in held),
        fragmentation=held[worst].fragmentation,
    )


def _scaled(categories: dict[str, float], whole: float) -> dict[str, float]:
    """Return categories that add up to `whole`: what is there throughout unchanged, the others in proportion."""
    known = {name: nbytes for name, nbytes in categories.items() if name in THROUGHOUT}
    fixed, total = sum(known.values()), sum(categories.values())
    if not fixed < min(whole, total):
        return {name: nbytes * whole / total for name, nbytes in categories.items()} if total else dict(categories)
    factor = (whole - fixed) / (total - fixed)
    return {name: known.get(name, nbytes * factor) for name, nbytes in categories.items()}


def _with_paging(estimate: Estimate, before_s: float, paging_s: Sequence[float]) -> Estimate:
    """Return the estimate with the seconds for moving paged states, at the low end, the value and the high end of
    reserved memory; `before_s` are the seconds that it already has.
    """
    step = estimate.step_s.at(estimate.step_s.value - before_s)
    low, middle, high = paging_s
    optimizer = estimate.breakdown_s.get("optimizer", 0.0) - before_s + middle
    return replace(
        estimate,
        step_s=replace(step, value=step.value + middle, low=step.low + low, high=step.high + high),
        breakdown_s={**estimate.breakdown_s, "optimizer": optimizer},
    )


def _with_allocator(estimate: Estimate, expected: float) -> Estimate:
    """Return the estimate with the expected seconds of retries in a step."""
    before = estimate.breakdown_s.get("allocator", 0.0)
    step = estimate.step_s.value - before + expected
    return replace(
        estimate, step_s=estimate.step_s.at(step), breakdown_s={**estimate.breakdown_s, "allocator": expected}
    )
