"""A node as a graph: CPUs above, PCIe below them, GPUs and network ports, NVLink under the GPUs.

Colour is what a link is made of, width its rate; a dashed line in the colour of faults is degraded, absent or unknown.
The rates stand in the legend, per direction and with their source, since a line can say only which class it is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import log2

from planner.palette import BAD, LINKS, SEVERITIES, colour
from planner.pictures.svg import MARGIN, Picture, shortened
from topology.cluster import Cluster, Link, LinkKind, LinkState, Node, Source, VertexKind
from topology.node_rates import link_rates

NARROWEST = 960.0
SLOT, SLOT_MANY = 74.0, 44.0
MANY = 24
MOST_LEAVES = 32
PARALLEL = 7.0
BOX = 30.0
TOP = 90.0
RISE = 74.0
MOST_FINDINGS = 8
ROWS = (VertexKind.CPU, VertexKind.ROOT_PORT, VertexKind.PCIE_SWITCH)
UPWARDS = frozenset({LinkKind.PCIE, LinkKind.C2C, LinkKind.SMP})
KIND_WORDS = {
    LinkKind.NVSWITCH: "NVLink to the switch",
    LinkKind.NVLINK: "NVLink between GPUs",
    LinkKind.C2C: "NVLink-C2C",
    LinkKind.PCIE: "PCIe",
    LinkKind.SMP: "between sockets",
    LinkKind.NETWORK: "network",
}


@dataclass(slots=True, kw_only=True)
class _Layout:
    """Centres of vertices by id, and the size of the whole."""

    at: dict[str, tuple[float, float]] = field(default_factory=dict)
    width: float = NARROWEST
    bottom: float = TOP
    slot: float = SLOT


def topology(cluster: Cluster) -> str:
    """Return the SVG of a cluster's first node, with the rates of its links and what is wrong with it."""
    whole = cluster.groups[0].node
    node = _shown(whole)
    layout = _place(node)
    classes = _classes(cluster, node)
    findings = cluster.findings[:MOST_FINDINGS]
    height = layout.bottom + 40 + 22 * (len(classes) + len(findings) + 1) + MARGIN
    alike = f"1 of {cluster.node_count} nodes" if cluster.node_count > 1 else "1 node"
    if node != whole:
        trays = sorted({gpu.tray for gpu in node.gpus})
        alike += f", trays {', '.join(map(str, trays))} of {len({gpu.tray for gpu in whole.gpus})}"
    about = f"{alike}, {len(node.gpus)} GPUs, {len(node.nics)} network ports; rates are per direction"
    picture = Picture(layout.width, height, cluster.name, about)
    picture.write(MARGIN, MARGIN + 30, about, kind="quiet")
    seen: Counter[frozenset[str]] = Counter()
    twice = Counter(frozenset((link.a, link.b)) for link in node.links)
    for link in node.links:
        ends = frozenset((link.a, link.b))
        _draw_link(picture, layout, cluster, node, link, PARALLEL * (seen[ends] - (twice[ends] - 1) / 2))
        seen[ends] += 1
    _draw_vertices(picture, layout, node)
    words = KIND_WORDS
    if not any(cluster.kind(gpu.kind).compute_capability for gpu in node.gpus):
        words = words | {LinkKind.NVLINK: "direct links between GPUs"}  # AMD's, which are no NVLinks
    y = layout.bottom + 48
    for (kind, text, bad), count in classes.items():
        picture.line([(MARGIN, y - 4), (MARGIN + 26, y - 4)], BAD if bad else LINKS[kind], 4.0, dashed=bad)
        picture.write(MARGIN + 36, y, f"{count} x {words[kind]}: {text}")
        y += 22
    if cluster.fabric is not None and cluster.node_count > 1:
        fabric = cluster.fabric
        over = f", oversubscribed {fabric.oversubscription:g}:1" if fabric.oversubscription > 1 else ""
        picture.write(MARGIN, y, f"network between nodes: {fabric.kind}{over}, {fabric.source}", kind="quiet")
        y += 22
    for finding in findings:
        picture.box(MARGIN, y - 10, 12, 12, SEVERITIES[finding.severity])
        picture.write(MARGIN + 20, y, shortened(f"{finding.severity}: {finding.what}", layout.width - 3 * MARGIN))
        y += 22
    return picture.text()


