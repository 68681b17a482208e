"""Page: one plan: its memory, its step, the placement of its ranks, a simulated timeline, and what would change the
result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import streamlit as st

from planner.explain.tables import elsewhere_text, flip_at, flip_text, vendor_text
from planner.explain.waterfall import waterfall
from planner.io import plan_words
from planner.io.figures import gib_text, last_digit_s, seconds_text
from planner.pictures.memory import stage_parts
from planner.pictures.node_layout import node_view
from planner.pictures.waterfall import waterfall_rows
from planner.search.finalists import TIE
from simulator.config.plan import PLAN_FIELDS
from topology.errors import PlannerError
from topology.units import GIB
from ui import data, other_machines, panels, rows, saved_plans
from ui.canvas.step import show_step
from ui.changed_rows import saving_rows
from ui.charts import detail as charts
from ui.charts import plans as plan_charts
from ui.charts import topology as topology_charts
from ui.charts.look import words
from ui.charts.topology import AXIS_NAMES, SHOWN_NODES, axes_used, placement_rows
from ui.question import state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from planner.search.result import RankedPlan, SearchResult
    from simulator.config.estimate import Estimate, MemoryEstimate
    from simulator.config.plan import Plan

TABS = ("Memory", "Step", "Placement", "Timeline", "Sensitivity", "Edit")


def show(question: state.Inputs) -> None:
    result, ranked = data.answer()
    st.markdown(
        f"#{ranked.rank} · **{panels.plain(plan_words.plan_chips(ranked.plan))}** ·"
        f" {panels.plain(plan_words.plan_settings(ranked.plan))}"
    )
    panels.figures(panels.estimate_figures(ranked.estimate, ranked.plan), data.nearest_published(question))
    if ranked.lost_because == saved_plans.OWN:
        st.button("Remove it", key="leave_out", on_click=_leave_out, args=(question, ranked.plan))
    for problem in ranked.problems:
        st.markdown(f":orange[{panels.ICONS['warning']}] {panels.plain(problem.message)}")
    tabs = st.tabs(list(TABS), key="tab", bind="query-params", on_change="rerun")
    pages = (_memory, _step, _placement, show_step, _sensitivity, _change)
    for tab, page in zip(tabs, pages, strict=True):
        if tab.open:  # only the open tab is computed
            with tab:
                page(question, result, ranked)


def _memory(question: state.Inputs, result: SearchResult, ranked: RankedPlan) -> None:
    del question
    memory = ranked.estimate.memory
    peak = memory.peak_bytes
    panels.section(
        memory.verdict.capitalize(),
        f"Allocated {gib_text(peak.value)} GiB (80 % range {gib_text(peak.low)} to {gib_text(peak.high)},"
        f" {peak.source}) at the peak of rank {memory.worst_rank};"
        f" the allocator reserves {gib_text(memory.reserved_bytes)} of {gib_text(memory.capacity_bytes)} GiB"
        f"{elsewhere_text(memory)}.",
    )
    drawn = charts.memory(stage_parts(memory), memory.capacity_bytes, dark=panels.dark())
    panels.chart(drawn, key="memory", alt=_memory_finding(memory))
    shown: list[panels.Row] = [
        {"category": words(name), "GiB": nbytes / GIB, "share": nbytes / max(peak.value, 1.0)}
        for name, nbytes in sorted(memory.by_category.items(), key=lambda item: -item[1])
        if nbytes >= 0.005 * GIB
    ]
    st.dataframe(
        panels.in_percent(shown, "share"),
        hide_index=True,
        column_config={
            "GiB": st.column_config.NumberColumn("GiB on the worst rank", format="%.1f"),
            "share": st.column_config.NumberColumn("of its peak, %", format="%.0f"),
        },
    )
    _savings(result, ranked)


def _savings(result: SearchResult, ranked: RankedPlan) -> None:
    """Show the memory freed by changes of one setting."""
    found = saving_rows(data.savings(result, ranked), ranked.estimate)
    panels.section(
        "What frees how much", "One setting changed, on the same GPUs; blue where the step takes no more time."
    )
    if not found:
        st.caption("No setting of this plan frees memory.")
        return
    capacity = ranked.estimate.memory.capacity_bytes / GIB
    about = "; ".join(f"{row['change']} {row['text']}" for row in found)
    panels.chart(charts.savings(found, capacity, dark=panels.dark()), key="savings", alt=about)


def _step(question: state.Inputs, result: SearchResult, ranked: RankedPlan) -> None:
    del question, result
    fall = waterfall(ranked.estimate)
    last_s = last_digit_s(ranked.estimate.step_s)
    panels.section(
        "From the GPU's peak to this step",
        f"The model's FLOPs at {fall.peak_flops / 1e12:.0f} TFLOP/s would take {seconds_text(fall.peak_s, last_s)};"
        " the rest is overhead.",
    )
    drawn = charts.waterfall(waterfall_rows(ranked.estimate), last_s=last_s, dark=panels.dark())
    top = fall.top_loss
    about = (
        f"The step from the GPU's peak, term by term; most is lost to {words(top.name)}:"
        f" {seconds_text(top.seconds, last_s)}"
    )
    panels.chart(drawn, key="waterfall", alt=about)


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
            alt=f"Ranks on nodes and GPUs, coloured by {AXIS_NAMES[str(axis)]}: {_spread(ranks, str(axis))}",
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


def _memory_finding(memory: MemoryEstimate) -> str:
    largest = max(memory.by_category.items(), key=lambda item: item[1], default=("nothing", 0.0))
    return (
        "Memory by category and pipeline stage; the largest on the worst rank:"
        f" {words(largest[0])}, {gib_text(largest[1])} GiB"
    )


def _spread(ranks: Sequence[Mapping[str, Any]], axis: str) -> str:
    """Return the number of nodes over which the ranks of one group of an axis are spread."""
    nodes: dict[int, set[int]] = {}
    for row in ranks:
        nodes.setdefault(row["node"], set()).add(row[axis])
    most = max((len(found) for found in nodes.values()), default=1)
    return "all of it on one coordinate of a node" if most == 1 else f"a node holds {most} of its coordinates"


def _sensitivity(question: state.Inputs, result: SearchResult, ranked: RankedPlan) -> None:
    del question
    best = result.plans[0]
    other = ranked if ranked.rank > 1 else (result.plans[1] if len(result.plans) > 1 else None)
    if ranked.rank > 1:
        panels.section("Why it lost", panels.plain(ranked.lost_because or ""))
        for flip in ranked.flips:
            st.markdown(f":material/swap_vert: {panels.plain(vendor_text(flip_text(flip), result.question.cluster))}")
        if not ranked.flips:
            st.markdown(
                ":material/block: No link rate or memory within a factor of 4 of the present one would make it win."
            )
    else:
        panels.section("This is the best plan", "Another one wins in these cases:")
        flips = rows.merged_flips(result)
        for text, names in flips[:8]:
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            st.markdown(f":material/swap_vert: **{panels.plain(names[0])}**{more}: {panels.plain(text)}")
        if not flips:
            st.markdown(
                ":material/verified: No listed plan wins with link rates within a factor of 4, or with other memory."
            )
    varied = other_machines.knobs(result)
    if not varied:
        panels.empty(
            "No link to vary",
            "This plan runs on GPUs without NVLink or a network between them.",
            icon=":material/link_off:",
        )
        return
    for column, (quantity, now) in zip(st.columns(len(varied), gap="large"), varied, strict=True):
        plans = tuple(r.plan for r in (best, other) if r is not None)
        crossing = next((flip for flip in (other.flips if other else ()) if flip.quantity == quantity), None)
        with column:
            panels.section(
                f"Step time over {quantity}",
                "By the analytical model, put right where both plans were predicted anew. Lines cross at the flip"
                " points above; one that ends may cross further on, where nothing was predicted.",
            )
            drawn = plan_charts.sensitivity(
                other_machines.rate_curves(result, plans, quantity),
                quantity=quantity,
                now=now,
                flip=None if crossing is None else (crossing.at, f"flips at {flip_at(crossing)}"),
                dark=panels.dark(),
            )
            flips_at = f"they change places at {flip_at(crossing)}" if crossing else "they do not change places near it"
            about = f"Step time over {quantity}, {now / 1e9:.3g} GB/s as it is; {flips_at}"
            panels.chart(drawn, key=f"sensitivity_{quantity}", alt=about)


def _change(question: state.Inputs, result: SearchResult, ranked: RankedPlan) -> None:
    plan = ranked.plan
    framework = result.question.framework
    panels.section(
        "Edit the plan",
        "As planner estimate: whether it is legal, and what it costs. Data parallelism takes the remaining GPUs.",
    )
    now, name = rows.degrees_of(plan), plan_words.plan_name(plan)
    places = [column for row in (st.columns(4), st.columns(4)) for column in row]
    degrees = {
        field: int(place.number_input(PLAN_FIELDS[field].title, 1, 4096, value, key=f"x_{field}_{name}"))
        for place, (field, value) in zip(places, now.items(), strict=False)
    }
    modes = list(dict.fromkeys([plan.recompute, *framework.recomputes]))
    recompute = places[len(now)].selectbox("Recompute", modes, key=f"x_recompute_{name}")
    if degrees == now and recompute == plan.recompute:
        st.caption("Change a value to see what it costs compared with this plan.")
        return
    flags = rows.changed_flags(plan, degrees, str(recompute))
    try:
        found = data.what_if(question, flags, framework, gpus=plan.gpus)
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
    st.markdown(
        f"**{panels.plain(plan_words.plan_chips(found.case.plan))}** ·"
        f" {panels.plain(plan_words.plan_settings(found.case.plan))}"
    )
    _difference(ranked.estimate, found.estimate)
    st.button(
        "Keep this plan",
        icon=":material/bookmark_add:",
        key="keep_plan",
        on_click=_keep,
        args=(question, found.case.plan),
        help="It is listed below the answer's plans: simulated, compared, run and exported like them.",
    )


def _keep(question: state.Inputs, plan: Plan) -> None:
    try:
        saved_plans.save(question, plan)
    except (PlannerError, OSError) as error:
        st.toast(panels.plain(error), icon=":material/error:")
        return
    state.choose_plan(plan_words.plan_name(plan), best=False)


def _leave_out(question: state.Inputs, plan: Plan) -> None:
    saved_plans.remove(question, plan)
    state.choose_best()


def _difference(before: Estimate, after: Estimate) -> None:
    """Show the changed plan's figures; a difference smaller than the error of the model has no colour."""
    slower = after.step_s.value / before.step_s.value - 1
    more = after.memory.reserved_bytes - before.memory.reserved_bytes
    hue: Literal["off", "red", "green"] = "off" if abs(slower) < TIE else "red" if slower > 0 else "green"
    held, verdict = rows.memory_figure(after.memory)
    with st.container(horizontal=True, gap="small"):
        step = "about the same" if abs(slower) < TIE else f"{slower:+.0%}"
        st.metric("Changed step", rows.step_figure(after)[0], step, delta_color=hue, delta_arrow="off", border=True)
        mfu = f"{100 * (after.mfu - before.mfu):+.0f} points"
        st.metric("Changed MFU", f"{after.mfu:.0%}", mfu, delta_color=hue, delta_arrow="off", border=True)
        change = f"{'+' if more >= 0 else '-'}{gib_text(abs(more))} GiB, {verdict}"
        st.metric("Changed memory", held, change, delta_color="off", delta_arrow="off", border=True)


show(data.question())
