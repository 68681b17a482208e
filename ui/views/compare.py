"""Page: two plans side by side, with their differences only, or two questions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import streamlit as st

from planner.explain.waterfall import difference
from planner.io import plan_words
from topology.units import GIB
from ui import data, differences, panels
from ui.charts import detail as charts
from ui.charts.look import words
from ui.charts.row_types import TermRow
from ui.question import state

if TYPE_CHECKING:
    from planner.explain.waterfall import Difference
    from planner.search.result import RankedPlan, SearchResult

WHAT = ("plans", "questions")
PRECISIONS = {"as the framework does": None, "parameters in float32": "float32", "parameters in bfloat16": "bfloat16"}


def show(question: state.Inputs) -> None:
    result, first = data.answer()
    what = st.segmented_control("Compare", WHAT, default=WHAT[0], required=True, key="what", bind="query-params")
    if what == "questions":
        _show_questions(question, result)
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


# Two questions.


def _show_questions(question: state.Inputs, result: SearchResult) -> None:
    """Ask for the differences of the second question, and show both answers."""
    panels.section("What the other question has", "Model, sequence and batch are the same.")
    other = _other_question(question, result)
    if replace(other, global_batch=question.global_batch) == question:
        st.caption("Change something to compare with.")
        return
    found = data.other_search(other)
    if found is not None:
        _beside(question, result, other, found)


def _other_question(question: state.Inputs, result: SearchResult) -> state.Inputs:
    """Draw the second question and return it; it starts as the first."""
    first, second, third = st.columns([3, 2, 3], vertical_alignment="bottom")
    fourth, fifth = st.columns([3, 5], vertical_alignment="bottom")
    precisions = list(PRECISIONS)
    with first:
        cluster = state.chosen("cluster", question.cluster, title="Machine", key="b_cluster", bind="query-params")
        state.require_known("cluster", cluster)
    gpus = second.number_input(
        "GPUs there",
        1,
        state.MAX_GPUS,
        value=question.gpus,
        placeholder="the whole cluster",
        key="b_gpus",
        bind="query-params",
    )
    with third:
        usual = question.framework or state.USUAL
        framework = state.chosen("framework", usual, title="Its framework", key="b_framework", bind="query-params")
    precision = fourth.selectbox("Precision", precisions, key="b_precision", bind="query-params")
    compiled = fifth.toggle("Compiled", value=question.compile, key="b_compile", bind="query-params")
    return replace(
        question,
        cluster=cluster,
        gpu=question.gpu if cluster == question.cluster else None,
        gpus=None if gpus is None else int(gpus),
        framework=None if framework == state.USUAL else framework,
        compile=bool(compiled),
        param_dtype=PRECISIONS[str(precision)],
        global_batch=result.question.workload.global_batch_size,
    )


def _beside(question: state.Inputs, result: SearchResult, other: state.Inputs, found: SearchResult) -> None:
    first, second = result.plans[0], found.plans[0]
    faster = first.estimate.step_s.value / second.estimate.step_s.value
    st.markdown(f"**{panels.plain(_sentence(faster, first, second))}**")
    panels.side_by_side(
        _answer_rows(first, second),
        _question_title(question, result),
        _question_title(other, found),
        alt="The answers of both questions",
    )
    panels.section("Time, term by term", "The other question's best plan minus this one's.")
    panels.step_difference(
        differences.step_difference(first.estimate, second.estimate),
        "The other question's step",
        key="questions_difference",
    )


def _question_title(question: state.Inputs, answer: SearchResult) -> str:
    """Return the distinguishing properties of a question: machine, GPUs, framework, precision."""
    parts = [question.cluster, f"{question.gpus} GPUs" if question.gpus else ""]
    parts += [answer.question.framework.name]
    parts += ["compiled" if question.compile else "", question.param_dtype or ""]
    return " · ".join(part for part in parts if part)


def _sentence(faster: float, first: RankedPlan, second: RankedPlan) -> str:
    """Return which question is faster and which needs fewer GPU hours; undecided if ranges overlap."""
    a, b = first.estimate.step_s, second.estimate.step_s
    if a.low <= b.high and b.low <= a.high:
        time = f"The other takes {1 / faster:.2g} times as long, but the ranges overlap: no clear winner"
    else:
        time = (
            f"The other is {faster:.2g} times as fast"
            if faster > 1
            else f"The other takes {1 / faster:.2g} times as long"
        )
    hours = _gpu_hours(second) / _gpu_hours(first)
    return f"{time}; a token costs {hours:.2g} times the GPU time there."


def _gpu_hours(ranked: RankedPlan) -> float:
    """Return the GPU hours of a billion tokens."""
    return 1e9 / ranked.estimate.tokens_per_s_per_gpu / 3600


def _answer_rows(first: RankedPlan, second: RankedPlan) -> list[dict[str, str]]:
    """Return the answers of two questions side by side."""

    def cells(ranked: RankedPlan) -> dict[str, str]:
        figures = differences.figures(ranked.estimate)
        memory = figures.pop("memory")
        return {
            "best plan": plan_words.plan_chips(ranked.plan),
            "settings": plan_words.plan_settings(ranked.plan),
            "GPUs": f"{ranked.plan.gpus:,}",
            **figures,
            "GPU hours a billion tokens": f"{float(f'{_gpu_hours(ranked):.2g}'):,.0f}",
            "memory": memory,
            "numbers from": str(ranked.estimate.step_s.source),
        }

    return differences.side_by_side(cells(first), cells(second))


show(data.question())
