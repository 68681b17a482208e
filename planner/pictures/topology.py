"""Draw a node as a graph, laid out by `node_layout`: the NVLink fabric above, GPUs, and below them PCIe, NICs and CPUs.

The colour of a line is the kind of its link, and its width the rate; a dashed line in the colour of faults is degraded,
absent or unknown. The legend gives the rates of each class of links, per direction and with their source.
"""

from __future__ import annotations

from collections import Counter
from math import log2

from planner.pictures.node_layout import LINK_WORDS, Cable, NodeView, Part, node_view
from planner.pictures.palette import BAD, LINKS, SEVERITIES, colour
from planner.pictures.svg import MARGIN, Picture, shortened
from topology.cluster import Cluster, LinkState

NARROWEST = 960.0
SLOT, SLOT_MANY = 92.0, 46.0  # pixels for each GPU
MANY = 20
MOST_GPUS = 32
PARALLEL = 7.0
BOX = 30.0
TOP = 130.0
RISE = 84.0
MOST_FINDINGS = 8
MOST_CLASSES = 12
Place = tuple[float, float]


def topology(cluster: Cluster) -> str:
    """Return the SVG of a cluster's first node, with the rates of its links and its findings."""
    view = node_view(cluster, most=MOST_GPUS)
    slot = SLOT if view.width <= MANY else SLOT_MANY
    left, right = min(part.x for part in view.parts), max(part.x for part in view.parts)
    width = max(NARROWEST, 2 * MARGIN + slot * (right - left + 1))
    start = (width - slot * (right - left)) / 2

    def place(x: float, y: float) -> Place:
        return start + slot * (x - left), TOP + RISE * y

    classes = _classes(view)
    findings = cluster.findings[:MOST_FINDINGS]
    bottom = TOP + RISE * (view.height - 1) + BOX
    picture = Picture(
        width, bottom + 40 + 22 * (len(classes) + len(findings) + 1) + MARGIN, cluster.name, _about(cluster, view)
    )
    picture.write(MARGIN, MARGIN + 30, _about(cluster, view), kind="quiet")
    together = Counter(frozenset((cable.a, cable.b)) for cable in view.cables)
    seen: Counter[frozenset[str]] = Counter()
    for cable in view.cables:
        ends = frozenset((cable.a, cable.b))
        aside = PARALLEL * (seen[ends] - (together[ends] - 1) / 2)
        seen[ends] += 1
        _draw_cable(picture, cable, [place(x, y) for x, y in cable.points], aside)
    for part in view.parts:
        _draw_part(picture, part, place(part.x, part.y), slot)
    words = LINK_WORDS
    if not any(cluster.kind(gpu.kind).compute_capability for gpu in cluster.groups[0].node.gpus):
        words = words | {"nvlink": "direct links between GPUs"}  # AMD's are not NVLinks
    y = bottom + 32
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
        picture.write(MARGIN + 20, y, shortened(f"{finding.severity}: {finding.what}", width - 3 * MARGIN))
        y += 22
    return picture.text()


def _about(cluster: Cluster, view: NodeView) -> str:
    node = cluster.groups[0].node
    shown = sum(part.kind == "gpu" for part in view.parts)
    alike = f"1 of {cluster.node_count} nodes" if cluster.node_count > 1 else "1 node"
    gpus = f"{shown} GPUs" if shown == len(node.gpus) else f"{shown} of {len(node.gpus)} GPUs"
    return f"{alike}, {gpus}, {len(node.nics)} network ports; rates are per direction"


def _bad(cable: Cable) -> bool:
    return cable.state != LinkState.UP


def _rate_words(cable: Cable) -> str:
    """Return the class of a link as text: bonded links, rate and its source, measured rate, state."""
    words = f"{cable.count} links, " if cable.count > 1 else ""
    words += f"{cable.planned / 1e9:.1f} GB/s ({cable.source})" if cable.planned else "no rate"
    if cable.measured is not None:
        words += f", measured {cable.measured / 1e9:.1f} GB/s"
    return f"{words}, {cable.state}" if _bad(cable) else words


def _classes(view: NodeView) -> Counter[tuple[str, str, bool]]:
    """Count the links of each class; with more than a dozen classes, rates are merged into ranges."""
    found = Counter((cable.kind, _rate_words(cable), _bad(cable)) for cable in view.cables)
    if len(found) <= MOST_CLASSES:
        return found
    spans: dict[tuple[str, bool], list[float]] = {}
    for cable in view.cables:
        spans.setdefault((cable.kind, _bad(cable)), []).append(cable.planned / 1e9)
    return Counter({(kind, f"{min(r):.1f} to {max(r):.1f} GB/s", bad): len(r) for (kind, bad), r in spans.items()})


def _draw_cable(picture: Picture, cable: Cable, points: list[Place], aside: float) -> None:
    """Draw a link, moved `aside` pixels where two parts have several links."""
    bad = _bad(cable)
    label = f" {cable.label}" if cable.label else ""
    picture.line(
        [(x + aside, y) for x, y in points],
        BAD if bad else colour("links", cable.kind),
        1.0 + max(0.0, log2(max(cable.planned, 1e9) / 8e9)) * 0.8,
        dashed=bad,
        about=f"{cable.a} to {cable.b}{label}: {_rate_words(cable)}",
    )


def _draw_part(picture: Picture, part: Part, at: Place, slot: float) -> None:
    x, y = at
    small = slot < SLOT
    label = f"GPU {part.label}" if part.kind == "gpu" and not small else part.label
    width = slot * (0.7 if part.kind == "nic" else 0.9)
    picture.box(x - width / 2, y - BOX / 2, width, BOX, about=part.about)
    if not part.healthy:
        picture.line([(x - width / 2, y + BOX / 2), (x + width / 2, y - BOX / 2)], BAD, 2.0)
    picture.write(x, y + 5, shortened(label, width), anchor="middle")
