"""Why a plan is listed after the first: it may not fit, it ties, or the terms in which it is slower; and the plans that
are faster than the first and may not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.io.figures import change_text, gib_text, last_digit_s, seconds_text
from planner.io.plan_words import listed
from planner.search.finalists import Finalist, certainty, mechanisms
from planner.search.result import MayFit
from simulator.config.estimate import SLIGHT, SURE, Estimate, Fit, chance
from topology.units import GIB

LEAST_TERM = 0.01  # share of the better plan's step below which a difference in a term is not named
TERMS = 2  # terms that are named at most
SAME_TIME = 0.005  # relative difference below which two steps are reported as equal


def why_it_lost(best: Finalist, other: Finalist, objective: str) -> str:
    """Return one line on the reason against `other`, listed after `best`."""
    theirs, has = other.estimate.memory, other.estimate.memory.capacity_bytes
    if objective not in {"memory", "pareto"} and certainty(best) < certainty(other):
        sure = f"{chance(theirs.fit_probability)} likely to fit" if theirs.fits else "is not predicted to fit"
        change = change_text(other.estimate.step_s.value / best.estimate.step_s.value - 1)
        return f"{sure}, {gib_text(theirs.reserved_bytes)} of {gib_text(has)} GiB; {change} time"
    if objective not in {"memory", "pareto"} and best.tie == other.tie:
        return _tie_text(best, other)
    return lost_because(best.estimate, other.estimate, objective=objective)


def faster_unsure(listed: Sequence[Finalist], finalists: Sequence[Finalist]) -> tuple[MayFit, ...]:
    """Return the plans that may well fit and are faster than the first, which surely fits: the fastest, and slower ones
    that are more likely to fit.
    """
    first = listed[0].estimate
    if first.memory.fit_probability < SURE:
        return ()
    unsure = [
        one
        for one in finalists
        if one.estimate.memory.fit is Fit.LIKELY and one.estimate.memory.fit_probability >= SLIGHT
    ]
    found: list[MayFit] = []
    for one in sorted(unsure, key=lambda one: one.estimate.step_s.value):
        likely, faster = one.estimate.memory.fit_probability, 1 - one.estimate.step_s.value / first.step_s.value
        if faster > 0 and (not found or likely > found[-1].fit_probability):
            found.append(
                MayFit(plan=one.plan, estimate=one.estimate, method=one.method, fit_probability=likely, faster=faster)
            )
    return tuple(found)


def _tie_text(best: Finalist, other: Finalist) -> str:
    """Return text on a tie: what a person would choose by where time does not decide."""
    change = other.estimate.step_s.value / best.estimate.step_s.value - 1
    more = [name for name in mechanisms(other.plan) if name not in mechanisms(best.plan)]
    less = [name for name in mechanisms(best.plan) if name not in mechanisms(other.plan)]
    room = best.estimate.memory.reserved_bytes - other.estimate.memory.reserved_bytes
    same = abs(change) < SAME_TIME
    parts = ["a tie (same time)" if same else f"a tie ({change_text(change)} time)"]
    parts += [f"needs {listed(more)}" + (f" instead of {listed(less)}" if less else "")] if more else []
    parts += [f"leaves {gib_text(abs(room))} GiB {'more' if room > 0 else 'less'} free"] if abs(room) >= GIB else []
    return "; ".join(parts)


def lost_because(best: Estimate, other: Estimate, *, objective: str = "time") -> str:
    """Return one line: the terms in which the second plan is slower or faster than the first, largest first."""
    if objective == "memory":
        more = other.memory.reserved_bytes - best.memory.reserved_bytes
        return f"needs {more / GIB:+.1f} GiB" if more else "needs as much memory"
    total, last_s = other.step_s.value - best.step_s.value, last_digit_s(best.step_s)
    change = f"{change_text(total / best.step_s.value)} time" if best.step_s.value else "as fast"
    names = list(dict.fromkeys([*best.breakdown_s, *other.breakdown_s]))
    terms = [(name, other.breakdown_s.get(name, 0.0) - best.breakdown_s.get(name, 0.0)) for name in names]
    least = max(LEAST_TERM * best.step_s.value, last_s / 2)
    shown = sorted((t for t in terms if abs(t[1]) >= least), key=lambda t: (-abs(t[1]), t[0]))[:TERMS]
    if not shown:
        return change
    named = ", ".join(
        f"{seconds_text(delta, last_s, signed=True)} {name.replace('exposed_', '').replace('_', ' ')}"
        for name, delta in shown
    )
    return f"{change}: {named}"
