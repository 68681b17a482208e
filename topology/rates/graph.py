"""The cluster as a networkx graph, with max-flow, bisection bandwidth and NVLink islands.

Vertices are `n{node}.{vertex}`: GPUs, the NVSwitch hub, PCIe switches, root ports, CPUs and NICs of each node; then
`leaf{pod}.{rail}` and `spine`. Edges are directed, one each way, with the rates of the link they come from. An NVSwitch
is a hub with a port per GPU, never a clique: eight GPUs have 8 x 450 GB/s and not 28 pairs of 450. A shared uplink is
one edge that all flows through it share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import combinations, product
from math import inf
from typing import Any, TypeAlias

import networkx as nx

from topology.cluster import Cluster, FabricKind, LinkKind, LinkState, Node, Source
from topology.rates.node_rates import HOST_KINDS, NVLINK_KINDS, link_rates

Graph: TypeAlias = "nx.MultiDiGraph[str]"
MAX_PARTITIONS = 20_000


def graph(cluster: Cluster, nodes: int | None = None) -> Graph:
    """Return the first `nodes` nodes of `cluster` (all by default) and the fabric above them.

    Vertex attributes: `kind` (gpu, nvswitch, pcie_switch, root_port, cpu, nic, leaf, spine), `node`, `index`,
    `healthy`, `tray`, `multicast`. Edge attributes: `kind`, `count`, `label`, `nominal_bytes_per_s`,
    `nccl_bytes_per_s`, `measured_bytes_per_s` (None where unknown), `rate_bytes_per_s` (what to plan with),
    `latency_s`, `state`, `source`, `confidence`.
    """
    result: Graph = nx.MultiDiGraph(name=cluster.name)
    for number, node in enumerate(_nodes(cluster, nodes)):
        _add_node(result, cluster, number, node)
    if cluster.fabric is not None:
        _add_fabric(result, cluster)
    return result


def _nodes(cluster: Cluster, limit: int | None) -> Iterator[Node]:
    number = 0
    for group in cluster.groups:
        for _ in range(group.count):
            if limit is not None and number >= limit:
                return
            yield group.node
            number += 1


def _add_node(result: Graph, cluster: Cluster, number: int, node: Node) -> None:
    at = f"n{number}."
    for gpu in node.gpus:
        result.add_node(
            at + gpu.vertex, kind="gpu", node=number, index=gpu.index, healthy=gpu.healthy, tray=gpu.tray, uuid=gpu.uuid
        )
    for vertex in node.vertices:
        result.add_node(
            at + vertex.id, kind=str(vertex.kind), node=number, multicast=vertex.multicast, tray=vertex.tray
        )
    for nic in node.nics:
        result.add_node(
            at + nic.vertex,
            kind="nic",
            node=number,
            rail=nic.rail,
            healthy=nic.up,
            tray=nic.tray,
            bytes_per_s=nic.bytes_per_s,
        )
    for link in node.links:
        if at + link.a not in result or at + link.b not in result:
            continue  # verify_cluster reports links to nowhere
        rate, nccl = link_rates(cluster, node, link)
        attributes = {
            "kind": link.kind,
            "count": link.count,
            "label": link.label,
            "nominal_bytes_per_s": link.bytes_per_s,
            "nccl_bytes_per_s": nccl,
            "measured_bytes_per_s": link.measured_bytes_per_s,
            "rate_bytes_per_s": rate,
            "latency_s": link.latency_s,
            "state": link.state,
            "source": link.source if link.best_bytes_per_s is not None else Source.ASSUMED,
            "confidence": link.confidence,
        }
        result.add_edge(at + link.a, at + link.b, **attributes)
        result.add_edge(at + link.b, at + link.a, **attributes)


def _add_fabric(result: Graph, cluster: Cluster) -> None:
    """Connect every NIC to its leaf and every leaf to the spine. Uplink rate is downlink rate over oversubscription."""
    fabric = cluster.fabric
    if fabric is None:
        return
    below: defaultdict[str, dict[int, float]] = defaultdict(dict)  # leaf -> node -> bytes/s of its ports there

    def join(a: str, b: str, rate: float, source: Source) -> None:
        for start, end in ((a, b), (b, a)):
            result.add_edge(
                start,
                end,
                kind=LinkKind.NETWORK,
                count=1,
                label="",
                nominal_bytes_per_s=rate,
                nccl_bytes_per_s=rate,
                measured_bytes_per_s=None,
                rate_bytes_per_s=rate,
                latency_s=fabric.latency_s / 2,
                state=LinkState.UP,
                source=source,
                confidence=1.0,
            )

    for nic, facts in [item for item in result.nodes(data=True) if item[1]["kind"] == "nic"]:
        rate = facts["bytes_per_s"] or 0.0
        if not facts["healthy"] or rate <= 0:
            continue
        rail = facts["rail"] if fabric.kind is FabricKind.RAIL_OPTIMISED and facts["rail"] is not None else 0
        leaf = f"leaf{facts['node'] // fabric.nodes_per_leaf}.{rail}"
        result.add_node(leaf, kind="leaf", rail=rail, node=-1)
        join(nic, leaf, rate, fabric.source)
        below[leaf][facts["node"]] = below[leaf].get(facts["node"], 0.0) + rate
    for leaf, ports in below.items():
        # The leaf is built for a full pod, whether or not all of it is in use or in this graph.
        result.add_node("spine", kind="spine", node=-1)
        full = fabric.nodes_per_leaf * max(ports.values())
        join(leaf, "spine", full / fabric.oversubscription, fabric.source)


# Sets of GPUs


def gpus_of(g: Graph) -> tuple[str, ...]:
    """Return the GPU vertices in order."""
    return tuple(vertex for vertex, facts in g.nodes(data=True) if facts["kind"] == "gpu")


def islands(g: Graph) -> tuple[tuple[str, ...], ...]:
    """Return the sets of two or more healthy GPUs that working NVLinks connect, largest first.

    A GPU without a working NVLink is in no island, even if the driver reports it as part of a fabric.
    """
    working: nx.Graph[str] = nx.Graph()
    for a, b, facts in g.edges(data=True):
        if facts["kind"] in NVLINK_KINDS and facts["rate_bytes_per_s"] > 0 and _healthy(g, a) and _healthy(g, b):
            working.add_edge(a, b)
    order = {vertex: i for i, vertex in enumerate(gpus_of(g))}
    found = [
        tuple(sorted((v for v in part if v in order), key=order.__getitem__))
        for part in nx.connected_components(working)
    ]
    return tuple(sorted((i for i in found if len(i) > 1), key=lambda i: (-len(i), order[i[0]])))


def _healthy(g: Graph, vertex: str) -> bool:
    return bool(g.nodes[vertex].get("healthy", True))


# Flows and paths


def max_flow_bytes_per_s(
    g: Graph, sources: Iterable[str], sinks: Iterable[str], kinds: Collection[LinkKind] | None = None
) -> float:
    """Return the maximum flow in bytes/s from all `sources` to all `sinks` over links of `kinds` (default: all).

    Other GPUs do not forward. Raises ValueError unless the two sets are disjoint and non-empty.
    """
    start, end = set(sources), set(sinks)
    if start & end or not start or not end:
        raise ValueError("sources and sinks must be two separate, non-empty sets")
    return _max_flow(capacities(g, kinds, keep=start | end), start, end)


def _max_flow(flow: nx.DiGraph[str], start: Collection[str], end: Collection[str]) -> float:
    joined = flow.copy()
    joined.add_edges_from(("source", vertex) for vertex in start)  # no capacity: unlimited
    joined.add_edges_from((vertex, "sink") for vertex in end)
    value: float = nx.maximum_flow_value(joined, "source", "sink")
    return value


def bisection_bytes_per_s(g: Graph) -> float:
    """Return the bisection bandwidth of the GPUs: the least over all splits into halves, in bytes/s and direction.

    `crossing_kinds` are the links that count. One node: every split is tried, with GPUs of
    identical links interchangeable. Several nodes: the first half of the nodes against the rest, since they are alike.
    Raises ValueError where there are more than `MAX_PARTITIONS` different splits.
    """
    gpus = gpus_of(g)
    nodes = sorted({g.nodes[gpu]["node"] for gpu in gpus})
    kinds = crossing_kinds(g)
    if len(gpus) < 2:
        return 0.0
    if len(nodes) > 1:
        first = set(nodes[: len(nodes) // 2])
        near = [gpu for gpu in gpus if g.nodes[gpu]["node"] in first]
        return max_flow_bytes_per_s(g, near, set(gpus) - set(near), kinds)
    # Every GPU is on one side, so the cut is the direct links between the sides plus the flow through switches.
    rest = capacities(g, kinds, keep=set(gpus))
    wires = [(a, b, facts["capacity"]) for a, b, facts in rest.edges(data=True) if {a, b} <= set(gpus)]
    halves = _halves(rest, gpus)
    rest.remove_edges_from([(a, b) for a, b, _ in wires])
    switched = len(rest) > len(gpus)
    least = inf
    for tried, half in enumerate(halves):
        if tried >= MAX_PARTITIONS:
            raise ValueError(f"more than {MAX_PARTITIONS} different halves of {len(gpus)} GPUs")
        side = set(half)
        crossing = sum(rate for a, b, rate in wires if a in side and b not in side)
        if switched and crossing < least:
            crossing += _max_flow(rest, side, set(gpus) - side)
        least = min(least, crossing)
    return least


def crossing_kinds(g: Graph) -> Collection[LinkKind] | None:
    """Return the link kinds that carry traffic between halves of the GPUs; None for all.

    In one node: NVLink if it connects all GPUs, else NVLink and host links; over several nodes: all.
    """
    gpus = gpus_of(g)
    if len({g.nodes[gpu]["node"] for gpu in gpus}) > 1:
        return None
    whole = any(len(island) == len(gpus) for island in islands(g))
    return NVLINK_KINDS if whole else NVLINK_KINDS | HOST_KINDS


def _halves(flow: nx.DiGraph[str], gpus: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield halves of `gpus`, one for each way to take some of each class of GPUs with identical links."""
    ends = {gpu: {b: facts["capacity"] for b, facts in flow[gpu].items()} for gpu in gpus}

    def interchangeable(a: str, b: str) -> bool:
        """Whether the two are interchangeable: they have the same links to all others, and to each other."""
        mine, other = ends[a], ends[b]
        return mine.get(b) == other.get(a) and {**mine, b: 0.0, a: 0.0} == {**other, a: 0.0, b: 0.0}

    classes: list[list[str]] = []
    for gpu in gpus:
        same = next((group for group in classes if interchangeable(group[0], gpu)), None)
        if same is None:
            classes.append([gpu])
        else:
            same.append(gpu)
    return _splits(classes, gpus)


