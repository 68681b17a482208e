"""Loads of the machine's links over a step: on one node link by link, and on several nodes as a fabric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import altair as alt

from planner.explain.traffic import NETWORK, NVLINK, PCIE, Traffic
from planner.pictures.node_layout import Cable, NodeView
from planner.pictures.palette import BLUE, GREY, ORANGE, SKY, VERMILION
from simulator.config.plan import Plan
from ui.charts.look import Figure, finished, paper, table, tips

# Mean loads over the step from which each colour is used.
LEVELS = (
    (0.0, "under 1 %", GREY),
    (0.01, "1 to 10 %", SKY),
    (0.1, "10 to 30 %", BLUE),
    (0.3, "30 to 60 %", ORANGE),
    (0.6, "over 60 %", VERMILION),
)
UNKNOWN = "not counted"
MOST_NODES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Bytes that every GPU sends in a step by kind of link (`planner.explain.traffic`), in the order of GPUs."""

    sent_bytes: tuple[Mapping[str, float], ...]
    step_s: float
    gpus_per_node: int
    rates: Mapping[str, float]  # bytes/s of a GPU's links of a kind, in one direction

    def share(self, gpu: int, link: str) -> float:
        """Return the mean load over the step of a GPU's links of a kind."""
        rate = self.rates.get(link, 0.0)
        return self.sent_bytes[gpu].get(link, 0.0) / self.step_s / rate if rate else 0.0


def loads(traffic: Traffic, plan: Plan, *, step_s: float, gpus_per_node: int) -> Loads:
    """Return the loads of all GPUs that the plan uses."""
    sent: list[Mapping[str, float]] = [{}] * (max(plan.placement, default=plan.gpus - 1) + 1)
    for one in traffic.by_rank:
        for rank in one.ranks:
            sent[plan.placement[rank] if plan.placement else rank] = one.sent_bytes
    rates = {link.link: link.bytes_per_s for link in traffic.links}
    return Loads(sent_bytes=tuple(sent), step_s=step_s, gpus_per_node=gpus_per_node, rates=rates)


def level(share: float) -> tuple[str, str]:
    """Return the words and the colour of a load."""
    return next((words, colour) for least, words, colour in reversed(LEVELS) if share >= least)


def percent(share: float) -> str:
    """Return a share in words; only exact ones are called all or nothing."""
    if 0 < share < 0.01:
        return "under 1 %"
    return "over 99 %" if 0.99 < share < 1 else f"{100 * share:.0f} %"


def cable_shares(view: NodeView, found: Loads) -> dict[int, float]:
    """Return the mean load of the links of the first node, by the cable's id, as far as the traffic says it.

    A GPU's NVLink traffic spreads evenly over its NVLinks. What it sends into the network crosses its PCIe link and the
    node's NICs, evenly. What crosses CPUs is not counted.
    """
    gpus = {
        part.id.rpartition(".")[2]: part.index
        for part in view.parts
        if part.kind == "gpu" and 0 <= part.index < len(found.sent_bytes)
    }
    nics = {part.id.rpartition(".")[2] for part in view.parts if part.kind == "nic"}
    here = range(min(found.gpus_per_node, len(found.sent_bytes)))
    outgoing = sum(found.sent_bytes[gpu].get(NETWORK, 0.0) for gpu in here)
    nic_rate = sum(cable.planned for cable in view.cables if cable.a in nics or cable.b in nics)
    shares = {}
    for cable in view.cables:
        own = [gpus[end] for end in (cable.a, cable.b) if end in gpus]
        if own and cable.kind in {"nvswitch", "nvlink"}:
            shares[cable.id] = sum(found.share(gpu, NVLINK) for gpu in own) / len(own)
        elif own and cable.kind == "pcie" and cable.planned:
            sent = found.sent_bytes[own[0]]
            shares[cable.id] = (sent.get(PCIE, 0.0) + sent.get(NETWORK, 0.0)) / found.step_s / cable.planned
        elif _is_nic(cable, nics) and nic_rate:
            shares[cable.id] = outgoing / found.step_s / nic_rate
    return shares


