"""Page: the best plans, and why the others lost."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import streamlit as st

from planner.explain.answer_text import LEAST_GAIN, answer_sentence, may_fit_sentence
from planner.explain.tables import basis_lines, cluster_line, model_line, workload_line
from planner.io import plan_words
from planner.search.result import TIED
from planner.search.rule_words import rejected_words
from simulator.config.plan import MESH_AXES
from topology.units import GIB
from ui import data, panels, rows
from ui.charts import plans as charts
from ui.charts.row_types import PlanRow
from ui.question import state

if TYPE_CHECKING:
    from planner.search.result import SearchResult
    from simulator.config.estimate import Estimate

AXES = {
    "dp_replicate": "replicas",
    "dp_shard": "FSDP",
    "cp": "context",
    "tp": "tensor",
    "pp": "pipeline",
    "ep": "expert",
}


# What decides comes first and fits a phone; the rest follows.
_COLUMNS = {
    "place": st.column_config.TextColumn("#", width=35),
    "chips": st.column_config.TextColumn("plan"),
    "step": st.column_config.TextColumn(
        "step", width=56, help="Simulated where the plan is among the best, else by the analytical model."
    ),
    "fits": st.column_config.TextColumn("fits", width=48, help="Whether it fits into memory, or how likely that is."),
    "range": st.column_config.TextColumn("80 % range", width=105),
    "memory": st.column_config.TextColumn("memory", width=75),
    "tokens": st.column_config.TextColumn("tokens/s/GPU", width=95),
    "mfu": st.column_config.TextColumn("MFU", width=55),
    "why": st.column_config.TextColumn("compared with the first, and when it would win", width=420),
    "exposed": st.column_config.TextColumn("exposed comm.", width=105, help="Share of the step."),
    "bubble": st.column_config.TextColumn("bubble", width=65, help="Share of the step."),
    "policy": st.column_config.TextColumn("settings", width=320),
}


def show(question: state.Inputs) -> None:
    result, chosen = data.answer()
    best = result.plans[0].estimate
    st.markdown(f"**{panels.plain(answer_sentence(result.plans[0]))}**")
    if result.may_fit is not None and result.may_fit.faster >= LEAST_GAIN:
        st.markdown(panels.plain(may_fit_sentence(result.may_fit, result.plans[0])))
    if question.objective == "memory":
        _against_the_fastest(question, best)
    _figures(result, data.nearest_published(question))
    table = rows.plan_rows(result)
    best_name = table[0]["plan"]

    def pick(name: str) -> None:
        state.choose_plan(name, best=name == best_name)

    shown = _filtered(table, result)
    name = plan_words.plan_name(chosen.plan)
    _table(shown, table, name)
    left, right = st.columns(2, gap="large")
    with left:
        panels.section(
            "Step time",
            "A mark is the predicted step, its bar the range that holds 80 % of steps. Where bars overlap, plans"
            " may change places. Click a mark to choose its plan.",
        )
        if shown:
            panels.plan_chart(
                charts.ranges(shown, chosen=(name,), dark=panels.dark()),
                key="ranges",
                alt=rows.ranges_finding(shown),
                chosen=(name,),
                on_pick=pick,
            )
    with right:
        panels.section("Time against memory", "One point per set of parallel degrees. The line is the Pareto front.")
        if shown:
            drawn = charts.scatter(shown, limit_gib=best.memory.capacity_bytes / GIB, chosen=name, dark=panels.dark())
            best_of_both = charts.front(shown)
            about = f"Step time against memory: {len(best_of_both)} of {len(shown)} plans are beaten in neither"
            panels.plan_chart(drawn, key="scatter", alt=about, chosen=(name,), on_pick=pick)
    panels.section("Rejected candidates", _left_out(result))
    why = rejected_words(result.rejected)
    most = max(why, key=lambda word: why[word], default="")
    about = f"Rejected candidates by reason; most, {why[most]:,}: {most}" if most else "No candidate was rejected"
    panels.chart(charts.counts(why, dark=panels.dark()), key="rejected", alt=about)
    if result.search.pruned:
        with st.expander("Candidates that were not costed"):
            st.dataframe(
                [{"why": name, "candidates": count} for name, count in result.search.pruned.items()],
                hide_index=True,
                width="stretch",
            )
    panels.assumed(result.assumed)
    rests_on = basis_lines(best, chosen.method, result.question, chosen.plan.gpus)
    st.caption("  \n".join(_basis(line) for line in rests_on))
    st.caption(_about(result))
    panels.terminal(question.command())


def _figures(result: SearchResult, near: panels.Near | None) -> None:
    best, search = result.plans[0].estimate, result.search
    panels.figures(
        [
            *panels.estimate_figures(best, result.plans[0].plan, "Best step"),
            (
                "Legal plans",
                f"{search.legal:,}",
                f"Of {search.candidates:,} candidates; {search.fitting:,} fit into memory.",
                f"{search.fitting:,} fit",
            ),
        ],
        near,
    )


def _against_the_fastest(question: state.Inputs, best: Estimate) -> None:
    fastest = data.fastest(question)
    text = rows.memory_costs_time(best, fastest) if fastest is not None else None
    if text:
        st.warning(panels.plain(text), icon=":material/hourglass_bottom:")


def _basis(line: str) -> str:
    """Return a line of `basis_lines` with its name set off."""
    name, _, text = line.partition(" ")
    return f"**{panels.plain(name)}** · {panels.plain(text.strip())}"


def _about(result: SearchResult) -> str:
    lines = (
        model_line(result.question.model),
        cluster_line(result.question.cluster),
        workload_line(result.question.workload),
        result.question.framework.title,
    )
    return "  \n".join([panels.plain(" · ".join(lines[:2])), panels.plain(" · ".join(lines[2:]))])


def _left_out(result: SearchResult) -> str:
    total = sum(result.rejected.values())
    return (
        f"{total:,} candidates broke a rule or did not fit; the search took {result.search.seconds:.1f} s:"
        f" {result.search.status}."
    )


def _filtered(table: list[PlanRow], result: SearchResult) -> list[PlanRow]:
    """Return the rows that pass the filters."""
    left, middle, right = st.columns([4, 3, 3], vertical_alignment="bottom", gap="medium")
    used = [a for a in (*MESH_AXES, "ep") if any(int(getattr(r.plan, a)) > 1 for r in result.plans)]
    wanted = left.pills(
        "Only plans that use",
        [AXES[a] for a in used],
        selection_mode="multi",
        key="uses",
        bind="query-params",
        wrap=True,
    )
    most_gib = max(result.plans[0].estimate.memory.capacity_bytes / GIB, *(row["peak_gib"] for row in table))
    top = float(ceil(most_gib))  # a plan that may not fit is beyond what there is
    most = middle.slider("At most, GiB", 1.0, top, top, key="most", bind="query-params", format="%.0f")
    front_only = right.toggle("Only the Pareto front", key="front", bind="query-params")
    by_name = {plan_words.plan_name(r.plan): r.plan for r in result.plans}
    kept = [
        row
        for row in table
        if row["peak_gib"] <= most
        and all(int(getattr(by_name[row["plan"]], axis)) > 1 for axis in used if AXES[axis] in (wanted or []))
    ]
    if front_only:
        kept = [row for row in table if row in charts.front(kept)]
    if not kept:
        panels.empty("No listed plan passes the filters", "Remove one of them.", icon=":material/filter_alt_off:")
    return kept


def _table(shown: list[PlanRow], table: list[PlanRow], chosen: str) -> None:
    many = len(shown) != len(table)
    panels.section(
        f"{len(shown)} of {len(table)} plans" if many else f"{len(table)} plans",
        "The best of each set of degrees. Select a row to choose that plan.",
    )

    def pick(picked: list[PlanRow]) -> None:
        if picked:
            state.choose_plan(picked[0]["plan"], best=picked[0]["rank"] == 1)

    panels.plan_table(shown, _COLUMNS, key="plans_table", on_pick=pick, mode="single-row", ticked=(chosen,))
    if any(row["place"] != str(row["rank"]) for row in shown):
        st.caption(f"= {TIED}.")
    st.page_link(
        state.view("detail"),
        label=f"Details of **{panels.plain(plan_words.plan_chips(data.answer()[1].plan))}**",
        icon=":material/troubleshoot:",
        query_params=state.link(),
    )


show(data.question())
