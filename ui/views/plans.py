"""Page: the best plans, and why the others lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from planner.explain.tables import basis_lines, cluster_line, model_line, workload_line
from simulator.config.plan import MESH_AXES
from ui import data, panels, rows, state
from ui.charts import plans as charts
from ui.charts.look import GIB

if TYPE_CHECKING:
    from planner.search.result import SearchResult

AXES = {
    "dp_replicate": "replicas",
    "dp_shard": "FSDP",
    "cp": "context",
    "tp": "tensor",
    "pp": "pipeline",
    "ep": "expert",
}


def show(question: state.Inputs) -> None:
    result, chosen = data.answer()
    search = result.search
    best = result.plans[0].estimate
    st.caption(_about(result))
    source = "datasheet" if best.step_s.source in {"datasheet", "assumed"} else str(best.step_s.source)
    panels.figures(
        [
            (
                "Best step",
                f"{rows.digits(best.step_s.value)} s",
                f"80 % of steps are expected within {rows.digits(best.step_s.low)} to {rows.digits(best.step_s.high)} s ({source}).",
            ),
            ("Tokens/s per GPU", f"{best.tokens_per_s_per_gpu:,.0f}", f"{source} numbers"),
            ("MFU", f"{best.mfu:.1%}", f"Model FLOPs against the dense peak of {best.peak_flops / 1e12:.0f} TFLOP/s."),
            (
                "Memory",
                f"{best.memory.reserved_bytes / GIB:.1f} GiB",
                f"What the allocator reserves on the worst rank, of {best.memory.capacity_bytes / GIB:.1f} GiB: {best.memory.verdict}.",
            ),
            (
                "Legal plans",
                f"{search.legal:,}",
                f"Of {search.candidates:,} candidates; {search.fitting:,} fit into memory.",
            ),
        ]
    )
    table = rows.plan_rows(result)
    shown = _filtered(table, result)
    left, right = st.columns([3, 2], gap="large")
    with left:
        panels.section("Time against memory", "One point per set of parallel degrees. The line is the Pareto front.")
        if shown:
            drawn = charts.scatter(
                shown,
                limit_gib=best.memory.capacity_bytes / GIB,
                chosen=state.plan_name(chosen.plan),
                dark=panels.dark(),
            )
            panels.chart(drawn, key="scatter", alt=f"Step time against memory of {len(shown)} plans")
    with right:
        panels.section("Rejected candidates", _left_out(result))
        panels.chart(
            charts.counts(result.rejected, dark=panels.dark()), key="rejected", alt="Rejected candidates by rule"
        )
        if result.search.pruned:
            with st.expander("Bounds of the search"):
                st.dataframe(
                    [{"bound": name, "left out": count} for name, count in result.search.pruned.items()],
                    hide_index=True,
                    width="stretch",
                )
    _table(shown, table)
    panels.assumed(result.assumed)
    st.caption("  \n".join(panels.plain(line) for line in basis_lines(best, chosen.method)))
    with st.expander("The same question in a terminal", icon=":material/terminal:"):
        st.code(question.command(), language="bash", wrap_lines=True)


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
    return f"{total:,} candidates broke a rule or did not fit; the search took {result.search.seconds:.1f} s, {result.search.status}."


def _filtered(table: list[dict[str, Any]], result: SearchResult) -> list[dict[str, Any]]:
    """Return the rows that pass the filters."""
    left, middle, right = st.columns([4, 3, 2], vertical_alignment="bottom", gap="large")
    used = [a for a in (*MESH_AXES, "ep") if any(int(getattr(r.plan, a)) > 1 for r in result.plans)]
    wanted = left.pills(
        "Only plans that use", [AXES[a] for a in used], selection_mode="multi", key="uses", bind="query-params"
    )
    top = float(round(result.plans[0].estimate.memory.capacity_bytes / GIB) + 1)
    most = middle.slider("At most, GiB", 1.0, top, top, key="most", bind="query-params")
    front_only = right.toggle("Only the Pareto front", key="front", bind="query-params")
    by_name = {state.plan_name(r.plan): r.plan for r in result.plans}
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


def _table(shown: list[dict[str, Any]], table: list[dict[str, Any]]) -> None:
    panels.section(
        f"{len(shown)} of {len(table)} listed plans",
        "The best of each set of degrees. Sort by a heading; select a row to choose that plan.",
    )

    def pick() -> None:
        selected = st.session_state["plans_table"]["selection"]["rows"]
        if selected:
            row = shown[selected[0]]
            state.choose_plan(row["plan"], best=row["rank"] == 1)

    st.dataframe(
        panels.in_percent(shown, "mfu", "exposed", "bubble"),
        key="plans_table",
        placeholder="-",
        hide_index=True,
        on_select=pick,
        selection_mode="single-row",
        width="stretch",
        column_order=(
            "rank",
            "plan",
            "step_s",
            "range",
            "tokens",
            "mfu",
            "peak_gib",
            "why",
            "exposed",
            "bubble",
            "gpus",
            "policy",
        ),
        column_config={
            "rank": st.column_config.NumberColumn("#", width=40),
            "plan": st.column_config.TextColumn("plan", width=235),
            "step_s": st.column_config.NumberColumn(
                "step, s", help="Simulated, where the program of a step is short enough.", format="%.3f", width=70
            ),
            "range": st.column_config.TextColumn("80 % range, s", width=105),
            "tokens": st.column_config.NumberColumn("tokens/s/GPU", format="localized", width=95),
            "mfu": st.column_config.NumberColumn("MFU, %", format="%.1f", width=65),
            "peak_gib": st.column_config.NumberColumn("GiB", format="%.1f", width=65),
            "exposed": st.column_config.NumberColumn("exposed comm, %", format="%.1f", width=125),
            "bubble": st.column_config.NumberColumn("bubble, %", format="%.1f", width=80),
            "why": st.column_config.TextColumn("why it lost, and when it would win", width=420),
            "gpus": st.column_config.TextColumn("GPUs", width=280),
            "policy": st.column_config.TextColumn("policy", width=320),
        },
    )
    chosen = data.answer()[1]
    st.page_link(
        state.view("detail"),
        label=f"Details of **{panels.plain(state.plan_name(chosen.plan))}**",
        icon=":material/troubleshoot:",
        query_params=state.link(),
    )


show(data.question())