def _shown(node: Node) -> Node:
    """Return the node, or of a rack as many trays as a page holds: those with faults first."""
    trays = Counter([gpu.tray for gpu in node.gpus] + [nic.tray for nic in node.nics])
    if len(trays) == 1 or sum(trays.values()) <= MOST_LEAVES:
        return node
    tray_of = {gpu.vertex: gpu.tray for gpu in node.gpus} | {nic.vertex: nic.tray for nic in node.nics}
    faulty = {gpu.tray for gpu in node.gpus if not gpu.healthy} | {nic.tray for nic in node.nics if not nic.up}
    faulty |= {tray_of[v] for link in node.links if _bad(link) for v in (link.a, link.b) if v in tray_of}
    kept, room = set[int](), MOST_LEAVES
    for tray in sorted(trays, key=lambda tray: (tray not in faulty, tray)):
        room -= trays[tray]
        if kept and room < 0:
            break
        kept.add(tray)
    vertices = tuple(v for v in node.vertices if v.kind is VertexKind.NVSWITCH or v.tray in kept)
    there = {v.id for v in vertices} | {vertex for vertex, tray in tray_of.items() if tray in kept}
    return replace(
        node,
        gpus=tuple(gpu for gpu in node.gpus if gpu.tray in kept),
        nics=tuple(nic for nic in node.nics if nic.tray in kept),
        vertices=vertices,
        links=tuple(link for link in node.links if {link.a, link.b} <= there),
    )


def _place(node: Node) -> _Layout:
    """Give every vertex a place: leaves side by side below their parent, parents over the middle of their leaves."""
    parent = _parents(node)
    order = {vertex.id: number for number, vertex in enumerate(node.vertices)}

    def path(vertex: str) -> tuple[int, ...]:
        way: list[int] = []
        while vertex in parent and len(way) < len(order) + 2:
            vertex = parent[vertex]
            way.append(order.get(vertex, 0))
        return tuple(reversed(way))

    leaves = [gpu.vertex for gpu in node.gpus] + [nic.vertex for nic in node.nics]
    rank = {leaf: number for number, leaf in enumerate(leaves)}
    leaves.sort(key=lambda leaf: (path(leaf), rank[leaf]))
    layout = _Layout(slot=SLOT if len(leaves) <= MANY else SLOT_MANY)
    layout.width = max(NARROWEST, 2 * MARGIN + layout.slot * len(leaves))
    used = [kind for kind in ROWS if any(vertex.kind is kind for vertex in node.vertices)]
    level = TOP + RISE * len(used)
    first = (layout.width - layout.slot * (len(leaves) - 1)) / 2
    for number, leaf in enumerate(leaves):
        layout.at[leaf] = (first + layout.slot * number, level)
    below: dict[str, list[float]] = {}
    for leaf in leaves:
        vertex = leaf
        for _ in range(len(order) + 2):
            if vertex not in parent:
                break
            vertex = parent[vertex]
            below.setdefault(vertex, []).append(layout.at[leaf][0])
    for row, kind in enumerate(used):
        own = [vertex.id for vertex in node.vertices if vertex.kind is kind]
        for number, vertex in enumerate(own):
            columns = below.get(vertex) or [layout.width * (number + 1) / (len(own) + 1)]
            layout.at[vertex] = (sum(columns) / len(columns), TOP + RISE * row)
    hubs = [vertex.id for vertex in node.vertices if vertex.kind is VertexKind.NVSWITCH]
    joined = any(link.kind is LinkKind.NVLINK for link in node.links)
    layout.bottom = level + (RISE * 1.4 if hubs or joined else BOX)
    for number, hub in enumerate(hubs):
        on_it = [
            layout.at[v][0] for link in node.links for v in (link.a, link.b) if hub in {link.a, link.b} and v in rank
        ]
        x = sum(on_it) / len(on_it) if on_it else layout.width * (number + 1) / (len(hubs) + 1)
        layout.at[hub] = (x, layout.bottom)
    return layout


def _parents(node: Node) -> dict[str, str]:
    """Return who hangs on whom, walking outwards from the CPUs over PCIe."""
    frontier = [vertex.id for vertex in node.vertices if vertex.kind is VertexKind.CPU]
    seen, parent = set(frontier), dict[str, str]()
    hubs = {vertex.id for vertex in node.vertices}
    while frontier:
        vertex = frontier.pop(0)
        for link in node.links:
            if link.kind not in {LinkKind.PCIE, LinkKind.C2C} or vertex not in {link.a, link.b}:
                continue
            other = link.b if link.a == vertex else link.a
            if other not in seen:
                seen.add(other)
                parent[other] = vertex
                if other in hubs:
                    frontier.append(other)
    return parent


def _bad(link: Link) -> bool:
    return link.state is not LinkState.UP


