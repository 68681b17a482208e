"""Why a plan lost, and what would have to be true for it to win.

The reason is read off the two breakdowns: the terms that differ, in seconds. The flip point of a link rate is found by
asking again on clusters whose links are scaled, octave by octave and then closing in; that of memory follows from what
the two plans need. A flip further away than a factor of 16 is not reported: nobody will re-plan for it.

Costing one plan takes nearly as long as costing fifty, so all knobs, directions and plans are asked about together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
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
# Verdicts of plans, each on the cluster beside it; the clusters differ in the rates of their links only.
Judge = Callable[[Sequence[tuple[Cluster, Plan]]], list[Verdict]]


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
    turns = [
        (knob, sign)
        for knob in KNOBS
        for sign in (-1, 1)
        if knob.now(cluster) > 0 and not (knob.quantity.startswith("network") and cluster.node_count == 1)
    ]
    if not others or not turns:
        return [() for _ in others]
    searches = {
        (turn, index): _crossing(leads)
        for turn, row in zip(turns, _octaves(cluster, best, others, judge, turns), strict=True)
        for index, leads in enumerate(row)
    }
    found: list[list[Flip]] = [[] for _ in others]
    for ((knob, sign), index), exponent in _run(cluster, best, others, judge, searches).items():
        if exponent is not None:
            now = knob.now(cluster)
            found[index].append(
                Flip(
                    quantity=knob.quantity,
                    now=now,
                    at=now * 2.0 ** (sign * exponent),
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


Turn = tuple[Knob, int]  # which rate is changed, and which way: -1 down, 1 up
Search = Generator[
    float, float, float | None
]  # yields exponents to be asked about, is sent by how much the plan is behind


def _behind(best: Verdict, other: Verdict) -> float:
    """Return by how much a plan is behind the best, relative to it; negative where it wins."""
    (value, fits), (theirs, other_fits) = best, other
    return 1.0 if not other_fits else -1.0 if not fits else theirs / value - 1


def _octaves(
    cluster: Cluster, best: Plan, others: Sequence[Plan], judge: Judge, turns: Sequence[Turn]
) -> list[list[list[float]]]:
    """Return how far behind each plan is at every whole exponent of every turn, by turn, plan and exponent."""
    plans = [best, *others]
    changed = [knob.scale(cluster, 2.0 ** (sign * octave)) for knob, sign in turns for octave in range(1, OCTAVES + 1)]
    verdicts = judge([(machine, plan) for machine in (cluster, *changed) for plan in plans])
    rows = [verdicts[start : start + len(plans)] for start in range(0, len(verdicts), len(plans))]
    behind = [[_behind(row[0], other) for other in row[1:]] for row in rows]
    return [
        [
            [behind[0][index], *(behind[start + octave][index] for octave in range(OCTAVES))]
            for index in range(len(others))
        ]
        for start in range(1, len(behind), OCTAVES)
    ]


def _run(
    cluster: Cluster, best: Plan, others: Sequence[Plan], judge: Judge, searches: dict[tuple[Turn, int], Search]
) -> dict[tuple[Turn, int], float | None]:
    """Run all searches side by side and return what each ends with: what they ask in a round is judged at once."""
    found: dict[tuple[Turn, int], float | None] = {}
    answers: dict[tuple[Turn, int], float | None] = dict.fromkeys(searches)
    while answers:
        asked: list[tuple[tuple[Turn, int], float]] = []
        for key, answer in answers.items():
            try:
                asked.append((key, next(searches[key]) if answer is None else searches[key].send(answer)))
            except StopIteration as end:
                found[key] = end.value
        pairs = []
        for ((knob, sign), index), exponent in asked:
            machine = knob.scale(cluster, 2.0 ** (sign * exponent))
            pairs += [(machine, best), (machine, others[index])]
        verdicts = judge(pairs) if pairs else []
        answers = {key: _behind(*verdicts[2 * i : 2 * i + 2]) for i, (key, _) in enumerate(asked)}
    return {key: found[key] for key in searches}


def _crossing(leads: Sequence[float]) -> Search:
    """Search for the first exponent at which a plan overtakes; `leads` are what is known at whole ones, from zero on.

    None where it never does, and where it is ahead as it is (the simulation put it behind), so that it crosses nothing.
    """
    ahead = [octave for octave, lead in enumerate(leads) if lead < 0]
    if not ahead or ahead[0] == 0:
        return None
    return (yield from _root(ahead[0] - 1, ahead[0], leads[ahead[0] - 1], leads[ahead[0]]))


def _root(low: float, high: float, before: float, after: float) -> Generator[float, float, float]:
    """Return an exponent at which the plan wins, within PRECISION of where it begins to.

    By regula falsi with the Illinois weights, since costs are smooth in a rate; it keeps a bracket as bisection does.
    """
    side = 0
    while high - low > PRECISION:
        middle = low + (high - low) * before / (before - after) if before > 0 else low + PRECISION
        # Not nearer to an end than the precision, so that the bracket closes from both sides.
        middle = min(max(middle, low + PRECISION * 0.9), high - PRECISION * 0.9)
        value = yield middle
        if value < 0:
            high, after = middle, value
            before = before / 2 if side == 1 else before
            side = 1
        else:
            low, before = middle, value
            after = after / 2 if side == -1 else after
            side = -1
    return high
