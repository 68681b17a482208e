"""Two plans side by side: only what differs."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import streamlit as st

from planner.tables import figures as cells
from planner.tables import policy
from planner.waterfall import difference
from ui import data, panels, state
from ui.charts import compare as charts
from ui.charts.look import GIB, seconds, words

if TYPE_CHECKING:
    from planner.search import RankedPlan
    from simulator.plan import Plan


def show(question: state.Question) -> None:
    del question
    result, first = data.answer()
    panels.heading("Compare", "The plan of the sidebar against another; only what differs.")
    others = [state.plan_name(r.plan) for r in result.plans if r.rank != first.rank]
    if not others:
        panels.empty("There is only one plan", "No other grid of degrees is legal and fits, so there is nothing to compare.")
        return
    name = st.selectbox("Against", others, key="other", bind="query-params")
    second = data.chosen(result, str(name))
    left, right = st.columns(2, gap="large")
    _card(left, first)
    _card(right, second)
    rows = differing(first.plan, second.plan)
    panels.section("What differs in the plan")
    st.dataframe(
        rows,
        hide_index=True,
        width="stretch",
        column_config={"first": st.column_config.TextColumn(f"#{first.rank}"), "second": st.column_config.TextColumn(f"#{second.rank}")},
    )
    terms = difference(first.estimate, second.estimate)
    time = [term for term in terms if term.unit == "s" and abs(term.delta) > 1e-6]
    memory = [term for term in terms if term.unit == "bytes" and abs(term.delta) > 0.01 * GIB]
    net = second.estimate.step_s.value - first.estimate.step_s.value
    held = (second.estimate.memory.reserved_bytes - first.estimate.memory.reserved_bytes) / GIB
    left, right = st.columns(2, gap="large")
    with left:
        panels.section("Time, term by term", f"#{second.rank} less #{first.rank}: {seconds(net)} a step in all.")
        _bars([{"name": words(t.name), "delta": t.delta * 1e3, "said": seconds(t.delta)} for t in time], "ms a step", "time")
    with right:
        panels.section("Memory, term by term", f"#{second.rank} less #{first.rank}: {held:+.1f} GiB held on the worst rank.")
        _bars(
            [{"name": words(t.name), "delta": t.delta / GIB, "said": f"{t.delta / GIB:+.2f} GiB"} for t in memory], "GiB", "memory"
        )


def _card(column: Any, ranked: RankedPlan) -> None:
    step, tokens, mfu, peak, exposed, bubble = cells(ranked.estimate)
    with column.container(border=True):
        st.markdown(f"**#{ranked.rank}** · {panels.plain(state.plan_name(ranked.plan))}")
        st.caption(panels.plain(policy(ranked.plan)))
        for cell, (label, value) in zip(
            st.columns(4), (("step, s", step), ("tokens/s/GPU", tokens), ("MFU", mfu), ("GiB", peak)), strict=True
        ):
            cell.markdown(f":gray[{label}]  \n**{value}**")
        st.caption(f"exposed communication {exposed}, bubble {bubble}")


def _bars(rows: list[dict[str, Any]], unit: str, key: str) -> None:
    if not rows:
        panels.empty("The same", "No term differs by enough to show.", icon=":material/drag_handle:")
        return
    panels.chart(charts.differences(rows, unit=unit, dark=panels.dark()), key=f"difference_{key}", alt=f"Differences in {unit}")


def differing(first: Plan, second: Plan) -> list[dict[str, str]]:
    """Return the fields in which two plans differ, in words."""

    def said(value: object) -> str:
        if value is None or value == ():
            return "the framework's own"
        return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)

    return [
        {"what": words(field.name), "first": said(getattr(first, field.name)), "second": said(getattr(second, field.name))}
        for field in fields(first)
        if getattr(first, field.name) != getattr(second, field.name)
    ]


show(data.question())
