"""Page: which deployment serves a model best, what clients would see, and where the time goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from planner.export.serving.files import serving_files
from planner.io.figures import count_text
from planner.pictures.pareto import pareto_picture
from planner.serving import serving_account, serving_file
from planner.serving.reports.documents import price_per_million
from planner.serving.reports.pareto import ENERGY, GPU, PRICE, USER, about, pareto_csv, values_of
from planner.serving.reports.text import answer_sentence, deployment_text, ms_text, way_out_lines
from simulator.config.hf_config import hub_name
from simulator.serving.engine import engine_of
from topology import codec
from topology.errors import Infeasible
from topology.units import GIB, in_gib, two_digits
from ui import panels
from ui.background import waiting
from ui.charts import serving as charts
from ui.question import serving_question, state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.serving import ServingPlan
    from planner.serving.pareto import Pareto, ParetoPoint
    from simulator.config.estimate import Interval
    from ui.background.work import ServingAnswers
    from ui.question.serving_question import ServingInputs


CHOSEN = "serving_point"


def _pareto(question: ServingInputs) -> None:
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
        _draw_points(found, axis, chosen)
        with st.container(horizontal=True, gap="small", key="pareto_files"):
            for name, text in (("pareto.svg", pareto_picture(found)), ("pareto.csv", pareto_csv(found))):
                st.download_button(name, data=text, file_name=name, key=f"pareto_{name}", on_click="ignore")
    with right:
        _point(chosen)


def _name(point: ParetoPoint) -> str:
    return f"{deployment_text(point.plan.deployment)}, {engine_of(point.engine).title}, {point.clients} clients"


def _draw_points(found: Pareto, axis: str, chosen: ParetoPoint) -> None:
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


def _point(point: ParetoPoint) -> None:
    panels.section(panels.plain(_name(point)), about(point).removeprefix(f"{_name(point)}: "))
    account = serving_account(point.question, point.plan.deployment, point.plan.estimate)
    drawn = charts.parts(account.token_s, dark=panels.dark())
    panels.chart(drawn, key="serving_point_token", alt="A token of the chosen point by what takes its time")


_COLUMNS = {
    "place": st.column_config.TextColumn("#", width=36, help="= : too close for the model to tell apart."),
    "deployment": st.column_config.TextColumn("deployment", width=112),
    "first": st.column_config.TextColumn("first token, ms", width=100),
    "token": st.column_config.TextColumn("further token, ms", width=112),
    "rate": st.column_config.TextColumn("tokens/s a GPU", width=103),
    "cache": st.column_config.TextColumn("cache", width=60, help="Tokens that the cache of an engine holds."),
    "why": st.column_config.TextColumn("why not first", width=260),
}


def show(about: state.Inputs) -> None:
    question = serving_question.ask(about)
    found: ServingAnswers | None = waiting.ask(
        "serve", question.key, question.flags(), title="Simulating all legal deployments"
    )
    if found is None:
        return
    best = found.result.plans[0]
    asked = found.result.question
    st.markdown(f"#### {panels.plain(answer_sentence(asked, best.deployment, best.estimate, meets=best.meets))}")
    for line in way_out_lines(found.out, meets=best.meets):
        st.caption(panels.plain(line))
    left, right = st.columns([11, 9], gap="large")
    with left:
        chosen = _table(found)
        _load(found)
    with right:
        _detail(found, chosen)
    if asked.traffic.concurrency:
        _pareto(question)
    _next(question, found, found.result.plans[chosen])


def _table(found: ServingAnswers) -> int:
    """Show the deployments; return the place of the ticked one, from 0."""
    plans = found.result.plans[: len(found.accounts)]
    panels.section(
        f"{panels.counted(len(found.result.plans), 'deployment')} simulated, all that are legal",
        "Tick one to see where its time goes.",
    )
    rows = [
        {
            "place": f"{rank}{' =' if plan.tied else ''}",
            "deployment": deployment_text(plan.deployment),
            "first": ms_text(plan.estimate.ttft_s),
            "token": ms_text(plan.estimate.tpot_s),
            "rate": two_digits(plan.estimate.output_tokens_per_s_per_gpu.value),
            "cache": count_text(plan.estimate.room.tokens),
            "why": plan.lost_because,
        }
        for rank, plan in enumerate(plans, 1)
    ]
    seen = st.dataframe(
        rows,
        key="serving_plans",
        hide_index=True,
        on_select="rerun",
        selection_mode="single-row",
        width="stretch",
        column_config=_COLUMNS,
    )
    ticked = seen["selection"]["rows"]
    return int(ticked[0]) if ticked and ticked[0] < len(plans) else 0


def _load(found: ServingAnswers) -> None:
    if not found.load.rows:
        return
    panels.section("With other numbers of clients", "The best of the deployments above at each number.")
    rows = [
        {
            "clients": f"{row.value:,.0f}",
            "deployment": deployment_text(row.deployment),
            "first token, ms": two_digits(1e3 * row.estimate.ttft_s.value),
            "further token, ms": two_digits(1e3 * row.estimate.tpot_s.value),
            "tokens/s a GPU": two_digits(row.estimate.output_tokens_per_s_per_gpu.value),
        }
        for row in found.load.rows
    ]
    st.dataframe(rows, hide_index=True, width="stretch", key="serving_load")


def _detail(found: ServingAnswers, place: int) -> None:
    plan, account = found.result.plans[place], found.accounts[place]
    estimate = plan.estimate
    room = estimate.room
    panels.section(f"#{place + 1}  {panels.plain(deployment_text(plan.deployment))}")
    taken = sum(room.by_category.values()) / GIB
    first, first_range = _milliseconds(estimate.ttft_s)
    token, token_range = _milliseconds(estimate.tpot_s)
    source = estimate.tpot_s.source
    price = price_per_million(found.result.question, estimate)
    cost = [] if price is None else [("A million output tokens", two_digits(price), "At the given price of a GPU.")]
    panels.figures(
        [
            ("First token", first, "Mean; below it is where 80 % of such figures were.", first_range, source),
            ("Each further token", token, "Mean time between tokens after the first.", token_range, source),
            (
                "Slow requests",
                f"{two_digits(1e3 * estimate.latency.ttft_s.p95)} ms",
                "95 of 100 first tokens are sooner.",
                "",
                source,
            ),
            ("Memory of a GPU", f"{taken:.0f} GiB", f"Of {in_gib(room.capacity_bytes)}, with the KV cache."),
            *cost,
        ]
    )
    sequences, context = two_digits(account.sequences), two_digits(account.context)
    panels.section(
        "Each further token", f"A step adds a token to {sequences} answers, each with {context} tokens of context."
    )
    drawn = charts.parts(account.token_s, dark=panels.dark())
    panels.chart(
        drawn, key="serving_token", alt=f"The {token} of a token by what takes them: {_largest(account.token_s)}"
    )
    panels.section("The first token")
    drawn = charts.parts(account.first_s, dark=panels.dark())
    panels.chart(
        drawn,
        key="serving_first",
        alt=f"The {first} of the first token by what takes them: {_largest(account.first_s)}",
    )


def _milliseconds(value: Interval) -> tuple[str, str]:
    """Return a time in milliseconds, and its range."""
    low, middle, high = (two_digits(1e3 * end) for end in (value.low, value.value, value.high))
    return f"{middle} ms", f"{low} to {high} ms"


def _largest(parts_s: Mapping[str, float]) -> str:
    name, seconds = max(parts_s.items(), key=lambda part: part[1], default=("nothing", 0.0))
    return f"most of it {name}, {two_digits(1e3 * seconds)} ms"


def _next(question: serving_question.ServingInputs, found: ServingAnswers, plan: ServingPlan) -> None:
    """Offer the files that start a deployment."""
    panels.section("Start it")
    asked = found.result.question
    files = {"plan.json": codec.to_json(serving_file(asked, plan.deployment)) + "\n"}
    try:
        files |= serving_files(
            asked.stated(plan.deployment),
            hub_name(asked.model.name),
            longest=asked.longest,
            gpus_per_node=asked.cluster.gpus_per_node,
        )
    except Infeasible as problem:
        st.caption(panels.plain(problem.what))
    with st.container(horizontal=True, gap="small", key="serving_files"):
        for name, text in files.items():
            st.download_button(name, data=text, file_name=name, key=f"serving_{name}", on_click="ignore")
    if "serve.sh" in files:
        st.code(files["serve.sh"], language="bash", wrap_lines=True)
    panels.assumed(asked.assumed)
    panels.terminal(question.command())


show(state.results()["question"])
