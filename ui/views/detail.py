"""Page: one plan: its memory, its step, the placement of its ranks, a simulated timeline, and what would change the
result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from planner.explain.tables import degrees_text, flip_text, policy_text
from planner.explain.waterfall import waterfall
from planner.pictures.memory import stage_parts
from planner.pictures.node_layout import node_view
from planner.pictures.waterfall import waterfall_rows
from topology.errors import PlannerError
from ui import data, panels, rows, state
from ui.charts import detail as charts
from ui.charts import plans as plan_charts
from ui.charts import topology as topology_charts
from ui.charts.look import GIB, seconds, words
from ui.charts.placement_layout import SHOWN_NODES, axes_used, placement_rows
from ui.charts.timeline import LANES, bars

if TYPE_CHECKING:
    from planner.search.result import RankedPlan, SearchResult
    from simulator.config.estimate import Estimate
    from ui.work import SimulatedStep

AXIS_NAMES = {
    "pp": "pipeline stage",
    "dp_replicate": "replica",
    "dp_shard": "FSDP shard",
    "cp": "context",
    "tp": "tensor",
}
TABS = ("Memory", "Step", "Placement", "Timeline", "Sensitivity", "Edit")
MANY_RANKS = 8  # with more, only the compute lane of each is shown at first


def show(question: state.Inputs) -> None:
    result, ranked = data.answer()
    st.caption(f"#{ranked.rank} · {panels.plain(degrees_text(ranked.plan))} · {panels.plain(policy_text(ranked.plan))}")
    _figures(ranked.estimate)
    for problem in ranked.problems:
        st.markdown(f":orange[{panels.ICONS['warning']}] {panels.plain(problem.message)}")
    tabs = st.tabs(list(TABS), key="tab", bind="query-params", on_change="rerun")
    pages = (_memory, _step, _placement, _timeline, _sensitivity, _change)
    for tab, page in zip(tabs, pages, strict=True):
        if tab.open:  # only the open tab is computed
            with tab:
                page(question, result, ranked)


def _figures(estimate: Estimate) -> None:
    step, memory = estimate.step_s, estimate.memory
    panels.figures(
        [
            (
                "Step",
                seconds(step.value),
                f"One optimizer step; {step.source} numbers.",
            ),
            ("Tokens/s per GPU", f"{estimate.tokens_per_s_per_gpu:,.0f}", f"{step.source} numbers"),
            ("MFU", f"{estimate.mfu:.1%}", f"Against {estimate.peak_flops / 1e12:.0f} TFLOP/s dense."),
            (
                "Memory",
                f"{memory.reserved_bytes / GIB:.1f} GiB",
                f"Of {memory.capacity_bytes / GIB:.1f} GiB: {memory.verdict}.",
            ),
            (
                "80 % range",
                f"{step.low:.3g} to {step.high:.3g} s",
                f"Where 80 % of steps are expected; {step.source} numbers.",
            ),
        ]
    )


def _memory(question: state.Inputs, result: SearchResult, ranked: RankedPlan) -> None:
    del question, result
    memory = ranked.estimate.memory
    peak = memory.peak_bytes
    panels.section(
        memory.verdict.capitalize(),
        f"Allocated {peak.value / GIB:.1f} GiB (80 % range {peak.low / GIB:.1f} to {peak.high / GIB:.1f}, {peak.source}) at the"
        f" peak of rank {memory.worst_rank}; the allocator reserves {memory.reserved_bytes / GIB:.1f} GiB.",
    )
    drawn = charts.memory(stage_parts(memory), memory.capacity_bytes, dark=panels.dark())
    panels.chart(drawn, key="memory", alt="Memory by category and pipeline stage")
    shown = [
        {"category": words(name), "GiB": nbytes / GIB, "share": nbytes / max(peak.value, 1.0)}
        for name, nbytes in sorted(memory.by_category.items(), key=lambda item: -item[1])
        if nbytes >= 0.005 * GIB
    ]
    st.dataframe(
        panels.in_percent(shown, "share"),
        hide_index=True,
        column_config={
            "GiB": st.column_config.NumberColumn("GiB on the worst rank", format="%.2f"),
            "share": st.column_config.NumberColumn("of its peak, %", format="%.1f"),
        },
    )


def _step(question: state.Inputs, result: SearchResult, ranked: RankedPlan) -> None:
    del question, result
    fall = waterfall(ranked.estimate)
    panels.section(
        "From the GPU's peak to this step",
        f"The model's FLOPs at {fall.peak_flops / 1e12:.0f} TFLOP/s would take {seconds(fall.peak_s)}; the rest is overhead.",
    )
    drawn = charts.waterfall(waterfall_rows(ranked.estimate), dark=panels.dark())
    panels.chart(drawn, key="waterfall", alt="Step time from the GPU's peak, term by term")


def _placement(question: state.Inputs, result: SearchResult, ranked: RankedPlan) -> None:
    del question
    plan = ranked.plan
    used = axes_used(plan)
    if not used:
        panels.empty("One GPU", "There is nothing to place.", icon=":material/crop_square:")
        return
    axis = st.segmented_control(
        "Coloured by",
        used,
        default=used[-1],
        key="axis",
        bind="query-params",
        required=True,
        format_func=AXIS_NAMES.__getitem__,
    )
    ranks = placement_rows(plan, result.question.cluster.gpus_per_node)
    left, right = st.columns([2, 3], gap="large")
    with left:
        nodes = -(-plan.gpus // result.question.cluster.gpus_per_node)
        more = f"The first {SHOWN_NODES} of {nodes} nodes. " if nodes > SHOWN_NODES else ""
        panels.section(
            "Ranks on nodes",
            f"{more}The number is the {AXIS_NAMES[str(axis)]} coordinate. Hover over a cell for its rank.",
        )
        panels.chart(
            topology_charts.placement(ranks, str(axis), dark=panels.dark()),
            key="placement",
            alt="Ranks on nodes and GPUs",
        )
    with right:
        panels.section("On the links of the first node", "Each GPU is labelled with its rank.")
        here = {row["gpu"]: (str(row["rank"]), row[str(axis)]) for row in ranks if row["node"] == 0}
        view = node_view(result.question.cluster, most=16)
        by_index = {
            gpu.index: here[i] for i, gpu in enumerate(result.question.cluster.groups[0].node.gpus) if i in here
        }
        panels.chart(
            topology_charts.node(view, dark=panels.dark(), ranks=by_index),
            key="wires",
            alt="Ranks on the node's topology",
        )


def _timeline(question: state.Inputs, result: SearchResult, ranked: RankedPlan) -> None:
    found = data.simulated(question, result, ranked)
    if found is None:
        return
    line = found.line
    ranks = line.ranks
    panels.section(
        "One simulated step",
        f"{len(line):,} spans on {len(ranks)} distinct ranks, {found.detail} by {found.detail}; {seconds(found.step_s)} simulated,"
        f" {seconds(ranked.estimate.step_s.value)} with what a full allocator costs. Lighter compute is the forward pass.",
    )
    left, right = st.columns([3, 2], gap="large")
    many = len(ranks) > MANY_RANKS
    lanes = right.segmented_control(
        "Lanes",
        LANES,
        default=["compute"] if many else ["compute", "communication"],
        selection_mode="multi",
        key="lanes",
        bind="query-params",
    )
    unit, size = ("ms", 1e-3) if line.length_s < 2 else ("s", 1.0)
    end = line.length_s / size
    window = left.slider(f"Window, {unit}", 0.0, end, (0.0, end), key="window", bind="query-params", format="%.2f")
    begin, finish = (value * size for value in window)
    if not lanes or finish <= begin:
        panels.empty(
            "Nothing is selected",
            "Choose at least one lane, and a window longer than zero.",
            icon=":material/timeline:",
        )
        return
    drawn = bars(line, window=(begin, finish), lanes=set(lanes), ranks=set(ranks))
    panels.chart(
        charts.timeline(drawn, window=(begin, finish), dark=panels.dark()),
        key="timeline",
        alt=f"{len(drawn)} bars for the streams of {len(ranks)} ranks",
    )
    merged = sum(bar.spans for bar in drawn if bar.spans > 1)
    if merged:
        st.caption(f"{merged:,} very short spans are merged into bars; narrow the window to see them one by one.")
    _memory_over_time(found, ranked.estimate.memory.capacity_bytes)
    st.download_button(
        "Trace for Perfetto",
        data=found.trace_text,
        file_name=f"{state.plan_name(ranked.plan).replace(' ', '-')}.trace.json",
        mime="application/json",
        icon=":material/download:",
        help="Every span, with messages and memory. Open it at ui.perfetto.dev, which reads it in the browser and does not upload it.",
        on_click="ignore",
    )


def _memory_over_time(found: SimulatedStep, capacity: float) -> None:
    if not found.memory:
        return
    panels.section("Memory over the step", f"Allocated on rank {found.memory_rank}; the dashed line is the capacity.")
    drawn = charts.memory_over_time(found.memory, capacity, dark=panels.dark())
    panels.chart(drawn, key="memory_time", alt="Allocated memory over the step")


def _sensitivity(question: state.Inputs, result: SearchResult, ranked: RankedPlan) -> None:
    del question
    best = result.plans[0]
    other = ranked if ranked.rank > 1 else (result.plans[1] if len(result.plans) > 1 else None)
    if ranked.rank > 1:
        panels.section("Why it lost", panels.plain(ranked.lost_because or ""))
        for flip in ranked.flips:
            st.markdown(f":material/swap_vert: {panels.plain(flip_text(flip))}")
        if not ranked.flips:
            st.markdown(
                ":material/block: No link rate or memory within a factor of 16 of the present one would make it win."
            )
    else:
        panels.section("This is the best plan", "Another one wins in these cases:")
        flips = rows.merged_flips(result)
        for text, names in flips[:8]:
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            st.markdown(f":material/swap_vert: **{panels.plain(names[0])}**{more}: {panels.plain(text)}")
        if not flips:
            st.markdown(
                ":material/verified: No listed plan wins with link rates within a factor of 16, or with other memory."
            )
    varied = data.knobs(result)
    if not varied:
        panels.empty(
            "No link to vary",
            "This plan runs on GPUs without NVLink or a network between them.",
            icon=":material/link_off:",
        )
        return
    for column, (quantity, now) in zip(st.columns(len(varied), gap="large"), varied, strict=True):
        plans = tuple(r.plan for r in (best, other) if r is not None)
        at = next((flip.at for flip in (other.flips if other else ()) if flip.quantity == quantity), None)
        with column:
            panels.section(f"Step time over {quantity}")
            drawn = plan_charts.sensitivity(
                data.rate_curves(result, plans, quantity), quantity=quantity, now=now, flip=at, dark=panels.dark()
            )
            panels.chart(drawn, key=f"sensitivity_{quantity}", alt=f"Step time over {quantity}")


def _change(question: state.Inputs, result: SearchResult, ranked: RankedPlan) -> None:
    plan = ranked.plan
    framework = result.question.framework
    panels.section(
        "Edit the plan",
        "As planner estimate: whether it is legal, and what it costs. Data parallelism takes the remaining GPUs.",
    )
    columns = st.columns(5)

    def degree(column: Any, label: str, name: str) -> int:
        return int(
            column.number_input(label, 1, 4096, int(getattr(plan, name)), key=f"x_{name}_{state.plan_name(plan)}")
        )

    degrees = {
        "tp": degree(columns[0], "Tensor", "tp"),
        "pp": degree(columns[1], "Pipeline", "pp"),
        "cp": degree(columns[2], "Context", "cp"),
        "ep": degree(columns[3], "Expert", "ep"),
        "micro_batch_size": degree(columns[4], "Micro batch", "micro_batch_size"),
    }
    modes = list(dict.fromkeys([plan.recompute, *framework.recomputes]))
    left, middle, right = st.columns(3)
    recompute = left.selectbox("Recompute", modes, key=f"x_recompute_{state.plan_name(plan)}")
    degrees["virtual_stages"] = degree(middle, "Stages per rank", "virtual_stages")
    if plan.zero_stage is None:
        degrees["dp_replicate"] = degree(right, "Replicas", "dp_replicate")
    flags = rows.changed_flags(plan, degrees, str(recompute))
    try:
        found = data.what_if(question, flags, gpus=plan.gpus, like=plan)
    except PlannerError as error:
        panels.failure(error)
        return
    for problem in found.problems:
        panels.finding(
            {"illegal": "error", "legal-but-slow": "warning"}.get(str(problem.grade), "info"),
            problem.message,
            [("nearest", ", ".join(map(str, problem.nearest)))],
        )
    if found.estimate is None:
        st.caption("Not legal: nothing to estimate.")
        return
    st.markdown(f"**{panels.plain(degrees_text(found.case.plan))}** · {panels.plain(policy_text(found.case.plan))}")
    _difference(ranked.estimate, found.estimate)


def _difference(before: Estimate, after: Estimate) -> None:
    cells = st.columns(4)
    step, memory = after.step_s, after.memory
    cells[0].metric(
        "Step", seconds(step.value), f"{step.value / before.step_s.value - 1:+.1%}", delta_color="inverse", border=True
    )
    cells[1].metric(
        "Tokens/s per GPU",
        f"{after.tokens_per_s_per_gpu:,.0f}",
        f"{after.tokens_per_s_per_gpu / before.tokens_per_s_per_gpu - 1:+.1%}",
        border=True,
    )
    cells[2].metric("MFU", f"{after.mfu:.1%}", f"{100 * (after.mfu - before.mfu):+.1f} points", border=True)
    cells[3].metric(
        "Memory",
        f"{memory.reserved_bytes / GIB:.1f} GiB",
        f"{(memory.reserved_bytes - before.memory.reserved_bytes) / GIB:+.1f} GiB, {memory.verdict}",
        delta_color="inverse",
        border=True,
    )


show(data.question())
