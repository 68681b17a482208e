"""Page: the topology of the machine, and how it compares with its datasheet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from planner.explain.tables import cluster_line
from planner.pictures.node_layout import node_view, pair_rows
from topology import codec
from topology.errors import PlannerError
from topology.rates.reach import plannable
from ui import data, panels, rows
from ui.charts import topology as charts
from ui.question import state

if TYPE_CHECKING:
    from topology.cluster import Cluster


def show(question: state.Inputs) -> None:
    try:
        found = data.cluster(question.cluster, question.gpus, question.gpu)
    except PlannerError as error:
        panels.failure(error)
        _add()
        return
    st.caption(_summary(found))
    _figures(found)
    view = node_view(found, most=SHOWN_GPUS)
    here = len(found.groups[0].node.gpus)
    left, right = st.columns([3, 2], gap="large")
    with left:
        name = "The machine" if found.node_count == 1 else f"One of {found.node_count} nodes"
        some = f"{SHOWN_GPUS} of {here} GPUs, and those with faults. " if here > SHOWN_GPUS else ""
        panels.section(name, f"{some}Thicker lines are faster links. Hover over a part or a line for its rates.")
        panels.chart(
            charts.node(view, dark=panels.dark()),
            key="topology",
            alt=f"Graph of {len(view.parts)} parts and {len(view.cables)} links of {found.name}",
        )
    with right:
        panels.section("GPU to GPU", "Rate of one transfer at a time, by the link class that nvidia-smi prints.")
        panels.chart(
            charts.pairs(pair_rows(found), switched=rows.is_switched(found), dark=panels.dark()),
            key="pairs",
            alt=f"Matrix of link classes between GPUs: {rows.pairs_finding(pair_rows(found))}",
        )
    panels.section(
        "Expected against measured",
        "Rates are per direction, in decimal GB/s. A healthy link copies at about 88 % of nominal.",
    )
    links = panels.in_percent(rows.link_rows(node_view(found)), "share")
    st.dataframe(links, hide_index=True, width="stretch", placeholder="", column_config=_COLUMNS)
    _findings(found)
    _add()


SHOWN_GPUS = 16  # a rack has 72, in equal trays

_COLUMNS = {
    "share": st.column_config.ProgressColumn("measured / nominal", format="%.0f%%", min_value=0, max_value=100),
    "links": st.column_config.NumberColumn("lanes each", help="Bonded links behind one line of the picture."),
}


def _summary(cluster: Cluster) -> str:
    return (
        panels.plain(cluster_line(cluster))
        if plannable(cluster)
        else panels.plain(f"{cluster.name}: GPU model not known")
    )


def _figures(cluster: Cluster) -> None:
    panels.figures(rows.machine_figures(cluster, data.health(cluster, codec.fingerprint(cluster))))


def _findings(cluster: Cluster) -> None:
    items = data.health(cluster, codec.fingerprint(cluster)).items
    panels.section("Findings")
    if not items:
        st.markdown(":green[:material/check_circle:] Nothing is missing, degraded or contradictory in what was read.")
        return
    for item in items[:12]:
        panels.finding(
            str(item.severity), item.what, [("why", item.why), ("so", item.consequence), ("do", item.remedy)]
        )
    if len(items) > 12:
        st.caption(f"and {len(items) - 12} more: planner doctor lists them all")


def _add() -> None:
    panels.section("Add a machine", "The file stays on this computer, and nothing in it is run.")
    label = "The output of nvidia-smi topo -m, an NCCL topology file, or a cluster file"
    panels.file_field(label, "cluster_file", "cluster", ["txt", "xml", "json", "log"])


show(data.question())
