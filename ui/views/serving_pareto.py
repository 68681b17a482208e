"""Part of the serving page: the rate of a user against the throughput of a GPU, for all deployments and engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from planner.pictures.pareto import pareto_picture
from planner.serving import serving_account
from planner.serving.reports.pareto import ENERGY, GPU, PRICE, USER, about, pareto_csv, values_of
from planner.serving.reports.text import deployment_text
from simulator.serving.engine import engine_of
from ui import panels
from ui.background import waiting
from ui.charts import serving as charts

if TYPE_CHECKING:
    from planner.serving.pareto import Pareto, ParetoPoint
    from ui.question.serving_question import ServingInputs

CHOSEN = "serving_point"


def show(question: ServingInputs) -> None:
    """Draw the points of a question and, of the one that is chosen, where its time goes."""
    panels.section(
        "Users against GPUs",
        "Every legal deployment, three engines, from one client on; the lines join what an engine does best."
        " Click a point.",
    )
    found: Pareto | None = waiting.ask(
        "pareto", question.key, question.flags(), title="Comparing all deployments, engines and loads"
    )
    if found is None:
        return
    named = {_name(point): point for point in found.points}
    chosen = named.get(st.session_state.get(CHOSEN, ""), found.best[len(found.best) // 2])
    known = [name for name in (GPU, PRICE, ENERGY) if name in values_of(found.points[0])]
    axis = st.segmented_control("Against tokens/s a user", known, default=GPU, key="serving_axis") or GPU
    left, right = st.columns([11, 9], gap="large")
    with left:
        _draw(found, axis, chosen)
        with st.container(horizontal=True, gap="small", key="pareto_files"):
            for name, text in (("pareto.svg", pareto_picture(found)), ("pareto.csv", pareto_csv(found))):
                st.download_button(name, data=text, file_name=name, key=f"pareto_{name}", on_click="ignore")
    with right:
        _detail(chosen)


def _name(point: ParetoPoint) -> str:
    return f"{deployment_text(point.plan.deployment)}, {engine_of(point.engine).title}, {point.clients} clients"


def _draw(found: Pareto, axis: str, chosen: ParetoPoint) -> None:
    rows = [
        {
            "plan": _name(point),
            "engine": engine_of(point.engine).title,
            "user": values_of(point)[USER],
            "value": values_of(point)[axis],
            "first": point.best_of_engine,
            "words": about(point),
        }
        for point in found.points
        if axis in values_of(point)
    ]
    drawn = charts.pareto(rows, axis, _name(chosen), log=axis != GPU, dark=panels.dark())

    def pick(name: str) -> None:
        st.session_state[CHOSEN] = name

    said = f"{axis} against tokens/s a user: {len(found.best)} of {len(found.points)} points are beaten in neither"
    panels.plan_chart(drawn, key="serving_pareto", alt=said, chosen=(_name(chosen), axis), on_pick=pick)


def _detail(point: ParetoPoint) -> None:
    panels.section(panels.plain(_name(point)), about(point).removeprefix(f"{_name(point)}: "))
    account = serving_account(point.question, point.plan.deployment, point.plan.estimate)
    drawn = charts.parts(account.token_s, dark=panels.dark())
    panels.chart(drawn, key="serving_point_token", alt="A token of the chosen point by what takes its time")
