"""Two plans compared: their figures, the fields in which they differ, and their steps term by term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.explain.tables import share_text
from planner.explain.waterfall import difference
from planner.io.figures import last_digit_s, rate_text, seconds_text
from planner.io.plan_words import changed_fields
from ui.charts.look import words
from ui.charts.row_types import TermRow
from ui.rows import memory_figure, step_figure

if TYPE_CHECKING:
    from planner.search.result import RankedPlan
    from simulator.config.estimate import Estimate
    from simulator.config.plan import Plan

PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6}


def figure_rows(first: RankedPlan, second: RankedPlan) -> list[dict[str, str]]:
    """Return the figures of two plans side by side."""

    def cells(estimate: Estimate) -> dict[str, str]:
        parts, step_s = estimate.breakdown_s, estimate.step_s.value
        return {
            **figures(estimate),
            "exposed communication": share_text(parts.get("exposed_communication", 0.0), step_s),
            "pipeline bubble": share_text(parts.get("bubble", 0.0), step_s),
        }

    return side_by_side(cells(first.estimate), cells(second.estimate))


def figures(estimate: Estimate) -> dict[str, str]:
    """Return the figures that all comparisons show."""
    step, within = step_figure(estimate)
    held, verdict = memory_figure(estimate.memory)
    rates = {"tokens/s per GPU": rate_text(estimate), "MFU": f"{estimate.mfu:.0%}"}
    return {"step": step, "80 % range": within, **rates, "memory": f"{held}, {verdict}"}


def side_by_side(one: Mapping[str, str], two: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the rows of a table of two things."""
    return [{"what": name, "first": one[name], "second": two[name]} for name in one]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """Two steps term by term, deltas in `unit`; `net` is the whole difference in words."""

    bars: list[TermRow]
    unit: str
    net: str


def step_difference(first: Estimate, second: Estimate) -> StepDifference:
    """Return the terms in which the second step is longer or shorter, without those that round to zero."""
    last_s = min(last_digit_s(one.step_s) for one in (first, second)) / 10
    unit = seconds_text(last_s, last_s).split()[1]
    terms = [term for term in difference(first, second) if term.unit == "s" and abs(term.delta) >= last_s / 2]
    bars: list[TermRow] = [
        {
            "name": words(term.name),
            "delta": term.delta * PER_SECOND[unit],
            "text": seconds_text(term.delta, last_s, signed=True),
        }
        for term in terms
    ]
    net_s = second.step_s.value - first.step_s.value
    net = seconds_text(net_s, last_s, signed=True) if abs(net_s) >= last_s / 2 else "no difference"
    return StepDifference(bars=bars, unit=f"{unit} per step", net=net)


def differing_rows(first: Plan, second: Plan) -> list[dict[str, str]]:
    """Return the fields in which two plans differ, in words."""
    return [{"what": what, "first": one, "second": other} for what, one, other in changed_fields(first, second)]
