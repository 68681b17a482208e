"""The flip points of a plan that lost: the link rate or memory size at which it would win.

For a link rate, both plans are costed by the analytical model on clusters with scaled links, twice an octave and then
by root finding. If they were simulated, the costs are scaled to their present ratio. Both plans are then predicted
again at the rate that was found. If the flip point is not confirmed, the other plan's curve is corrected and the search
continues; after a number of failed tries the curve ends. So curves drawn from `RateCurve` cross where a flip point is
reported, and nowhere else. For memory, the flip point follows from the needs of both plans.

Flip points beyond a factor of four are not reported: nobody will re-plan for them. Costing one plan takes nearly as
long as costing fifty, so all rates, directions and plans are costed together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np

from planner.question.prediction import INSTRUCTION_S, Method, simulated_length
from planner.question.question import Question
from planner.search.finalists import Finalist, certainty
from simulator.analytical.estimates import Counted
from simulator.config.estimate import Fit, sure_bytes
from simulator.config.plan import Plan
from topology.cluster import Cluster
from topology.cores import on_cores
from topology.rates.scaling import (
    network_bytes_per_s,
    nvlink_bytes_per_s,
    scale_network,
    scale_nvlink,
)

OCTAVES = 2  # factors up to 4 in each direction
STEPS = 2  # plans are costed at this many rates per octave, since one may win in less than an octave
PRECISION = 1 / 512  # precision in the exponent of two: 0.14 % of the rate
PAST = 1 / 64  # in the exponent of two, beyond a rate that was found: both plans are predicted again 1.1 % further on
TRIES = 3  # predictions of one flip point
MAX_INSTRUCTIONS = 30_000  # instructions of all simulations for the flip points of one answer: about half a second


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipPoint:
    """The runner-up wins when `quantity`, at present `now`, passes `at`; `wins` is the side on which it wins."""

    quantity: str
    now: float
    at: float
    unit: str
    wins: str  # below or above


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCurve:
    """The ratio of a plan's step to that of the first plan on other links: the analytical model's ratio, scaled to the
    present ratio of the two, times `factor`.

    `shift` is the exponent of two of the rate relative to the present one, in the direction of `sign`.
    """

    quantity: str
    sign: int  # -1 for slower links, 1 for faster ones
    simulated: tuple[tuple[float, float], ...] = ()  # (shift, factor) of both plans predicted again, ascending
    end: float = OCTAVES  # shift from which the curve is unknown

    def factor(self, shift: float) -> float:
        """Return the factor, whose logarithm is linear between known shifts and constant beyond the last."""
        shifts, factors = zip((0.0, 1.0), *self.simulated, strict=True)
        return float(np.exp(np.interp(shift, shifts, np.log(factors))))


@dataclass(frozen=True, slots=True, kw_only=True)
class RateFlips:
    """The nearest rates at which a plan wins, and their curves if these are not the analytical model's alone."""

    points: tuple[FlipPoint, ...] = ()
    curves: tuple[RateCurve, ...] = ()


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


def knobs_of(cluster: Cluster) -> list[Knob]:
    """Return the knobs that a cluster has: no network inside a node, and no NVLink where there is none."""
    return [
        knob
        for knob in KNOBS
        if knob.now(cluster) > 0 and (cluster.node_count > 1 or not knob.quantity.startswith("network"))
    ]


