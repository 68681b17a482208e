"""Why a plan lost, and the flip points: the link rate or memory size at which it would win.

The reason comes from the two breakdowns: the terms that differ, in seconds. The flip point of a link rate is found by
costing both plans on clusters with scaled links, by factors of two and then by root finding; that of memory follows
from what the two plans need. Flip points beyond a factor of 16 are not reported: nobody will re-plan for them.

Costing one plan takes nearly as long as costing fifty, so all rates, directions and plans are costed together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from planner.search.scaling import (
    network_bytes_per_s,
    nvlink_bytes_per_s,
    scale_network,
    scale_nvlink,
)
from simulator.config.estimate import Estimate
from simulator.config.plan import Plan
from topology.cluster import Cluster

GIB = 2.0**30
OCTAVES = 4  # factors 2, 4, 8 and 16 in each direction
PRECISION = 1 / 512  # of the exponent of two: 0.14% of the rate


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipPoint:
    """The runner-up wins once `quantity`, which is `now`, passes `at`; `wins` says on which side of it."""

    quantity: str
    now: float
    at: float
    unit: str
    wins: str  # below or above


# The cost of one plan on a cluster: (objective value, whether it fits).
PlanCost = tuple[float, bool]
# Costs plans, each on its own cluster; the clusters differ in the rates of their links only.
CostPlans = Callable[[Sequence[tuple[Cluster, Plan]]], list[PlanCost]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A property of a cluster that can be scaled, and its value now."""

    quantity: str
    unit: str
    now: Callable[[Cluster], float]
    scale: Callable[[Cluster, float], Cluster]


KNOBS = (
    Knob(quantity="network per GPU", unit="bytes_per_s", now=network_bytes_per_s, scale=scale_network),
    Knob(quantity="NVLink per GPU", unit="bytes_per_s", now=nvlink_bytes_per_s, scale=scale_nvlink),
)


def lost_because(best: Estimate, other: Estimate, *, objective: str, simulated_s: float | None = None) -> str:
    """Return one line: the terms in which the runner-up is slower or faster than the best plan, largest first.

    `simulated_s` is by how many seconds it was slower in the simulation, if both were simulated; it is named where the
    closed form orders the two plans the other way round.
    """
    if objective == "memory":
        more = other.memory.reserved_bytes - best.memory.reserved_bytes
        return f"needs {more / GIB:+.1f} GiB" if more else "ties; listed later by the order of its degrees"
    total = other.step_s.value - best.step_s.value
    if simulated_s is not None and total < 0 <= simulated_s:
        return f"{seconds(simulated_s)} a step in the simulation, which has the last word; the closed form says {seconds(total)}"
    names = list(dict.fromkeys([*best.breakdown_s, *other.breakdown_s]))
    terms = [(name, other.breakdown_s.get(name, 0.0) - best.breakdown_s.get(name, 0.0)) for name in names]
    # Terms below 1% of a step are left out; the net includes them.
    shown = sorted((t for t in terms if abs(t[1]) > 0.01 * best.step_s.value), key=lambda t: (-abs(t[1]), t[0]))[:3]
    net = f"{seconds(total)} a step ({total / best.step_s.value:+.1%})" if best.step_s.value else seconds(total)
    if not shown:
        return f"{net}, spread over terms of less than 1% each" if total else "ties; listed later by its degrees"
    return ", ".join(f"{seconds(delta)} {name.replace('_', ' ')}" for name, delta in shown) + f"; net {net}"


