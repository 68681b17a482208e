"""The layout of a node's topology in a picture, and the text on each part. Pure functions of a cluster.

Rows from top to bottom: NVSwitch fabric, GPUs, PCIe switches, NICs, CPUs. A device is drawn above or below the part it
is attached to; links within a row (NVLink between GPUs, the bus between sockets) are arcs above it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import inf
from typing import Any

from topology.cluster import Cluster, LinkState
from topology.rates.graph import Graph, graph
from topology.rates.node_rates import node_rates

# The technology of a link as text (`topology.cluster.LinkKind`).
LINK_WORDS = {
    "nvswitch": "NVLink to the switch",
    "nvlink": "NVLink between GPUs",
    "c2c": "NVLink-C2C",
    "pcie": "PCIe",
    "smp": "between sockets",
    "network": "network",
}
TIERS = ("nvswitch", "gpu", "pcie_switch", "root_port", "nic", "cpu")
ARC_POINTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A vertex of the picture. `x` is in units of GPUs, `y` in rows from the top."""

    id: str
    kind: str
    label: str
    x: float
    y: float
    index: int  # a GPU's index, else -1
    healthy: bool
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """A link of the picture, with its rates in bytes/s per direction (None where unknown) and its line as `points`."""

    id: int
    a: str
    b: str
    kind: str
    label: str
    count: int
    nominal: float | None
    planned: float
    measured: float | None
    state: str
    source: str
    points: tuple[tuple[float, float], ...]

    @property
    def share(self) -> float | None:
        """Return the measured rate over the nominal one."""
        return self.measured / self.nominal if self.measured and self.nominal else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """The laid-out first node of a cluster."""

    parts: tuple[Part, ...]
    cables: tuple[Cable, ...]

    @property
    def width(self) -> float:
        return max((part.x for part in self.parts), default=0.0) + 1

    @property
    def height(self) -> float:
        return max((part.y for part in self.parts), default=0.0) + 1


def node_view(cluster: Cluster, most: int | None = None) -> NodeView:
    """Lay out the first node of `cluster`: a position for every vertex, and a line for every link.

    With more than `most` GPUs only the first are included, and those that are unhealthy or have a link that is down,
    with the parts they are attached to.
    """
    g = graph(cluster, nodes=1)
    at = "n0."
    node = cluster.groups[0].node
    names = {gpu.vertex: f"{gpu.kind}, {gpu.name or 'name unknown'}" for gpu in node.gpus}
    names |= {nic.vertex: nic.name or "name unknown" for nic in node.nics}
    kinds = {v: str(facts["kind"]) for v, facts in g.nodes(data=True) if v.startswith(at)}
    if most is not None:
        kinds = _shown_vertices(g, kinds, most)
    links: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for a, b, facts in g.edges(data=True):
        if a in kinds and b in kinds and (b, a) not in links:
            links.setdefault((a, b), []).append(facts)
    neighbours: defaultdict[str, set[str]] = defaultdict(set)
    for a, b in links:
        neighbours[a].add(b)
        neighbours[b].add(a)
    xs, ys = _places(kinds, neighbours, g.nodes)
    parts = tuple(
        Part(
            id=v,
            kind=kind,
            label=_label(v.removeprefix(at), kind),
            x=xs[v],
            y=ys[v],
            index=int(g.nodes[v].get("index", -1)) if kind == "gpu" else -1,
            healthy=bool(g.nodes[v].get("healthy", True)),
            about=_about(v.removeprefix(at), kind, g.nodes[v], names),
        )
        for v, kind in kinds.items()
    )
    cables: list[Cable] = []
    for (a, b), several in links.items():
        for facts in several:
            cables.append(
                Cable(
                    id=len(cables),
                    a=a.removeprefix(at),
                    b=b.removeprefix(at),
                    kind=str(facts["kind"]),
                    label=facts["label"],
                    count=facts["count"],
                    nominal=facts["nominal_bytes_per_s"],
                    planned=facts["rate_bytes_per_s"],
                    measured=facts["measured_bytes_per_s"],
                    state=str(facts["state"]),
                    source=str(facts["source"]),
                    points=_line((xs[a], ys[a]), (xs[b], ys[b])),
                )
            )
    return NodeView(parts=parts, cables=tuple(cables))


def _shown_vertices(g: Graph, kinds: dict[str, str], most: int) -> dict[str, str]:
    """Return the vertices to show: `most` GPUs and the unhealthy ones, and the parts they are attached to."""
    gpus = sorted((v for v, kind in kinds.items() if kind == "gpu"), key=lambda v: g.nodes[v]["index"])
    left_out = {
        v
        for v in gpus[most:]
        if g.nodes[v]["healthy"] and all(facts["state"] is LinkState.UP for _, _, facts in g.out_edges(v, data=True))
    }
    if not left_out:
        return kinds
    shown = set(gpus) - left_out
    for tier in ("nvswitch", "pcie_switch", "root_port", "cpu", "nic"):  # outward from the GPUs
        shown |= {
            v
            for v, kind in kinds.items()
            if kind == tier and any(n in shown for n in g.successors(v)) and _is_attached(g, v, left_out)
        }
    return {v: kind for v, kind in kinds.items() if v in shown}


