"""Page: two plans side by side, with their differences only, or two questions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from planner.explain.waterfall import difference
from planner.io import plan_words
from topology.units import GIB
from ui import data, differences, panels
from ui.charts import compare as charts
from ui.charts.look import words
from ui.charts.row_types import TermRow
from ui.question import state
from ui.question_pair import show_questions

if TYPE_CHECKING:
    from planner.explain.waterfall import Difference
    from planner.search.result import RankedPlan, SearchResult


WHAT = ("plans", "questions")


def show(question: state.Inputs) -> None:
    result, first = data.answer()
    what = st.segmented_control("Compare", WHAT, default=WHAT[0], required=True, key="what", bind="query-params")
    if what == "questions":
        show_questions(question, result)
        return
    _plans(result, first)


def _plans(result: SearchResult, first: RankedPlan) -> None:
    st.caption("This plan and another; only what differs is shown.")
    others = [plan_words.plan_name(r.plan) for r in result.plans if r.rank != first.rank]
    if not others:
        panels.empty(
            "There is only one plan",
            "No plan with other parallel degrees is legal and fits, so there is nothing to compare.",
        )
        return
    titles = {
        plan_words.plan_name(
            r.plan
        ): f"#{r.rank}  {plan_words.plan_chips(r.plan)}  ({plan_words.plan_settings(r.plan)})"
        for r in result.plans
    }
    name = st.selectbox("Compare with", others, key="other", bind="query-params", format_func=titles.__getitem__)
    second = data.chosen(result, str(name))
    names = f"#{first.rank}", f"#{second.rank}"
    left, right = st.columns(2, gap="large")
    with left:
        panels.section("Results")
        panels.side_by_side(differences.figure_rows(first, second), *names, alt=f"Results of {' and '.join(names)}")
    with right:
        panels.section("What differs")
        panels.side_by_side(
            differences.differing_rows(first.plan, second.plan), *names, alt=f"Settings of {' and '.join(names)}"
        )
    time = differences.step_difference(first.estimate, second.estimate)
    terms = difference(first.estimate, second.estimate)
    memory = [term for term in terms if term.unit == "bytes" and abs(term.delta) > 0.05 * GIB]
    reserved = (second.estimate.memory.reserved_bytes - first.estimate.memory.reserved_bytes) / GIB
    net = f"{reserved:+.1f} GiB" if abs(reserved) >= 0.05 else "no difference"
    about = f"#{second.rank} minus #{first.rank}"
    left, right = st.columns(2, gap="large")
    with left:
        panels.section("Time, term by term", f"{about}: {time.net} per step in total.")
        panels.step_difference(time, about, key="difference_time")
    with right:
        panels.section("Memory, term by term", f"{about}: {net} reserved on the worst rank.")
        _memory(memory, f"{about}: {net}")


def _memory(terms: list[Difference], about: str) -> None:
    if not terms:
        panels.empty("No difference in memory", "No term differs by enough to show.", icon=":material/drag_handle:")
        return
    bars: list[TermRow] = [
        {"name": words(t.name), "delta": t.delta / GIB, "text": f"{t.delta / GIB:+.1f} GiB"} for t in terms
    ]
    drawn = charts.differences(bars, unit="GiB", dark=panels.dark())
    panels.chart(drawn, key="difference_memory", alt=f"{about} of memory, term by term")


show(data.question())
