"""A calibration as text and JSON: what it will measure, numbers of samples, leave-one-out errors of the fitted curves,
and the assumptions that remain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.calibrate.agenda import STARTING_S, Agenda, made_of
from planner.calibrate.measurements import layers_in_words, own_effects
from planner.io.output import SCHEMA_VERSION
from simulator.config.estimate import NORMAL_80
from simulator.fitting.calibration_fit import calibrated, fit_errors, rate_errors
from topology import codec
from topology.catalog.platform import grow
from topology.cluster import Cluster
from topology.codec import JsonObject
from topology.profile.profile import Profile

MOST_ASSUMED = 8


def document(found: Profile, merged: Profile, links: Cluster | None = None) -> codec.JsonObject:
    """Return the answer of `planner calibrate --json`.

    `found` has the new measurements, `merged` is the resulting profile.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "gpu": found.gpu,
        "driver": found.driver,
        "versions": found.versions,
        "measured": counts(found),
        "in_profile": counts(merged),
        "left_out_errors": codec.to_builtins(fit_errors(merged)),
        "overlap": codec.to_builtins(overlap_rows(found)),
        "overlap_errors": {mode: error for mode, (error, _) in _rate_errors(merged, links).items()},
        "missing": list(found.missing),
    }


def counts(profile: Profile) -> dict[str, int]:
    """Return the number of valid samples of each kind, and of throttled ones."""
    lists = profile.sample_lists()
    valid = {name: sum(not getattr(sample, "invalid", "") for sample in samples) for name, samples in lists.items()}
    return {**valid, "throttled": sum(map(len, lists.values())) - sum(valid.values())}


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRow:
    """A measured product with its collective: the fastest mode, and the share of the shorter of the two it hides."""

    operation: str
    ranks: int
    rows: int
    columns: tuple[int, ...]
    depth: int
    product_s: float
    collective_s: float
    seconds: Mapping[str, float]
    fastest: str
    hidden: float


def overlap_rows(profile: Profile) -> list[OverlapRow]:
    """Return the overlap measurements, one row for each product with its collective."""
    rows = []
    for sample in profile.overlap:
        if sample.invalid or not sample.seconds:
            continue
        mode = min(sample.seconds, key=lambda name: sample.seconds[name])
        saved = sample.product_s + sample.collective_s - sample.seconds[mode]
        rows.append(
            OverlapRow(
                operation=sample.operation,
                ranks=sample.ranks,
                rows=sample.rows,
                columns=tuple(sample.columns),
                depth=sample.depth,
                product_s=sample.product_s,
                collective_s=sample.collective_s,
                seconds=sample.seconds,
                fastest=mode,
                hidden=max(0.0, min(1.0, saved / min(sample.product_s, sample.collective_s))),
            )
        )
    return rows


def _rate_errors(profile: Profile, links: Cluster | None) -> dict[str, tuple[float, int]]:
    return rate_errors(profile, links) if links is not None and profile.overlap else {}


def _overlap_lines(found: Profile, merged: Profile, links: Cluster | None) -> list[str]:
    rows = overlap_rows(found)
    out = ["fastest overlap mode, product and collective one after the other, what is hidden of the shorter:"] * bool(
        rows
    )
    for row in rows:
        kind = "gather" if row.operation == "all_gather_matmul" else "scatter"
        columns = "+".join(f"{width:,}" for width in row.columns)
        shape = f"{kind} {row.rows:,} x {columns} x {row.depth:,} on {row.ranks}"
        after = row.product_s + row.collective_s
        out.append(
            f"  {shape:<46} {row.fastest:<15} {1e6 * row.seconds[row.fastest]:7,.0f} us"
            f"  {1e6 * after:7,.0f} us  {row.hidden:4.0%}"
        )
    errors = _rate_errors(merged, links)
    if errors:
        error_text = ", ".join(f"{mode} {error:.1%}" for mode, (error, _) in errors.items())
        out.append(f"overlap rates fitted, mean absolute error: {error_text}")
    return out


def lines(found: Profile, merged: Profile, links: Cluster | None = None) -> Iterator[str]:
    """Return the answer of `planner calibrate` as lines of text."""
    new, total = counts(found), counts(merged)
    measured = ", ".join(f"{number} {kind}" for kind, number in new.items() if number)
    yield f"measured  {measured or 'nothing new'}"
    if total != new:
        yield f"profile   {', '.join(f'{number} {kind}' for kind, number in total.items() if number)}"
    errors = fit_errors(merged)
    if errors:
        yield "each sample left out in turn and predicted from the others, mean absolute error:"
        yield from (f"  {one.what:<40} {one.samples:>5} samples  {one.mean_abs:6.1%}" for one in errors)
    yield from _overlap_lines(found, merged, links)
    yield from (f"missing   {what}" for what in found.missing)


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