def find_flips(question: Question, best: Finalist, others: Sequence[Finalist]) -> list[RateFlips]:
    """Return, for each of `others`, the nearest link rates at which its step gets shorter than that of `best`."""
    cluster = question.cluster
    changes = [(knob, sign) for knob in knobs_of(cluster) for sign in (-1, 1)]
    rivals = [index for index, other in enumerate(others) if certainty(other) <= certainty(best)]
    if not rivals or not changes:
        return [RateFlips()] * len(others)
    rows = _Rows(question, best, [others[index] for index in rivals], changes)
    curves = {
        (turn, row): RateCurve(quantity=turn[0].quantity, sign=turn[1])
        for turn in changes
        for row in range(len(rivals))
    }
    points: dict[tuple[RateChange, int], FlipPoint] = {}
    left = float(MAX_INSTRUCTIONS)
    open_ones, tries = list(curves), 0
    while open_ones:
        crossings = [(key, x) for key, x in rows.crossings({key: curves[key] for key in open_ones}).items() if x]
        open_ones, tries = [], tries + 1
        tried: list[tuple[tuple[RateChange, int], float]] = []
        needed = 0.0
        for key, shift in sorted(crossings, key=lambda one: one[1]):
            length = _length(question, best) + _length(question, rows.others[key[1]])
            if tries > TRIES or length > left - needed or shift + PAST > OCTAVES:
                curves[key] = replace(curves[key], end=shift)
            else:
                tried.append((key, shift))
                needed += length
        left -= needed
        predicted = on_cores([partial(rows.steps_s, *one) for one in tried], seconds=needed * INSTRUCTION_S)
        for (key, shift), steps_s in zip(tried, predicted, strict=True):
            (knob, sign), _ = key
            if steps_s[1] < steps_s[0]:
                now, wins = knob.now(cluster), "below" if sign < 0 else "above"
                at = now * 2.0 ** (sign * (shift + PAST))
                points[key] = FlipPoint(quantity=knob.quantity, now=now, at=at, unit=knob.unit, wins=wins)
            else:
                known = (*curves[key].simulated, (shift, curves[key].factor(shift) * steps_s[1] / steps_s[0]))
                curves[key] = replace(curves[key], simulated=known)
                open_ones.append(key)
    found = [RateFlips()] * len(others)
    for row, index in enumerate(rivals):
        keys = [(turn, row) for turn in changes]
        found[index] = RateFlips(
            points=tuple(points[key] for key in keys if key in points), curves=tuple(curves[key] for key in keys)
        )
    return found


def _length(question: Question, one: Finalist) -> float:
    return simulated_length(question, one.plan) if one.method is Method.SIMULATION else 0.0


def memory_flip(cluster: Cluster, best: Finalist, other: Finalist) -> tuple[FlipPoint, ...]:
    """Return the GPU memory below which `best` is less likely to fit than `other`, if there is one.

    More memory than at present does not change their order.
    """
    now, mine, theirs = float(cluster.gpu_memory_bytes), best.estimate.memory, other.estimate.memory
    if theirs.reserved_bytes >= mine.reserved_bytes or certainty(other) > certainty(best):
        return ()
    least = mine.reserved_bytes
    if mine.fit is Fit.YES:
        least /= sure_bytes(1.0, mine.reserved_factors)
    at = now - (mine.capacity_bytes - least)
    if at < now / 2**OCTAVES:
        return ()
    return (FlipPoint(quantity="memory per GPU", now=now, at=at, unit="bytes", wins="below"),)


RateChange = tuple[Knob, int]  # (property, -1 for smaller or 1 for larger)
# Yields exponents of two at which to compare the plans, receives the gaps there, and returns the flip point's exponent.
Search = Generator[Sequence[float], Sequence[float], float | None]