def seconds(value: float) -> str:
    """Return a signed duration with three significant digits, in s, ms or us."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(value) * scale >= 1.0 or unit == "us":
            return f"{value * scale:+.3g} {unit}"
    return f"{value:+.3g} s"


def find_flips(
    cluster: Cluster, best: Plan, others: Sequence[Plan], cost_plans: CostPlans
) -> list[tuple[FlipPoint, ...]]:
    """Return, for each of `others`, the nearest link rates at which it would beat `best`."""
    changes = [
        (knob, sign)
        for knob in KNOBS
        for sign in (-1, 1)
        if knob.now(cluster) > 0 and not (knob.quantity.startswith("network") and cluster.node_count == 1)
    ]
    if not others or not changes:
        return [() for _ in others]
    searches = {
        (turn, index): _find_crossing(gaps)
        for turn, row in zip(changes, _gaps_by_octave(cluster, best, others, cost_plans, changes), strict=True)
        for index, gaps in enumerate(row)
    }
    found: list[list[FlipPoint]] = [[] for _ in others]
    for ((knob, sign), index), exponent in _run_searches(cluster, best, others, cost_plans, searches).items():
        if exponent is not None:
            now = knob.now(cluster)
            found[index].append(
                FlipPoint(
                    quantity=knob.quantity,
                    now=now,
                    at=now * 2.0 ** (sign * exponent),
                    unit=knob.unit,
                    wins="below" if sign < 0 else "above",
                )
            )
    return [tuple(flips) for flips in found]


def memory_flip(cluster: Cluster, best: Estimate, other: Estimate) -> tuple[FlipPoint, ...]:
    """Return the GPU memory below which `best` no longer fits but `other` does, if there is one.

    Both fit now, so more memory does not change their order.
    """
    now = float(cluster.gpu_memory_bytes)
    at = now - (best.memory.capacity_bytes - best.memory.reserved_bytes)
    if other.memory.reserved_bytes >= best.memory.reserved_bytes or at < now / 2**OCTAVES:
        return ()
    return (FlipPoint(quantity="memory per GPU", now=now, at=at, unit="bytes", wins="below"),)


RateChange = tuple[Knob, int]  # (property, -1 for smaller or 1 for larger)
# Yields exponents of two at which to compare the plans, and is sent the gap there; returns the flip point's exponent.
Search = Generator[float, float, float | None]


def _relative_gap(best: PlanCost, other: PlanCost) -> float:
    """Return by how much `other` is worse than `best`, relative to it; negative where it wins."""
    (value, fits), (theirs, other_fits) = best, other
    return 1.0 if not other_fits else -1.0 if not fits else theirs / value - 1


def _gaps_by_octave(
    cluster: Cluster, best: Plan, others: Sequence[Plan], cost_plans: CostPlans, changes: Sequence[RateChange]
) -> list[list[list[float]]]:
    """Return the gap of each plan at every integer exponent of every change, indexed [change][plan][exponent]."""
    plans = [best, *others]
    changed = [
        knob.scale(cluster, 2.0 ** (sign * octave)) for knob, sign in changes for octave in range(1, OCTAVES + 1)
    ]
    costs = cost_plans([(changed_cluster, plan) for changed_cluster in (cluster, *changed) for plan in plans])
    rows = [costs[start : start + len(plans)] for start in range(0, len(costs), len(plans))]
    gaps = [[_relative_gap(row[0], other) for other in row[1:]] for row in rows]
    return [
        [[gaps[0][index], *(gaps[start + octave][index] for octave in range(OCTAVES))] for index in range(len(others))]
        for start in range(1, len(gaps), OCTAVES)
    ]


def _run_searches(
    cluster: Cluster,
    best: Plan,
    others: Sequence[Plan],
    cost_plans: CostPlans,
    searches: dict[tuple[RateChange, int], Search],
) -> dict[tuple[RateChange, int], float | None]:
    """Run all searches together and return their results; all plans of one round are costed at once."""
    found: dict[tuple[RateChange, int], float | None] = {}
    answers: dict[tuple[RateChange, int], float | None] = dict.fromkeys(searches)
    while answers:
        requests: list[tuple[tuple[RateChange, int], float]] = []
        for key, answer in answers.items():
            try:
                requests.append((key, next(searches[key]) if answer is None else searches[key].send(answer)))
            except StopIteration as end:
                found[key] = end.value
        pairs = []
        for ((knob, sign), index), exponent in requests:
            changed_cluster = knob.scale(cluster, 2.0 ** (sign * exponent))
            pairs += [(changed_cluster, best), (changed_cluster, others[index])]
        costs = cost_plans(pairs) if pairs else []
        answers = {key: _relative_gap(*costs[2 * i : 2 * i + 2]) for i, (key, _) in enumerate(requests)}
    return {key: found[key] for key in searches}


def _find_crossing(gaps: Sequence[float]) -> Search:
    """Search for the first exponent at which a plan wins; `gaps` are those at integer exponents, from zero on.

    None where it never wins, and where it already does (it was put behind by the simulation).
    """
    winning = [octave for octave, gap in enumerate(gaps) if gap < 0]
    if not winning or winning[0] == 0:
        return None
    return (yield from _find_root(winning[0] - 1, winning[0], gaps[winning[0] - 1], gaps[winning[0]]))


def _find_root(low: float, high: float, before: float, after: float) -> Generator[float, float, float]:
    """Return an exponent at which the plan wins, within PRECISION of the first one.

    Regula falsi with Illinois weights, since costs are smooth in a rate; it keeps a bracket, as bisection does.
    """
    side = 0
    while high - low > PRECISION:
        middle = low + (high - low) * before / (before - after) if before > 0 else low + PRECISION
        # Stay away from the ends, so that the bracket closes from both sides.
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
