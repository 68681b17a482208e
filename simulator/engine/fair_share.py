"""Max-min fair shares: who gets how much when several flows want more than a resource has.

An allocation is max-min fair when nobody's rate can grow without taking from someone who has no more (Bertsekas and
Gallager, Data Networks, 2nd ed. 1992, section 6.5.2). It is what per-flow fair queueing and, roughly, congestion
control converge to, and it is unique, so the answer does not depend on the order of the flows.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flow:
    """Something that would run at `rate` alone, and then use `amount` of each resource in `uses`.

    Fairness is counted in `rate`. `cap` is the fraction of `rate` it can reach for reasons outside the resources.
    """

    rate: float
    uses: tuple[tuple[Hashable, float], ...]
    cap: float = 1.0


def max_min_speeds(flows: Sequence[Flow], capacity: Mapping[Hashable, float]) -> list[float]:
    """Return the fraction of its `rate` that each flow runs at, between 0 and its cap.

    Progressive filling: all rates rise together; a flow stops at its cap or when a resource it uses is full. Takes
    O(rounds * uses) time with at most one round per flow. Flows with `rate` 0 compete for nothing and get their cap.
    """
    speeds = [flow.cap for flow in flows]
    rising = {i: flow for i, flow in enumerate(flows) if flow.rate > 0.0 and flow.cap > 0.0}
    left = {r: capacity[r] for flow in rising.values() for r, _ in flow.uses}
    while rising:
        # What a resource loses per unit that the common level rises.
        slope = dict.fromkeys(left, 0.0)
        for flow in rising.values():
            for r, amount in flow.uses:
                slope[r] += amount / flow.rate
        full_at = {r: left[r] / slope[r] for r in left if slope[r] > 0.0}
        level = min([flow.rate * flow.cap for flow in rising.values()] + list(full_at.values()))
        # Flows on any resource that fills at this level stop, and so do flows that reach their cap. The tolerance
        # makes ties stop together instead of in a second round with a rounding error for a remainder.
        edge = level * (1 + 1e-12)
        stopped = [
            i
            for i, flow in rising.items()
            if flow.rate * flow.cap <= edge or any(full_at.get(r, edge + 1) <= edge for r, _ in flow.uses)
        ]
        for i in stopped:
            flow = rising.pop(i)
            speeds[i] = level / flow.rate
            for r, amount in flow.uses:
                left[r] = max(0.0, left[r] - amount * speeds[i])
    return speeds


def water_fill(wants: Sequence[float], supply: float) -> list[float]:
    """Return max-min fair parts of one `supply`: everyone gets what they want or the common level, whatever is less."""
    parts = [0.0] * len(wants)
    waiting = sorted(range(len(wants)), key=lambda i: (wants[i], i))
    for position, i in enumerate(waiting):
        parts[i] = min(wants[i], supply / (len(waiting) - position))
        supply -= parts[i]
    return parts
