"""Page: two plans side by side, with their differences only, or two questions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from planner.explain.tables import policy_text
from planner.explain.waterfall import difference
from planner.io.figures import last_digit_s, seconds_text
from ui import data, panels, rows, state
from ui.charts import compare as charts
from ui.charts.look import GIB, words
from ui.question_pair import show_questions

if TYPE_CHECKING:
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
    st.caption("This plan compared with another: only the differences.")
    others = [state.plan_name(r.plan) for r in result.plans if r.rank != first.rank]
    if not others:
        panels.empty(
            "There is only one plan",
            "No plan with other parallel degrees is legal and fits, so there is nothing to compare.",
        )
        return
    titles = {
        state.plan_name(r.plan): f"#{r.rank}  {state.plan_chips(r.plan)}  ({policy_text(r.plan)})" for r in result.plans
    }
    name = st.selectbox("Compare with", others, key="other", bind="query-params", format_func=titles.__getitem__)
    second = data.chosen(result, str(name))
    headings = {
        "what": st.column_config.TextColumn(""),
        "first": st.column_config.TextColumn(f"#{first.rank}"),
        "second": st.column_config.TextColumn(f"#{second.rank}"),
    }
    left, right = st.columns(2, gap="large")
    with left:
        panels.section("Results")
        st.dataframe(rows.figure_rows(first, second), hide_index=True, width="stretch", column_config=headings)
    with right:
        panels.section("Differences of the plans")
        st.dataframe(
            rows.differing_rows(first.plan, second.plan), hide_index=True, width="stretch", column_config=headings
        )
    terms = difference(first.estimate, second.estimate)
    time = [term for term in terms if term.unit == "s" and abs(term.delta) > 1e-6]
    memory = [term for term in terms if term.unit == "bytes" and abs(term.delta) > 0.01 * GIB]
    net = second.estimate.step_s.value - first.estimate.step_s.value
    last_s = min(last_digit_s(first.estimate.step_s), last_digit_s(second.estimate.step_s)) / 10
    reserved = (second.estimate.memory.reserved_bytes - first.estimate.memory.reserved_bytes) / GIB
    left, right = st.columns(2, gap="large")
    with left:
        panels.section(
            "Time, term by term",
            f"#{second.rank} minus #{first.rank}: {seconds_text(net, last_s, signed=True)} per step in total.",
        )
        _bars(
            [
                {"name": words(t.name), "delta": t.delta * 1e3, "text": seconds_text(t.delta, last_s, signed=True)}
                for t in time
            ],
            "ms per step",
            "time",
        )
    with right:
        panels.section(
            "Memory, term by term",
            f"#{second.rank} minus #{first.rank}: {reserved:+.1f} GiB reserved on the worst rank.",
        )
        _bars(
            [{"name": words(t.name), "delta": t.delta / GIB, "text": f"{t.delta / GIB:+.1f} GiB"} for t in memory],
            "GiB",
            "memory",
        )


def _bars(terms: list[dict[str, Any]], unit: str, key: str) -> None:
    if not terms:
        panels.empty("No difference", "No term differs by enough to show.", icon=":material/drag_handle:")
        return
    panels.chart(
        charts.differences(terms, unit=unit, dark=panels.dark()), key=f"difference_{key}", alt=f"Differences in {unit}"
    )


show(data.question())