def _is_attached(g: Graph, vertex: str, left_out: set[str]) -> bool:
    """Return whether a part is attached to something other than GPUs that are left out."""
    below = [n for n in g.successors(vertex) if g.nodes[n]["kind"] == "gpu"]
    return not below or any(n not in left_out for n in below)


def _places(kinds: dict[str, str], neighbours: dict[str, set[str]], facts: object) -> tuple[dict, dict]:  # type: ignore[type-arg]
    """Return x and y of every vertex: GPUs in order of index, other parts centred on what is attached to them."""
    used = [tier for tier in TIERS if tier in kinds.values()]
    rows = {tier: float(row) for row, tier in enumerate(used)}
    ys = {v: rows.get(kind, float(len(used))) for v, kind in kinds.items()}
    gpus = sorted((v for v, kind in kinds.items() if kind == "gpu"), key=lambda v: facts[v]["index"])  # type: ignore[index]
    xs = {v: float(i) for i, v in enumerate(gpus)}
    middle = (len(gpus) - 1) / 2 if gpus else 0.0
    for tier in ("pcie_switch", "root_port", "cpu", "nic", "nvswitch"):
        members = [v for v, kind in kinds.items() if kind == tier]
        wanted = {}
        for v in members:
            placed = [xs[n] for n in neighbours[v] if n in xs]
            wanted[v] = sum(placed) / len(placed) if placed else middle
            if tier == "nic" and any(kinds.get(n) == "cpu" for n in neighbours[v]):
                wanted[v] += 0.6  # next to the CPU, whose own lines come from straight above
        gap = 0.8 if tier == "nic" else 1.0
        xs |= _spread(wanted, min(gap, max(len(gpus), 1) / max(len(members), 1)))
    return xs, ys


def _spread(wanted: dict[str, float], gap: float) -> dict[str, float]:
    """Return positions in the order of `wanted`, at least `gap` apart; runs of neighbours are centred on their
    wishes.
    """
    ordered = sorted(wanted.items(), key=lambda item: (item[1], item[0]))
    runs: list[tuple[float, list[str]]] = []  # centre wanted, members
    for name, x in ordered:
        runs.append((x, [name]))
        while len(runs) > 1 and _end(runs[-2], gap) + gap > _start(runs[-1], gap) + 1e-9:
            (xa, a), (xb, b) = runs[-2:]
            runs[-2:] = [((xa * len(a) + xb * len(b)) / (len(a) + len(b)), a + b)]
    return {name: _start(run, gap) + i * gap for run in runs for i, name in enumerate(run[1])}


def _start(run: tuple[float, list[str]], gap: float) -> float:
    return run[0] - gap * (len(run[1]) - 1) / 2


def _end(run: tuple[float, list[str]], gap: float) -> float:
    return run[0] + gap * (len(run[1]) - 1) / 2


def _line(a: tuple[float, float], b: tuple[float, float]) -> tuple[tuple[float, float], ...]:
    """Return a straight line between rows, or an arc above a row between parts of it: higher the wider it is."""
    if a[1] != b[1] or a == b:
        return a, b
    reach = abs(a[0] - b[0])
    top = a[1] - min(0.85, 0.18 + 0.09 * reach)
    points = []
    for step in range(ARC_POINTS + 1):
        t = step / ARC_POINTS
        x = a[0] + (b[0] - a[0]) * t
        y = a[1] + (top - a[1]) * 4 * t * (1 - t)
        points.append((x, y))
    return tuple(points)


def _label(vertex: str, kind: str) -> str:
    if kind == "gpu":
        return vertex.removeprefix("gpu")
    return {"nvswitch": "NVSwitch"}.get(kind, vertex.replace("cpu_unknown", "CPU?"))


def _about(vertex: str, kind: str, facts: dict[str, object], names: dict[str, str]) -> str:
    if kind == "gpu":
        words = f"GPU {facts['index']}"
    else:
        known = {"nic": "network port", "cpu": "CPU socket", "nvswitch": "NVSwitch fabric"}
        words = f"{known.get(kind, kind.replace('_', ' '))} {vertex}"
    words += f", {names[vertex]}" if vertex in names else ""
    if kind == "nic":
        rate = facts.get("bytes_per_s")
        words += f", {float(str(rate)) / 1e9:.1f} GB/s" if rate else ", rate unknown"
    return words if facts.get("healthy", True) else f"{words}, not healthy"


def pair_rows(cluster: Cluster) -> list[dict[str, object]]:
    """Return one row per ordered pair of GPUs of the first node: link class, and the rate of one transfer at a time."""
    node = cluster.groups[0].node
    rates = node_rates(cluster).pairs()
    rows: list[dict[str, object]] = []
    for first in node.gpus:
        for second in node.gpus:
            a, b = sorted((first.index, second.index))
            rate = rates.get((first.index, second.index))
            rows.append(
                {
                    "from": first.index,
                    "to": second.index,
                    "class": "self" if a == b else node.pairs.get(f"{a}-{b}", "not read"),
                    "rate": None if a == b or not rate or rate == inf else rate,
                }
            )
    return rows


def degraded(cable: Cable) -> bool:
    return cable.state in {LinkState.DEGRADED, LinkState.ABSENT}
