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
BISECTIONS = 9  # leaves 2^(1/512) - 1 = 0.14% between the last two factors


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


def lost_because(best: Estimate, other: Estimate, *, objective: str) -> str:
    """Return one line: what the runner-up pays more and saves against the best plan, largest terms first."""
    if objective == "memory":
        more = other.memory.reserved_bytes - best.memory.reserved_bytes
        return f"needs {more / GIB:+.1f} GiB" if more else "ties; listed later by the order of its degrees"
    total = other.step_s.value - best.step_s.value
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

    def winners(exponent: float) -> list[bool]:
        (value, fits), *rest = judge(knob.scale(cluster, 2.0 ** (sign * exponent)), plans)
        return [other_fits and (not fits or other < value) for other, other_fits in rest]

    crossed: dict[int, float] = {}
    for octave in range(1, OCTAVES + 1):
        wins = winners(octave)
        for index, won in enumerate(wins):
            if won and index not in crossed:
                crossed[index] = _bisect(winners, index, octave - 1, octave)
        if len(crossed) == len(others):
            break
    return [(index, 2.0 ** (sign * exponent)) for index, exponent in sorted(crossed.items())]


def _bisect(winners: Callable[[float], list[bool]], index: int, low: float, high: float) -> float:
    """Narrow (low: loses, high: wins) down; return the exponent at which it wins."""
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if winners(middle)[index]:
            high = middle
        else:
            low = middle
    return high