def _rate_words(cluster: Cluster, node: Node, link: Link) -> str:
    """Return a link's class as words: links bonded, rate, where the rate is from, what was measured, its state."""
    rate = link_rates(cluster, node, link)[0]
    source = link.source if link.bytes_per_s is not None else Source.ASSUMED
    words = f"{link.count} links, " if link.count > 1 else ""
    words += f"{rate / 1e9:.1f} GB/s ({source})" if rate else "no rate"
    if link.measured_bytes_per_s is not None:
        words += f", measured {link.measured_bytes_per_s / 1e9:.1f} GB/s"
    return words if link.state is LinkState.UP else f"{words}, {link.state}"


def _classes(cluster: Cluster, node: Node) -> Counter[tuple[LinkKind, str, bool]]:
    """Count the links of each class; more than a dozen classes are not told apart by their rate."""
    found = Counter((link.kind, _rate_words(cluster, node, link), _bad(link)) for link in node.links)
    if len(found) <= 12:
        return found
    spans: dict[tuple[LinkKind, bool], list[float]] = {}
    for link in node.links:
        spans.setdefault((link.kind, _bad(link)), []).append(link_rates(cluster, node, link)[0] / 1e9)
    return Counter({(kind, f"{min(r):.1f} to {max(r):.1f} GB/s", bad): len(r) for (kind, bad), r in spans.items()})


def _draw_link(picture: Picture, layout: _Layout, cluster: Cluster, node: Node, link: Link, aside: float) -> None:
    """Draw a link, `aside` pixels from the middle where two vertices are joined twice."""
    if link.a not in layout.at or link.b not in layout.at:
        return
    (ax, ay), (bx, by) = layout.at[link.a], layout.at[link.b]
    ax, bx = ax + aside, bx + aside
    rate = link_rates(cluster, node, link)[0]
    width = 1.0 + max(0.0, log2(max(rate, 1e9) / 8e9)) * 0.8
    stroke, bad = colour("links", link.kind), _bad(link)
    stroke = BAD if bad else stroke
    label = f" {link.label}" if link.label else ""
    about = f"{link.a} to {link.b}{label}: {_rate_words(cluster, node, link)}"
    between = [x for x, y in layout.at.values() if y == ay and min(ax, bx) < x < max(ax, bx)]
    if ay != by or (not between and link.kind in UPWARDS):
        picture.line([(ax, ay), (bx, by)], stroke, width, dashed=bad, about=about)
        return
    # Peers of one row: a bow below GPUs or above sockets, deeper the further they are apart.
    depth = BOX / 2 + 10 + min(RISE, abs(bx - ax) * 0.12)
    if link.kind in UPWARDS:
        depth = -(BOX / 2 + 10)
    picture.bow((ax, ay), (bx, by), depth, stroke, width, dashed=bad, about=about)


def _draw_vertices(picture: Picture, layout: _Layout, node: Node) -> None:
    small = layout.slot < SLOT
    for gpu in node.gpus:
        x, y = layout.at[gpu.vertex]
        about = f"GPU {gpu.index}, {gpu.kind}, {gpu.name or 'name unknown'}"
        _box(
            picture, x, y, layout.slot - 10, str(gpu.index) if small else f"GPU {gpu.index}", about, bad=not gpu.healthy
        )
    for number, nic in enumerate(node.nics):
        x, y = layout.at[nic.vertex]
        rate = f"{nic.bytes_per_s / 1e9:.1f} GB/s" if nic.bytes_per_s else "rate unknown"
        about = f"{nic.label}, {nic.name or 'name unknown'}, {rate}"
        _box(picture, x, y, layout.slot - 10, f"n{number}" if small else nic.label, about, bad=not nic.up)
    for vertex in node.vertices:
        if vertex.id in layout.at:
            x, y = layout.at[vertex.id]
            name = {VertexKind.NVSWITCH: "NVSwitch", VertexKind.PCIE_SWITCH: "switch", VertexKind.ROOT_PORT: "port"}
            _box(
                picture,
                x,
                y,
                92.0 if not small else 70.0,
                name.get(vertex.kind, vertex.id),
                f"{vertex.kind} {vertex.id}",
            )


def _box(picture: Picture, x: float, y: float, width: float, label: str, about: str, *, bad: bool = False) -> None:
    picture.box(x - width / 2, y - BOX / 2, width, BOX, about=about)
    if bad:
        picture.line([(x - width / 2, y + BOX / 2), (x + width / 2, y - BOX / 2)], BAD, 2.0)
    picture.write(x, y + 5, shortened(label, width), anchor="middle")