def _is_nic(cable: Cable, nics: set[str]) -> bool:
    return cable.a in nics or cable.b in nics


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """Equal loads of nodes `first` to `last`: of each GPU's links inside the node, and of the network."""

    first: int
    last: int
    inside: tuple[float, ...]
    network: float

    @property
    def name(self) -> str:
        if self.first == self.last:
            return f"node {self.first}"
        return f"nodes {self.first} to {self.last}"


def node_loads(found: Loads) -> list[NodeLoad]:
    """Return the loads of all nodes, neighbours with the same loads (to 1 %) together."""
    per = found.gpus_per_node
    nodes = []
    for first in range(0, len(found.sent_bytes), per):
        gpus = range(first, min(first + per, len(found.sent_bytes)))
        inside = tuple(round(max(found.share(gpu, NVLINK), found.share(gpu, PCIE)), 2) for gpu in gpus)
        network = round(sum(found.share(gpu, NETWORK) for gpu in gpus) / len(gpus), 4)
        number = first // per
        nodes.append(NodeLoad(first=number, last=number, inside=inside, network=network))
    alike = (list(group) for _, group in groupby(nodes, key=lambda node: (node.inside, round(node.network, 2))))
    return [replace(group[0], last=group[-1].last) for group in alike]


def fabric(nodes: Sequence[NodeLoad], *, dark: bool) -> Figure:
    """Draw nodes in rows, each with its GPUs, joined to the network at the right."""
    p = paper(dark)
    shown = nodes[:MOST_NODES]
    wide = max(len(node.inside) for node in shown)
    order = [node.name for node in shown]
    y = alt.Y("node:N", sort=order, title=None, axis=alt.Axis(domain=False, ticks=False, grid=False, labelLimit=140))
    edge = 1.35 * wide + 1
    scale = alt.Scale(domain=[-0.6, edge + 0.6], nice=False)
    gpus = [
        {"node": node.name, "x": gpu, "load": percent(share), "what": f"GPU {gpu}", "level": level(share)[0]}
        for node in shown
        for gpu, share in enumerate(node.inside)
    ]
    cables = [
        {
            "node": node.name,
            "from": wide - 0.4,
            "to": edge,
            "end": edge + 0.25,
            "middle": (wide + edge) / 2,
            "load": percent(node.network),
            "level": level(node.network)[0],
            "what": "into the network",
            "size": 2 + 10 * min(1.0, node.network),
        }
        for node in shown
    ]
    seen = {str(row["level"]) for row in (*gpus, *cables)}
    used = [(words, colour) for _, words, colour in LEVELS if words in seen]
    colours = alt.Color(
        "level:N",
        title="mean load of the step",
        scale=alt.Scale(domain=[words for words, _ in used], range=[colour for _, colour in used]),
    )
    tooltip = tips({"node": "", "what": "", "load": "mean load"})
    base = alt.Chart(table(gpus)).encode(x=alt.X("x:Q", axis=None, scale=scale), y=y)
    # As large as the distance between two GPUs allows, and at most the height of the row.
    size = alt.ExprRef(f"pow(min(20, 0.86 * width / {edge + 1.2}), 2)")
    squares = base.mark_point(shape="square", filled=True, opacity=1, size=size).encode(color=colours, tooltip=tooltip)
    links = alt.Chart(table(cables)).encode(y=y, tooltip=tooltip)
    lines = links.mark_rule().encode(
        x=alt.X("from:Q", scale=scale, axis=None), x2=alt.X2("to:Q"), color=colours, size=alt.Size("size:Q", scale=None)
    )
    words = links.mark_text(dy=-9, fontSize=11, color=p.ink).encode(
        x=alt.X("middle:Q", scale=scale, axis=None), text=alt.Text("load:N")
    )
    hub = links.mark_bar(color=p.quiet, height=alt.RelativeBandSize(1)).encode(
        x=alt.X("to:Q", scale=scale, axis=None), x2=alt.X2("end:Q")
    )
    return finished(alt.layer(lines, hub, squares, words), dark, height=alt.Step(34))
