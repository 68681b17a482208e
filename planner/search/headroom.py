"""What would give a plan more headroom in memory: the fastest of its variants whose whole predicted range fits.

Variants trade time for memory and change nothing else: more recomputation, smaller micro batches, parameters resharded
after the forward pass. The parallel degrees stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from planner.question.question import Question
from planner.search.flips import GIB
from simulator.config.estimate import Estimate, Fit
from simulator.config.plan import Plan
from simulator.legality.frameworks import Framework


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadroomOption:
    """A variant of a plan with more headroom.

    `change` says in words what differs; `slower` is the relative step time.
    """

    change: str
    plan: Plan
    step_s: float
    slower: float
    reserved_bytes: float
    headroom_bytes: float
    fit: Fit


def find_headroom(question: Question, plan: Plan, estimate: Estimate) -> HeadroomOption | None:
    """Return the fastest variant that surely fits, or else the one with the most headroom.

    None where `plan` surely fits itself, and where no variant needs less memory.
    """
    if estimate.memory.fit is Fit.YES:
        return None
    variants = list(_variants(plan, question.framework))
    if not variants:
        return None
    table = question.estimate([variant for _, variant in variants])
    high = estimate.memory.reserved_high_bytes / estimate.memory.reserved_bytes
    fitting = [row for row in range(len(variants)) if table.reserved_bytes[row] * high <= table.capacity_bytes]
    order = sorted(fitting, key=lambda row: float(table.step_s[row])) + sorted(
        set(range(len(variants))) - set(fitting), key=lambda row: float(table.reserved_bytes[row])
    )
    for row in order:
        change, variant = variants[row]
        found = table.estimate(row)
        if found.memory.reserved_bytes >= estimate.memory.reserved_bytes:
            return None
        if question.legal(variant):
            return HeadroomOption(
                change=change,
                plan=variant,
                step_s=found.step_s.value,
                slower=found.step_s.value / estimate.step_s.value - 1,
                reserved_bytes=found.memory.reserved_bytes,
                headroom_bytes=found.memory.headroom_bytes,
                fit=found.memory.fit,
            )
    return None


def _variants(plan: Plan, framework: Framework) -> Iterator[tuple[str, Plan]]:
    """Yield (what differs, plan) of every variant: any of the three changes, or several at once."""
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


def memory_text(estimate: Estimate, room: HeadroomOption | None) -> str:
    """Return a sentence: how much memory is left or missing, how certain that is, and which change gives headroom."""
    memory = estimate.memory
    used = f"{memory.reserved_bytes / GIB:.1f} of {memory.capacity_bytes / GIB:.1f} GiB"
    state = f"{used}, {abs(memory.headroom_bytes) / GIB:.1f} {'left' if memory.headroom_bytes >= 0 else 'too many'}"
    low, high = (end / memory.reserved_bytes - 1 for end in (memory.reserved_low_bytes, memory.reserved_high_bytes))
    if memory.fit is Fit.YES:
        return f"fits: {state}, more than the prediction may be off ({low:+.0%} to {high:+.0%})"
    fit_text = {
        Fit.LIKELY: f"likely fits, but tight: {state}, less than the prediction may be off ({low:+.0%} to {high:+.0%})",
        Fit.UNLIKELY: f"unlikely to fit: {state}, no more than the prediction may be off ({low:+.0%} to {high:+.0%})",
        Fit.NO: f"does not fit: {state}",
    }[memory.fit]
    if room is None:
        return f"{fit_text}; neither more recomputation nor smaller micro batches give room"
    spare = abs(room.headroom_bytes) / GIB
    effect = f"leaves {spare:.1f} GiB" if room.headroom_bytes >= 0 else f"lacks {spare:.1f} GiB still"
    return f"{fit_text}; {room.change} {effect}, for {room.slower:+.1%} step time"
