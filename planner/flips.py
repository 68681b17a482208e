"""Why a plan lost, and what would have to be true for it to win.

The reason is read off the two breakdowns: the terms that differ, in seconds. The flip point of a link rate is found by
asking again on a cluster whose links are scaled, and bisecting; that of memory follows from what the two plans need. A
flip further away than a factor of 16 is not reported: nobody will re-plan for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.scaling import (
    network_bytes_per_s,
    nvlink_bytes_per_s,
    scale_network,
    scale_nvlink,
)
from simulator.estimate import Estimate
from simulator.plan import Plan
from topology.cluster import Cluster

GIB = 2.0**30
OCTAVES = 4  # factors 2, 4, 8 and 16 in each direction
PRECISION = 1 / 512  # of the exponent of two: 0.14% of the rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """The runner-up wins once `quantity` passes `at`; it is `now`. `wins` says on which side."""

    quantity: str
    now: float
    at: float
    unit: str
    wins: str  # below or above


# What one plan costs on a cluster: (objective value, fits).
Verdict = tuple[float, bool]
Judge = Callable[[Cluster, Sequence[Plan]], list[Verdict]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    quantity: str
    unit: str
    now: Callable[[Cluster], float]
    scale: Callable[[Cluster, float], Cluster]


KNOBS = (
    Knob(quantity="network per GPU", unit="bytes_per_s", now=network_bytes_per_s, scale=scale_network),
    Knob(quantity="NVLink per GPU", unit="bytes_per_s", now=nvlink_bytes_per_s, scale=scale_nvlink),
)


def lost_because(best: Estimate, other: Estimate, *, objective: str, simulated_s: float | None = None) -> str:
    """Return one line: what the runner-up pays more and saves against the best plan, largest terms first.

    `simulated_s` is by how much it was slower in the simulation, where both were simulated; it is said where the closed
    form sees it the other way round.
    """
    if objective == "memory":
        more = other.memory.reserved_bytes - best.memory.reserved_bytes
        return f"needs {more / GIB:+.1f} GiB" if more else "ties; listed later by the order of its degrees"
    total = other.step_s.value - best.step_s.value
    if simulated_s is not None and total < 0 <= simulated_s:
        return f"{seconds(simulated_s)} a step in the simulation, which has the last word; the closed form says {seconds(total)}"
    names = list(dict.fromkeys([*best.breakdown_s, *other.breakdown_s]))
    terms = [(name, other.breakdown_s.get(name, 0.0) - best.breakdown_s.get(name, 0.0)) for name in names]
    # Terms below a hundredth of a step are noise to a reader; the net says what they add up to.
    shown = sorted((t for t in terms if abs(t[1]) > 0.01 * best.step_s.value), key=lambda t: (-abs(t[1]), t[0]))[:3]
    net = f"{seconds(total)} a step ({total / best.step_s.value:+.1%})" if best.step_s.value else seconds(total)
    if not shown:
        return f"{net}, spread over terms of less than 1% each" if total else "ties; listed later by its degrees"
    return ", ".join(f"{seconds(delta)} {name.replace('_', ' ')}" for name, delta in shown) + f"; net {net}"


def seconds(value: float) -> str:
    """Return a signed duration with the unit that keeps three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(value) * scale >= 1.0 or unit == "us":
            return f"{value * scale:+.3g} {unit}"
    return f"{value:+.3g} s"


def find_flips(cluster: Cluster, best: Plan, others: Sequence[Plan], judge: Judge) -> list[tuple[Flip, ...]]:
    """Return, for each of `others`, the nearest link rates at which it would beat `best`."""
    found: list[list[Flip]] = [[] for _ in others]
    for knob in KNOBS:
        now = knob.now(cluster)
        if now <= 0 or not others or (knob.quantity.startswith("network") and cluster.node_count == 1):
            continue
        for sign in (-1, 1):
            for index, factor in _crossings(cluster, best, others, judge, knob, sign):
                found[index].append(
                    Flip(
                        quantity=knob.quantity,
                        now=now,
                        at=now * factor,
                        unit=knob.unit,
                        wins="below" if sign < 0 else "above",
                    )
                )
    return [tuple(flips) for flips in found]


def memory_flip(cluster: Cluster, best: Estimate, other: Estimate) -> tuple[Flip, ...]:
    """Return the GPU memory below which `best` no longer fits but `other` does; empty when there is none.

    Both fit now, so more memory changes nothing between them.
    """
    now = float(cluster.gpu_memory_bytes)
    at = now - (best.memory.capacity_bytes - best.memory.reserved_bytes)
    if other.memory.reserved_bytes >= best.memory.reserved_bytes or at < now / 2**OCTAVES:
        return ()
    return (Flip(quantity="memory per GPU", now=now, at=at, unit="bytes", wins="below"),)


def _crossings(
    cluster: Cluster, best: Plan, others: Sequence[Plan], judge: Judge, knob: Knob, sign: int
) -> list[tuple[int, float]]:
    """Return (index of plan, factor) where plans first overtake `best` when the knob is turned in one direction."""
    plans = [best, *others]
    seen: dict[float, list[float]] = {}

    def leads(exponent: float) -> list[float]:
        """By how much each plan is behind `best`, relative to it; negative where it wins."""
        if exponent not in seen:
            (value, fits), *rest = judge(knob.scale(cluster, 2.0 ** (sign * exponent)), plans)
            seen[exponent] = [
                1.0 if not other_fits else -1.0 if not fits else other / value - 1 for other, other_fits in rest
            ]
        return seen[exponent]

    # A plan that is ahead as it is (the simulation put it behind) crosses nothing.
    ahead = {index for index, lead in enumerate(leads(0.0)) if lead < 0}
    crossed: dict[int, float] = dict.fromkeys(ahead, 0.0)
    for octave in range(1, OCTAVES + 1):
        for index, lead in enumerate(leads(octave)):
            if lead < 0 and index not in crossed:
                crossed[index] = _root(lambda x, index=index: leads(x)[index], octave - 1, octave)  # type: ignore[misc]
        if len(crossed) == len(others):
            break
    found = sorted((index, exponent) for index, exponent in crossed.items() if index not in ahead)
    return [(index, 2.0 ** (sign * exponent)) for index, exponent in found]


def _root(lead: Callable[[float], float], low: float, high: float) -> float:
    """Return an exponent at which the plan wins, within PRECISION of where it begins to.

    By regula falsi with the Illinois weights, since costs are smooth in a rate; it keeps a bracket as bisection does.
    """
    before, after = lead(low), lead(high)
    side = 0
    while high - low > PRECISION:
        middle = low + (high - low) * before / (before - after) if before > 0 else low + PRECISION
        # Not nearer to an end than the precision, so that the bracket closes from both sides.
        middle = min(max(middle, low + PRECISION * 0.9), high - PRECISION * 0.9)
        value = lead(middle)
        if value < 0:
            high, after = middle, value
            before = before / 2 if side == 1 else before
            side = 1
        else:
            low, before = middle, value
            after = after / 2 if side == -1 else after
            side = -1
    return high
