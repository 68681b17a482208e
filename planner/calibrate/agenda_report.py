"""What a calibration prints before it measures, and the assumptions that remain afterwards, as text and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator

from planner.calibrate.agenda import STARTING_S, Agenda, made_of
from planner.calibrate.measurements import layers_in_words, own_effects
from simulator.config.estimate import NORMAL_80
from simulator.fitting.calibration_fit import calibrated
from topology import codec
from topology.catalog.platform import grow
from topology.cluster import Cluster
from topology.codec import JsonObject
from topology.profile.profile import Profile

MOST_ASSUMED = 8


def announced(agenda: Agenda, budget_s: float) -> Iterator[str]:
    """Return lines with the measurements in order, their seconds, and the uncertainty of the steps before and after."""
    count = len(agenda.wanted.steps)
    if agenda.wanted.choice:
        goal = f"find the fastest of {count} plans: their steps, relative to each other, are known"
    else:
        goal = f"predict {count} kinds of steps more closely: they are known"
    made = [*agenda.known, *(one.measurement for one in agenda.chosen)]
    before, after = agenda.spread_after(agenda.known), agenda.spread_after(made)
    seconds = f"in about {agenda.seconds:.0f} of {budget_s:.0f} s, {STARTING_S:.0f} of which pass while processes start"
    yield from [
        f"goal: {goal} within ±{before:.0%} (80 % range), and within ±{after:.0%} after these measurements",
        f"{len(agenda.chosen)} measurements on {agenda.gpus} GPUs, {seconds}:",
    ]
    if agenda.chosen and agenda.seconds > budget_s:
        yield "  too little time for all of them where torch is not in memory yet: a longer --budget"
    width = max((len(one.measurement.name) for one in agenda.chosen), default=0)
    yield from (
        f"  {one.measurement.seconds:5.1f} s  {one.measurement.name:<{width}}  after it ±{_wide(one.after)}"
        for one in agenda.chosen
    )


def what_is_left(agenda: Agenda, whole: Profile, links: Cluster | None) -> Iterator[str]:
    """Return lines with the uncertainty of the steps, their predictions, and the remaining assumptions."""
    made = made_of(agenda, whole)
    before, now, of = agenda.spread_after(agenda.known), agenda.spread_after(made), "of a step"
    if agenda.wanted.choice:
        of = "between plans"
    yield f"sure to   ±{before:.1%} before, ±{now:.1%} now (80 %), {of}"
    yield from (
        f"plan      {name}: {then_s:.4g} s predicted before, {now_s:.4g} s now"
        for name, then_s, now_s in (_steps(agenda, whole, links) if agenda.wanted.choice else ())
    )
    for one in agenda.assumed(made)[:MOST_ASSUMED]:
        could = ", which could change the choice" if one.decides else ""
        yield f"assumed   {one.name}, off by ±{one.spread:.0%}: a step of {one.plan} by {one.change:+.1%}{could}"


def agenda_document(agenda: Agenda, whole: Profile, links: Cluster | None) -> JsonObject:
    """Return the agenda as part of the answer of `planner calibrate --json`; widths are 80 % ranges, relative."""
    made = made_of(agenda, whole)
    return {
        "agenda": [
            {
                "name": one.measurement.name,
                "expected_s": round(one.measurement.seconds, 2),
                "ranks": one.measurement.ranks,
                "unsure_before": math.expm1(NORMAL_80 * one.before),
                "unsure_after": math.expm1(NORMAL_80 * one.after),
            }
            for one in agenda.chosen
        ],
        "questions": [
            {name: codec.to_builtins(getattr(step, name)) for name in ("model", "plan", "workload", "runtime")}
            for step in agenda.wanted.steps
        ],
        "expected_s": round(agenda.seconds, 1),
        "unsure_before": agenda.spread_after(agenda.known),
        "unsure_now": agenda.spread_after(made),
        "steps": [
            {"plan": name, "before_s": before, "now_s": now} for name, before, now in _steps(agenda, whole, links)
        ],
        "assumed": codec.to_builtins(agenda.assumed(made)),
    }


def _steps(agenda: Agenda, whole: Profile, links: Cluster | None) -> list[tuple[str, float, float]]:
    """Return each step as text, as predicted before and with the measurements, fastest first."""
    if links is None:
        return []
    machine = grow(links, max(step.plan.gpus for step in agenda.wanted.steps))
    _, now = own_effects(agenda.wanted.steps, machine, [], calibrated(whole, machine))
    rows = zip(agenda.wanted.steps, agenda.steps_s, now, strict=True)
    return sorted(((layers_in_words(step.plan), float(a), float(b)) for step, a, b in rows), key=lambda row: row[2])


def _wide(spread: float) -> str:
    return f"{math.expm1(NORMAL_80 * spread):.1%}"
