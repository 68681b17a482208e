"""What would give a plan room in memory: the quickest of its near relatives whose whole predicted range fits.

Relatives differ in what costs time for memory and nothing else: more recomputation, smaller micro batches, parameters
resharded after the forward pass. Degrees stay, so that nothing else of the plan has to be thought over again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from planner.flips import GIB
from planner.frameworks import Framework
from simulator.estimate import Estimate, Fit
from simulator.plan import Plan

if TYPE_CHECKING:
    from simulator.closed_form import EstimateTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A relative of a plan with more room. `change` says in words what differs, `slower` the step, relative."""

    change: str
    plan: Plan
    step_s: float
    slower: float
    reserved_bytes: float
    headroom_bytes: float
    fit: Fit


def more_room(
    plan: Plan,
    estimate: Estimate,
    framework: Framework,
    costed: Callable[[Sequence[Plan]], EstimateTable],
    legal: Callable[[Plan], bool],
) -> Room | None:
    """Return the quickest relative that surely fits, or else the one with most room; None where `plan` surely fits
    itself, and where nothing would help.
    """
    if estimate.memory.fit is Fit.YES:
        return None
    relatives = list(_relatives(plan, framework))
    if not relatives:
        return None
    table = costed([relative for _, relative in relatives])
    high = estimate.memory.reserved_high_bytes / estimate.memory.reserved_bytes
    roomy = [row for row in range(len(relatives)) if table.reserved_bytes[row] * high <= table.capacity_bytes]
    order = sorted(roomy, key=lambda row: float(table.step_s[row])) + sorted(
        set(range(len(relatives))) - set(roomy), key=lambda row: float(table.reserved_bytes[row])
    )
    for row in order:
        change, relative = relatives[row]
        found = table.estimate(row)
        if found.memory.reserved_bytes >= estimate.memory.reserved_bytes:
            return None
        if legal(relative):
            return Room(
                change=change,
                plan=relative,
                step_s=found.step_s.value,
                slower=found.step_s.value / estimate.step_s.value - 1,
                reserved_bytes=found.memory.reserved_bytes,
                headroom_bytes=found.memory.headroom_bytes,
                fit=found.memory.fit,
            )
    return None


def _relatives(plan: Plan, framework: Framework) -> Iterator[tuple[str, Plan]]:
    """Yield (what differs, the plan) of every relative: any of the three or several at once."""
    words = framework.recomputes
    known = plan.recompute in words and not plan.recompute_per_stage
    harder = words[words.index(plan.recompute) + 1 :] if known else [word for word in words if word != "none"]
    recomputes: list[tuple[str, Plan]] = [("", plan)]
    recomputes += [(f"recompute {word}", replace(plan, recompute=word, recompute_per_stage=())) for word in harder]
    sizes = [size for size in range(1, plan.micro_batch_size) if plan.micro_batch_size % size == 0]
    gathered = plan.reshard_after_forward is False and plan.dp_shard * plan.cp > 1
    for (recompute, base), size, reshard in product(
        recomputes, [*reversed(sizes), plan.micro_batch_size], (False, True) if gathered else (False,)
    ):
        changes = [recompute] if recompute else []
        if size != plan.micro_batch_size:
            changes.append(f"micro batch {size}")
        if reshard:
            changes.append("resharding after forward")
        if changes:
            changed = replace(base, micro_batch_size=size)
            yield " with ".join(changes), replace(changed, reshard_after_forward=True) if reshard else changed


def room_text(estimate: Estimate, room: Room | None) -> str:
    """Return in a sentence what memory is left or missing, how sure that is, and what would give room."""
    memory = estimate.memory
    used = f"{memory.reserved_bytes / GIB:.1f} of {memory.capacity_bytes / GIB:.1f} GiB"
    state = f"{used}, {abs(memory.headroom_bytes) / GIB:.1f} {'left' if memory.headroom_bytes >= 0 else 'too many'}"
    low, high = (end / memory.reserved_bytes - 1 for end in (memory.reserved_low_bytes, memory.reserved_high_bytes))
    if memory.fit is Fit.YES:
        return f"fits: {state}, more than the prediction may be off ({low:+.0%} to {high:+.0%})"
    sure = {
        Fit.LIKELY: f"likely fits, but tight: {state}, less than the prediction may be off ({low:+.0%} to {high:+.0%})",
        Fit.UNLIKELY: f"unlikely to fit: {state}, no more than the prediction may be off ({low:+.0%} to {high:+.0%})",
        Fit.NO: f"does not fit: {state}",
    }[memory.fit]
    if room is None:
        return f"{sure}; neither more recomputation nor smaller micro batches give room"
    spare = abs(room.headroom_bytes) / GIB
    then = f"leaves {spare:.1f} GiB" if room.headroom_bytes >= 0 else f"lacks {spare:.1f} GiB still"
    return f"{sure}; {room.change} {then}, for {room.slower:+.1%} step time"
