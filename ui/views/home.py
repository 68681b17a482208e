"""Page: the question and its answer: the plans on the left, the chosen one on the right, two ticked ones compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import streamlit as st

from planner.explain.answer_text import LEAST_GAIN, answer_sentence, may_fit_sentence
from planner.explain.tables import policy_text
from planner.explain.waterfall import difference
from planner.io.figures import last_digit_s, rate_text, seconds_text
from planner.pictures.memory import stage_parts
from planner.pictures.waterfall import waterfall_rows
from ui import data, panels, rows, state
from ui.charts import compare as compare_charts
from ui.charts import detail as charts
from ui.charts.look import words

if TYPE_CHECKING:
    from planner.search.result import RankedPlan, SearchResult

_COLUMNS = {
    "place": st.column_config.TextColumn("#", width=40, help="= : too close for the model to tell apart."),
    "chips": st.column_config.TextColumn("plan", width=150),
    "step": st.column_config.TextColumn("step", width=70),
    "range": st.column_config.TextColumn("80 % range", width=110),
    "memory": st.column_config.TextColumn("memory", width=80),
    "fits": st.column_config.TextColumn("fits", width=60),
    "policy": st.column_config.TextColumn("settings", width=260),
}


def show(question: state.Inputs) -> None:
    result, chosen = data.answer()
    st.markdown(f"#### {panels.plain(answer_sentence(result.plans[0]))}")
    if result.may_fit is not None and result.may_fit.faster >= LEAST_GAIN:
        st.markdown(panels.plain(may_fit_sentence(result.may_fit, result.plans[0])))
    left, right = st.columns(2, gap="large")
    with left:
        _table(result)
    with right:
        second = data.second(result, chosen)
        if second is None:
            _detail(chosen)
        else:
            _comparison(chosen, second)
    _next(question, result, chosen)


def _table(result: SearchResult) -> None:
    table = rows.plan_rows(result)
    panels.section(f"{len(table)} plans, best first", "Tick one to see it, two to compare them.")
    panels.plan_table(table, _COLUMNS, key="home_plans", on_pick=tick, mode="multi-row")


def tick(ticked: Sequence[dict[str, Any]]) -> None:
    """Choose the first ticked plan, and compare it with the second, if there is one."""
    if ticked:
        state.choose_plan(ticked[0]["plan"], best=ticked[0]["rank"] == 1)
    st.session_state["second"] = ticked[1]["plan"] if len(ticked) > 1 else None


def _detail(ranked: RankedPlan) -> None:
    estimate = ranked.estimate
    panels.section(f"#{ranked.rank}  {state.plan_chips(ranked.plan)}", panels.plain(policy_text(ranked.plan)))
    step, within = rows.step_figure(estimate)
    held, verdict = rows.memory_figure(estimate.memory)
    panels.figures(
        [
            ("Step", step, "One optimizer step; below it is where 80 % of steps are expected.", within),
            ("Tokens/s per GPU", rate_text(estimate), "", f"MFU {estimate.mfu:.0%}"),
            ("Memory", held, "What the allocator reserves on the worst rank, of what a rank can use.", verdict),
        ]
    )
    memory_source = estimate.memory.peak_bytes.source
    st.markdown(f"Time {panels.badge(estimate.step_s.source)} Memory {panels.badge(memory_source)}")
    st.page_link(
        state.view("measured"),
        label="How far off such numbers were",
        icon=":material/straighten:",
        query_params=state.link(),
    )
    last_s = last_digit_s(estimate.step_s)
    largest = max(estimate.breakdown_s.items(), key=lambda item: item[1])
    fall = charts.waterfall(waterfall_rows(estimate), last_s=last_s, dark=panels.dark())
    about = (
        f"The step of {step}, term by term; the largest is {words(largest[0])} with {seconds_text(largest[1], last_s)}"
    )
    panels.chart(fall, key="home_step", alt=about)
    drawn = charts.memory(stage_parts(estimate.memory), estimate.memory.capacity_bytes, dark=panels.dark())
    panels.chart(drawn, key="home_memory", alt=f"Memory by category: {held}, {verdict}")
    st.page_link(
        state.view("detail"),
        label="Placement, timeline, sensitivity, and changes",
        icon=":material/troubleshoot:",
        query_params=state.link(),
    )


def _comparison(first: RankedPlan, second: RankedPlan) -> None:
    panels.section(f"#{first.rank} beside #{second.rank}", "Only what differs.")
    headings = {
        "what": st.column_config.TextColumn(""),
        "first": st.column_config.TextColumn(f"#{first.rank}"),
        "second": st.column_config.TextColumn(f"#{second.rank}"),
    }
    figures = rows.figure_rows(first, second) + rows.differing_rows(first.plan, second.plan)
    st.dataframe(figures, hide_index=True, width="stretch", column_config=headings)
    last_s = min(last_digit_s(one.estimate.step_s) for one in (first, second)) / 10
    terms = [t for t in difference(first.estimate, second.estimate) if t.unit == "s" and abs(t.delta) > 1e-6]
    bars = [
        {"name": words(t.name), "delta": t.delta * 1e3, "text": seconds_text(t.delta, last_s, signed=True)}
        for t in terms
    ]
    net = second.estimate.step_s.value - first.estimate.step_s.value
    if bars:
        drawn = compare_charts.differences(bars, unit="ms per step", dark=panels.dark())
        about = (
            f"#{second.rank} takes {seconds_text(net, last_s, signed=True)} a step beside #{first.rank}, term by term"
        )
        panels.chart(drawn, key="home_difference", alt=about)
    st.button("Compare no longer", key="no_second", on_click=tick, args=([],))


def _next(question: state.Inputs, result: SearchResult, chosen: RankedPlan) -> None:
    """Show what can be done with the chosen plan."""
    panels.section("Next")
    with st.container(horizontal=True, gap="small", key="next"):
        for name, label, icon in (
            ("run", "Run", ":material/play_circle:"),
            ("tuning", "Tune", ":material/science:"),
            ("exports", "Export", ":material/ios_share:"),
            ("curves", "What if", ":material/tune:"),
            ("plans", "All plans", ":material/leaderboard:"),
        ):
            st.page_link(state.view(name), label=label, icon=icon, query_params=state.link())
        st.download_button(
            "Report",
            data=lambda: data.report(question, result, chosen),
            file_name="report.html",
            mime="text/html",
            icon=":material/description:",
            key="home_report",
            on_click="ignore",
            help="One HTML file without references to others.",
        )
        st.download_button(
            "All exports",
            data=lambda: data.export_archive(result, chosen),
            file_name="exports.zip",
            mime="application/zip",
            icon=":material/folder_zip:",
            key="home_zip",
            on_click="ignore",
            help="plan.json, and the file of every tool that can run the plan.",
        )
        panels.share(question)
    panels.assumed(result.assumed)
    with st.expander("The same question in a terminal", icon=":material/terminal:"):
        st.code(question.command(), language="bash", wrap_lines=True)


show(data.question())