class _Rows:
    """Costs plans by the analytical model on changed clusters, scaled to their present ratio to `best`."""

    def __init__(
        self, question: Question, best: Finalist, others: Sequence[Finalist], changes: Sequence[RateChange]
    ) -> None:
        self.question, self.best, self.others, self.changes = question, best, others, changes
        self.plans = [best.plan, *(other.plan for other in others)]
        cluster, count = question.cluster, len(self.plans)
        changed = [
            knob.scale(cluster, 2.0 ** (sign * step / STEPS))
            for knob, sign in changes
            for step in range(1, OCTAVES * STEPS + 1)
        ]
        costs = self._costs([(machine, plan) for machine in (cluster, *changed) for plan in self.plans])
        rows = [costs[start : start + count] for start in range(0, len(costs), count)]
        first = best.estimate.step_s.value / rows[0][0]
        # The analytical model's ratio of a plan multiplied by this is its ratio in the list.
        self.scale = [
            other.estimate.step_s.value / cost / first for other, cost in zip(others, rows[0][1:], strict=True)
        ]
        gaps = [[cost / row[0] * scale - 1 for cost, scale in zip(row[1:], self.scale, strict=True)] for row in rows]
        # The gap of each plan at every step of every change, from no change on, indexed [change][plan][step].
        many = OCTAVES * STEPS
        self.gaps_by_step = [
            [[gaps[0][index], *(gaps[start + step][index] for step in range(many))] for index in range(len(others))]
            for start in range(1, len(gaps), many)
        ]

    def _costs(self, pairs: Sequence[tuple[Cluster, Plan]]) -> list[float]:
        clusters, plans = zip(*pairs, strict=True)
        return [float(step) for step in self.question.estimate(plans, each_on=clusters).step_s]

    def steps_s(self, key: tuple[RateChange, int], shift: float) -> list[float]:
        """Return the steps of the best plan and of another one just beyond a shift, by the methods of their
        predictions. Their allocations are the same as at present, and so is the cost of a full allocator.
        """
        (knob, sign), other = key
        there = replace(self.question, cluster=knob.scale(self.question.cluster, 2.0 ** (sign * (shift + PAST))))
        both = self.best, self.others[other]
        table = there.estimate([one.plan for one in both])
        return [
            float(table.step_s[row])
            if one.method is Method.ANALYTICAL
            else there.simulate(one.plan, spans=False, counted=Counted(table, row)).run.step_s
            + one.estimate.breakdown_s["allocator"]
            for row, one in enumerate(both)
        ]

    def crossings(
        self, curves: Mapping[tuple[RateChange, int], RateCurve]
    ) -> dict[tuple[RateChange, int], float | None]:
        """Return the first shift at which each plan wins by its curve, beyond the shifts at which it was simulated."""
        searches = {}
        for (turn, index), curve in curves.items():
            gaps = self.gaps_by_step[self.changes.index(turn)][index]
            searches[turn, index] = _find_crossing(gaps, curve)
        return self.run(searches)

    def run(self, searches: dict[tuple[RateChange, int], Search]) -> dict[tuple[RateChange, int], float | None]:
        """Run all searches together and return their results; all plans of one round are costed at once."""
        cluster = self.question.cluster
        found: dict[tuple[RateChange, int], float | None] = {}
        answers: dict[tuple[RateChange, int], list[float] | None] = dict.fromkeys(searches)
        while answers:
            requests: list[tuple[tuple[RateChange, int], Sequence[float]]] = []
            for key, answer in answers.items():
                try:
                    requests.append((key, next(searches[key]) if answer is None else searches[key].send(answer)))
                except StopIteration as end:
                    found[key] = end.value
            pairs = []
            for ((knob, sign), index), exponents in requests:
                for exponent in exponents:
                    machine = knob.scale(cluster, 2.0 ** (sign * exponent))
                    pairs += [(machine, self.plans[0]), (machine, self.plans[index + 1])]
            costs = iter(self._costs(pairs) if pairs else [])
            ratios = iter([other / best for best, other in zip(costs, costs, strict=True)])
            answers = {
                key: [ratio * self.scale[key[1]] - 1 for ratio in islice(ratios, len(exponents))]
                for key, exponents in requests
            }
        return {key: found[key] for key in searches}


def _find_crossing(gaps: Sequence[float], curve: RateCurve) -> Search:
    """Search for the first shift at which a plan wins by its curve, beyond the shifts at which it was simulated; `gaps`
    are the analytical model's at STEPS per octave, from no change on.

    None if it never wins, or already wins at present (the simulation has put it behind).
    """

    def on_curve(gap: float, shift: float) -> float:
        return (1 + gap) * curve.factor(shift) - 1

    known = curve.simulated[-1][0] if curve.simulated else 0.0
    further = [step for step in range(1, len(gaps)) if step / STEPS > known]
    high = next((step for step in further if on_curve(gaps[step], step / STEPS) < 0), 0)
    if not high or gaps[0] < 0:
        return None
    low = max(known, (high - 1) / STEPS)
    before = gaps[high - 1] if low > known or not known else (yield [low])[0]
    search = _find_root(low, high / STEPS, on_curve(before, low), on_curve(gaps[high], high / STEPS))
    shifts = next(search)
    while True:
        found = yield shifts
        try:
            shifts = search.send([on_curve(gap, shift) for gap, shift in zip(found, shifts, strict=True)])
        except StopIteration as end:
            return float(end.value)


def _find_root(
    low: float, high: float, before: float, after: float
) -> Generator[Sequence[float], Sequence[float], float]:
    """Return an exponent at which the plan wins, within PRECISION of the first one.

    Each round asks close to where a straight line between the ends crosses, further from it on both sides, and in the
    middle, which halves the bracket at least.
    """
    while high - low > PRECISION:
        line = low + (high - low) * before / (before - after) if before > 0 else low
        wide, near = (high - low) / 8, PRECISION * 0.45
        asked = (line - wide, line - near, line + near, line + wide, (low + high) / 2)
        # Stay away from the ends, so that the bracket closes from both sides.
        inside = sorted({min(max(one, low + PRECISION * 0.9), high - PRECISION * 0.9) for one in asked})
        for shift, value in zip(inside, (yield inside), strict=True):
            if value < 0:
                high, after = shift, value
                break
            low, before = shift, value
    return high