def _splits(classes: list[list[str]], gpus: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    size = len(gpus) // 2
    if all(len(group) == 1 for group in classes):
        # Complementary halves cross the same cut: the first GPU can stay on one side where halves are equal.
        fixed = gpus[:1] if len(gpus) % 2 == 0 else ()
        for rest in combinations(gpus[len(fixed) :], size - len(fixed)):
            yield (*fixed, *rest)
        return
    for counts in product(*(range(len(group) + 1) for group in classes)):
        if sum(counts) == size:
            yield tuple(gpu for group, count in zip(classes, counts, strict=True) for gpu in group[:count])


def _is_usable(facts: dict[str, Any], kinds: Collection[LinkKind] | None) -> bool:
    return facts["rate_bytes_per_s"] > 0 and (kinds is None or facts["kind"] in kinds)


def capacities(g: Graph, kinds: Collection[LinkKind] | None, keep: set[str]) -> nx.DiGraph[str]:
    """Return `g` with parallel edges added up as `capacity`, without GPUs that are not in `keep`."""
    flow: nx.DiGraph[str] = nx.DiGraph()
    for a, b, facts in g.edges(data=True):
        if not _is_usable(facts, kinds):
            continue
        if any(g.nodes[end]["kind"] == "gpu" and end not in keep for end in (a, b)):
            continue
        prior = flow.edges[a, b]["capacity"] if flow.has_edge(a, b) else 0.0
        flow.add_edge(a, b, capacity=prior + facts["rate_bytes_per_s"])
    for vertex in keep:
        flow.add_node(vertex)
    return flow
