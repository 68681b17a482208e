"""A simulated step on a page: the timeline with memory and links below it, the critical path, and the loads of
links.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from planner.explain.traffic import NETWORK
from planner.io import plan_words
from planner.io.figures import last_digit_s, seconds_text
from planner.pictures.node_layout import node_view
from planner.pictures.palette import LINKS, SPANS
from simulator.program import trace as tr
from topology.units import GIB, in_gib
from ui import data, panels
from ui.canvas.component import timeline, window_of
from ui.canvas.payload import Shown, Strip, payload
from ui.charts import loads as load_charts
from ui.charts import topology as topology_charts
from ui.charts.timeline import LANES
from ui.question import state

if TYPE_CHECKING:
    from planner.search.result import RankedPlan, SearchResult
    from ui.background.work import SimulatedStep

MANY_RANKS = 8  # with more ranks, only the compute lane of each is shown at first
KEY = "step_timeline"
LEAST_GB_PER_S = 0.01  # smaller loads would not be visible
MOST_GPUS = 16  # most GPUs of a node that is drawn link by link
_PATH_WORDS = {tr.COMPUTE: "compute", tr.COMMUNICATION: "communication", tr.COPY: "copies", tr.HOST: "the host"}


def show_step(question: state.Inputs, result: SearchResult, ranked: RankedPlan) -> None:
    """Show the simulated step of a plan; its progress while it is worked out."""
    found = data.simulated(question, result, ranked)
    if found is None:
        return
    line = found.line
    panels.section(
        "One simulated step",
        f"{len(line):,} spans on {panels.counted(len(line.ranks), 'distinct rank')}, layer by layer:"
        f" {seconds_text(found.step_s, last_digit_s(ranked.estimate.step_s))}{_with_some(found)}."
        " Lighter compute is the forward pass.",
    )
    st.markdown(f"**{panels.plain(waits_for(found))}**")
    _lanes(f"{question.key} {plan_words.plan_name(ranked.plan)}", found, ranked)
    st.download_button(
        "Trace for Perfetto",
        data=found.trace_text,
        file_name=f"{plan_words.plan_name(ranked.plan).replace(' ', '-')}.trace.json",
        mime="application/json",
        icon=":material/download:",
        help="Every span, with messages and memory. Open it at ui.perfetto.dev, which reads it in the browser and does"
        " not upload it.",
        on_click="ignore",
    )
    _links(result, ranked, found)


def _with_some(found: SimulatedStep) -> str:
    drawn, every = found.micro_batches
    return f" with {drawn} of its {every} micro batches, after which it repeats itself" if drawn < every else ""


def waits_for(found: SimulatedStep) -> str:
    """Return what the critical path of a step consists of, as a sentence."""
    shares = {
        _PATH_WORDS[name]: part / found.step_s for name, part in found.path_s.items() if name in _PATH_WORDS and part
    }
    parts = [
        f"{word} {load_charts.percent(share)}" for word, share in sorted(shares.items(), key=lambda item: -item[1])
    ]
    return f"The step waits for: {', '.join(parts)}." if parts else "Nothing was simulated."


@st.fragment
def _lanes(key: str, found: SimulatedStep, ranked: RankedPlan) -> None:
    line = found.line
    many = len(line.ranks) > MANY_RANKS
    left, right = st.columns([3, 2], vertical_alignment="bottom")
    lanes = left.segmented_control(
        "Lanes",
        LANES,
        default=["compute"] if many else ["compute", "communication"],
        selection_mode="multi",
        key="lanes",
        bind="query-params",
    )
    path = right.toggle("Critical path", value=True, key="path", help="What the step waits for, span by span.")
    if not lanes:
        panels.empty("Nothing is selected", "Choose at least one lane.", icon=":material/timeline:")
        return
    drawn = payload(
        line,
        Shown(lanes=tuple(lane for lane in LANES if lane in lanes), ranks=line.ranks, path=found.path if path else ()),
        strips(found, ranked.estimate.memory.capacity_bytes),
        window=window_of(KEY, line.length_s),
        about=f"Timeline of a simulated step of {found.step_s:.3g} s. {waits_for(found)}",
        key=key,
        dark=panels.dark(),
    )
    timeline(drawn, key=KEY)
    if drawn["partial"]:
        st.caption("Very short spans are merged into bars; narrow the window to see them one by one.")


def strips(found: SimulatedStep, capacity: float) -> list[Strip]:
    """Return memory and link use over the step. Rates are of one direction."""
    shown = []
    if found.memory:
        shown.append(
            Strip(
                label=f"memory, rank {found.memory_rank}",
                about=f"of {in_gib(capacity, 0)}",
                unit="GiB",
                samples=[(time, nbytes / GIB) for time, nbytes in found.memory],
                colour=SPANS["compute"],
                limit=capacity / GIB,
                highest=True,
            )
        )
    for name, samples in found.links.items():
        rates = [(time, rate / 1e9) for time, rate in samples]
        if max(rate for _, rate in rates) < LEAST_GB_PER_S:
            continue
        shown.append(
            Strip(
                label=name,
                about=f"peak {max(rate for _, rate in rates):.3g} GB/s",
                unit="GB/s",
                samples=rates,
                colour=LINKS["network" if name.startswith("network") else "nvswitch"],
            )
        )
    return shown


def _links(result: SearchResult, ranked: RankedPlan, found: SimulatedStep) -> None:
    if found.traffic is None or not found.traffic.links:
        return
    cluster = result.question.cluster
    sent = load_charts.loads(found.traffic, ranked.plan, step_s=found.step_s, gpus_per_node=cluster.gpus_per_node)
    busiest = max(found.traffic.links, key=lambda link: link.busy_share)
    names = {"nvlink": "NVLink", "pcie": "PCIe", "network": "network"}
    finding = (
        f"The busiest is the {names[busiest.link]}: {load_charts.percent(busiest.busy_share)} of the step at its rate."
    )
    panels.section("Links over the step", f"{finding} Bytes sent, over what the link carries in the step.")
    nodes = load_charts.node_loads(sent)
    several = nodes[-1].last > 0
    left, right = st.columns([3, 2], gap="large") if several else (st.container(), None)
    view = node_view(cluster, most=MOST_GPUS)
    with left:
        shares = load_charts.cable_shares(view, sent)
        top = max(shares.values(), default=0.0)
        panels.chart(
            topology_charts.node(view, dark=panels.dark(), shares=shares),
            key="loads",
            alt=f"Links of the first node by their mean load; the busiest carries {load_charts.percent(top)} of what"
            " it can",
        )
    if right is not None:
        with right:
            more = (
                f" The first {load_charts.MOST_NODES} kinds are drawn." if len(nodes) > load_charts.MOST_NODES else ""
            )
            st.caption(f"{panels.counted(nodes[-1].last + 1, 'node')}; nodes that carry the same are one row.{more}")
            top = max(node.network for node in nodes)
            used = sum(link.total_bytes for link in found.traffic.links if link.link == NETWORK)
            panels.chart(
                load_charts.fabric(nodes, dark=panels.dark()),
                key="fabric",
                alt=f"Nodes and the network between them, which carries {used / 1e9:,.0f} GB a step;"
                f" the busiest node uses {load_charts.percent(top)} of its NICs",
            )
