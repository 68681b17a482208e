"""The widest paths through a cluster's graph: what the rates of pairs of GPUs are checked against."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

import networkx as nx

from topology.cluster import LinkKind
from topology.rates.graph import Graph, capacities, gpus_of
from topology.rates.node_rates import HOST_KINDS, NVLINK_KINDS


def bottleneck_path(
    g: Graph, a: str, b: str, kinds: Collection[LinkKind] | None = None
) -> tuple[float, tuple[str, ...]]:
    """Return (bytes/s, vertices) of the widest path from `a` to `b`, the shortest among equals; (0, ()) if none.

    Other GPUs do not forward.
    """
    flow = capacities(g, kinds, keep={a, b})
    if a not in flow or b not in flow:
        return 0.0, ()
    rates = sorted({facts["capacity"] for _, _, facts in flow.edges(data=True)}, reverse=True)
    low, high = 0, len(rates)  # the widest rate at which b can be reached is among those of the edges
    while low < high:
        middle = (low + high) // 2
        if nx.has_path(_at_least(flow, rates[middle]), a, b):
            high = middle
        else:
            low = middle + 1
    if low == len(rates):
        return 0.0, ()
    return rates[low], tuple(nx.shortest_path(_at_least(flow, rates[low]), a, b))


def pair_bytes_per_s(g: Graph) -> dict[tuple[int, int], float]:
    """Return the rate of a single copy between each two GPUs of a node, by index: over NVLink, else the host."""
    gpus = gpus_of(g)
    table = {}
    for a, b in combinations(gpus, 2):
        rate, _ = bottleneck_path(g, a, b, NVLINK_KINDS)
        if rate <= 0:
            rate, _ = bottleneck_path(g, a, b, HOST_KINDS)
        i, j = g.nodes[a]["index"], g.nodes[b]["index"]
        table[i, j] = table[j, i] = rate
    return table


def _at_least(flow: nx.DiGraph[str], rate: float) -> nx.DiGraph[str]:
    wide = [(a, b) for a, b, facts in flow.edges(data=True) if facts["capacity"] >= rate]
    kept: nx.DiGraph[str] = nx.DiGraph(wide)
    kept.add_nodes_from(flow)
    return kept
