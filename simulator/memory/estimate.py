"""An estimate with the memory that the allocator holds in place of sums, and with what its retries cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from simulator.analytical.allocator import FLUSH_S_PER_BYTE, known_flush_s, retry_probability
from simulator.analytical.estimates import estimate_plans, known_costs
from simulator.analytical.scenario import Scenario
from simulator.calibration.calibration import RuntimeCosts
from simulator.calibration.intervals import replayed_memory_factors
from simulator.collectives.buffers import communicator_bytes
from simulator.config.estimate import Estimate, MemoryEstimate
from simulator.config.plan import Plan
from simulator.memory.replay import MemoryReplay, ReservedMemory, least_blocks

# Blocks up to which a plan is replayed: about a second of one core.
MOST_BLOCKS = 400_000


def with_replay(scenario: Scenario, plan: Plan, estimate: Estimate) -> Estimate:
    """Return the estimate of a plan with its memory as the caching allocator holds it; as it is where that takes too
    long.
    """
    if least_blocks(scenario, plan) > MOST_BLOCKS or (replay := MemoryReplay(scenario, plan)).length > MOST_BLOCKS:
        return estimate
    counted, known = estimate.memory, known_costs(scenario)
    described = replay.ranks()
    state = _state(scenario, plan, known, len(described))
    held = [
        replace(
            rank,
            reserved_bytes=round(float(known.held_bytes(rank.reserved_bytes, of_state))),
            allocated_bytes=round(float(known.held_bytes(rank.allocated_bytes, of_state))),
        )
        for rank, of_state in zip(described, state, strict=True)
    ]
    worst = max(range(len(held)), key=lambda rank: held[rank].reserved_bytes)
    reserved = held[worst].reserved_bytes
    groups = float(communicator_bytes(replay.context.groups)[0])
    left = counted.capacity_bytes - groups
    factors = replayed_memory_factors()
    # What may be too much is tried with what there is.
    limit = known.described_bytes(left, state[worst])
    tried = replay.rank(worst, capacity_bytes=limit) if reserved > left else held[worst]
    memory = replace(_memory(counted, held, worst, tried, factors), fits=not tried.out_of_memory)
    memory = replace(memory, communicator_bytes=groups, worst_rank=worst * (plan.gpus // plan.pp))
    likely = retry_probability(np.array([reserved]), np.array([left]), factors)
    if known.flush_s is None:
        expected = float(likely[0]) * max(1, tried.retries_per_step) * reserved * FLUSH_S_PER_BYTE
    else:
        expected = float(known_flush_s(likely, known.flush_s, replay.micro_batches)[0])
    return _with_allocator(replace(estimate, memory=memory), expected)


def _state(scenario: Scenario, plan: Plan, known: RuntimeCosts, ranks: int) -> list[float]:
    """Return the bytes of state on every pipeline rank, as they are described; where nothing tells them from others,
    none.
    """
    if known.activations == 1.0:
        return [0.0] * ranks
    columns = estimate_plans(scenario, [plan]).memory
    return [float(nbytes) / known.reserved for nbytes in columns.state_bytes[0, :ranks]]


def _memory(
    counted: MemoryEstimate,
    held: Sequence[ReservedMemory],
    worst: int,
    tried: ReservedMemory,
    factors: tuple[float, float],
) -> MemoryEstimate:
    """Return the memory of the worst rank; its categories, which are those of sums, cut to the peak that was found."""
    peak, stages = float(held[worst].allocated_bytes), len(held)
    by_stage = tuple(_scaled(one, rank.allocated_bytes) for one, rank in zip(counted.by_stage, held, strict=False))
    return replace(
        counted,
        peak_bytes=replace(counted.peak_bytes, value=peak, low=peak * factors[0], high=peak * factors[1]),
        reserved_bytes=float(held[worst].reserved_bytes),
        by_category=by_stage[worst] if len(by_stage) == stages else _scaled(counted.by_category, peak),
        by_stage=by_stage if len(by_stage) == stages else counted.by_stage,
        reserved_by_stage=tuple(float(rank.reserved_bytes) for rank in held),
        retries_per_step=tried.retries_per_step,
        fragmentation=held[worst].fragmentation,
    )


def _scaled(categories: dict[str, float], whole: float) -> dict[str, float]:
    """Return categories that add up to `whole`: parameters and optimizer as they are, the others in proportion."""
    known = {name: nbytes for name, nbytes in categories.items() if name in {"parameters", "optimizer"}}
    fixed, total = sum(known.values()), sum(categories.values())
    if not fixed < min(whole, total):
        return {name: nbytes * whole / total for name, nbytes in categories.items()} if total else dict(categories)
    factor = (whole - fixed) / (total - fixed)
    return {name: known.get(name, nbytes * factor) for name, nbytes in categories.items()}


def _with_allocator(estimate: Estimate, expected: float) -> Estimate:
    """Return the estimate with the seconds that retries are expected to cost in a step."""
    before = estimate.breakdown_s.get("allocator", 0.0)
    step = estimate.step_s.value - before + expected
    return replace(
        estimate, step_s=estimate.step_s.at(step), breakdown_s={**estimate.breakdown_s, "allocator": expected}
    )
