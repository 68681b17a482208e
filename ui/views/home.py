"""Page: the question and its answer: the plans on the left, the chosen one on the right, two ticked ones compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import streamlit as st

from planner.explain.answer_text import LEAST_GAIN, answer_sentence, may_fit_sentence
from planner.io import plan_words
from planner.io.figures import last_digit_s, seconds_text
from planner.pictures.memory import stage_parts
from planner.pictures.waterfall import waterfall_rows
from planner.search.result import TIED
from ui import data, differences, panels, rows
from ui.canvas.step import waits_for
from ui.charts import detail as charts
from ui.charts import plans as plan_charts
from ui.charts.look import words
from ui.charts.row_types import PlanRow
from ui.charts.thumbnail import thumbnail
from ui.question import state

if TYPE_CHECKING:
    from planner.search.result import RankedPlan, SearchResult

PLANS = "plans"  # the part of the page that a tick changes
# The first four fit a phone; the last takes what room is left.
_COLUMNS = {
    "place": st.column_config.TextColumn("#", width=35, help=f"= : {TIED}."),
    "chips": st.column_config.TextColumn("plan"),
    "step": st.column_config.TextColumn("step", width=56),
    "fits": st.column_config.TextColumn("fits", width=48, help="Whether it fits into memory, or how likely that is."),
    "memory": st.column_config.TextColumn("memory", width=70),
    "range": st.column_config.TextColumn("80 % range", width=105),
    "policy": st.column_config.TextColumn("settings", width="large"),
}


def show(question: state.Inputs) -> None:
    result, _ = data.answer()
    st.markdown(f"#### {panels.plain(answer_sentence(result.plans[0]))}")
    if result.may_fit is not None and result.may_fit.faster >= LEAST_GAIN:
        st.markdown(panels.plain(may_fit_sentence(result.may_fit, result.plans[0])))
    _plans(question)


@panels.part(PLANS)
def _plans(question: state.Inputs) -> None:
    result, chosen = data.answer()
    second = data.second(result, chosen)
    left, right = st.columns([11, 9], gap="large")
    with right:  # first the parts that a tick changes
        if second is None:
            _detail(question, result, chosen)
        else:
            _comparison(chosen, second)
    with left:
        _table(result, chosen, second)
    _next(question, result, chosen)


def _table(result: SearchResult, chosen: RankedPlan, second: RankedPlan | None) -> None:
    table = rows.plan_rows(result)
    shown = [plan_words.plan_name(one.plan) for one in (chosen, second) if one is not None]
    # Without a choice the best plan is shown; its row has a tick only if the user ticked it.
    by_hand = chosen.rank > 1 or second is not None or st.session_state.get("best_ticked")
    panels.section(f"{len(table)} plans, best first", "Tick one to see it, two to compare them.")
    panels.plan_table(
        table, _COLUMNS, key="home_plans", on_pick=tick, mode="multi-row", ticked=shown if by_hand else ()
    )
    if any(row["place"] != str(row["rank"]) for row in table):
        st.caption(f"= {TIED}.")
    st.caption("A mark is the predicted step, its bar the range that holds 80 % of steps. Click one to see its plan.")
    panels.plan_chart(
        plan_charts.ranges(table, chosen=shown, dark=panels.dark()),
        key="home_ranges",
        alt=rows.ranges_finding(table),
        chosen=shown,
        on_pick=lambda name: tick([row for row in table if row["plan"] == name]),
    )


def tick(ticked: Sequence[PlanRow]) -> None:
    """Choose the first ticked plan, the best where none is, and compare it with the second, if there is one.

    A third one takes the place of the second.
    """
    linked = state.link()
    if len(ticked) > 2:
        ticked = [row for row in ticked if row["plan"] != st.session_state.get("second")]
    if ticked:
        state.choose_plan(ticked[0]["plan"], best=ticked[0]["rank"] == 1)
    else:
        state.choose_best()
    st.session_state["best_ticked"] = bool(ticked) and ticked[0]["rank"] == 1
    st.session_state["second"] = ticked[1]["plan"] if len(ticked) > 1 else None
    if state.link() != linked:
        st.rerun(scope=(PLANS, panels.PAGES))


def _stop_comparing() -> None:
    st.session_state["second"] = None


def _detail(question: state.Inputs, result: SearchResult, ranked: RankedPlan) -> None:
    estimate = ranked.estimate
    panels.section(
        f"#{ranked.rank}  {plan_words.plan_chips(ranked.plan)}", panels.plain(plan_words.plan_settings(ranked.plan))
    )
    panels.figures(panels.estimate_figures(estimate, ranked.plan), data.nearest_published(question))
    panels.words_first()
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
        f"The step of {rows.step_figure(estimate)[0]}, term by term;"
        f" the largest is {words(largest[0])} with {seconds_text(largest[1], last_s)}"
    )
    panels.chart(fall, key="home_step", alt=about)
    drawn = charts.memory(stage_parts(estimate.memory), estimate.memory.capacity_bytes, dark=panels.dark())
    panels.chart(drawn, key="home_memory", alt=f"Memory by category: {', '.join(rows.memory_figure(estimate.memory))}")
    if data.is_final():
        _timeline(question, result, ranked)
    st.page_link(
        state.view("detail"),
        label="Placement, timeline, sensitivity, and changes",
        icon=":material/troubleshoot:",
        query_params=state.link(),
    )


def _timeline(question: state.Inputs, result: SearchResult, ranked: RankedPlan) -> None:
    """Show the simulated step in small; the page does not wait for it."""
    found = data.simulated(question, result, ranked, patience_s=0.0)
    if found is None:
        return
    drawn = thumbnail(found.line, last_s=last_digit_s(ranked.estimate.step_s), dark=panels.dark())
    panels.chart(drawn, key="home_timeline", alt=f"The simulated step in small. {waits_for(found)}")
    st.caption(waits_for(found))
    st.page_link(
        state.view("detail"),
        label="The whole timeline",
        icon=":material/view_timeline:",
        query_params={**state.link(), "tab": "Timeline"},
    )


def _comparison(first: RankedPlan, second: RankedPlan) -> None:
    panels.section(f"#{first.rank} compared with #{second.rank}", "Only what differs.")
    figures = differences.figure_rows(first, second) + differences.differing_rows(first.plan, second.plan)
    names = f"#{first.rank}", f"#{second.rank}"
    panels.side_by_side(figures, *names, alt=f"{names[0]} compared with {names[1]}")
    panels.words_first()
    panels.step_difference(
        differences.step_difference(first.estimate, second.estimate),
        f"#{second.rank} minus #{first.rank}",
        key="home_difference",
    )
    st.button("Stop comparing", key="no_second", on_click=_stop_comparing)


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
    panels.terminal(question.command())


show(data.question())
