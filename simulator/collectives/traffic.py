"""Bytes that a collective sends through the ports of its ranks, and the rates of these ports."""

from __future__ import annotations

from collections.abc import Callable

from simulator.collectives.pushed import PUSHED
from topology.cluster import Cluster
from topology.rates.groups import GroupShape

# Bytes through each rank's port per byte of the buffer, by number of ranks.
TRAFFIC: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1.0,
    "send_recv": lambda _: 1.0,
}
TRAFFIC |= {op: TRAFFIC[plain] for op, plain in PUSHED.items()}

# Algorithms that reduce inside a node before they send to other nodes.
REDUCES_INSIDE = frozenset({"tree", "nvls", "nvls_tree"})


def port_share(op: str, algorithm: str, shape: GroupShape) -> float:
    """Return bytes through a rank's port, or a node's NICs, per byte of the buffer."""
    if op == "all_reduce" and shape.nodes > 1 and algorithm in REDUCES_INSIDE:
        return 2 * (shape.nodes - 1) / shape.nodes
    return TRAFFIC[op](shape.ranks)


def bottleneck_of(*, nodes: int, ranks_per_node: int) -> tuple[str, float]:
    """Return ("port" or "nic", whichever limits a rank's traffic; the share of that traffic that passes it).

    A ring enters and leaves every node once, however many ranks it has there, and its channels spread that over the
    ranks' NICs.
    """
    return ("port", 1.0) if nodes == 1 else ("nic", 1.0 / ranks_per_node)


def bottleneck_rates(cluster: Cluster) -> dict[str, float]:
    """Return bytes/s of each GPU's "port" (NVLink or PCIe) and "nic", its share of the node's network."""
    node, kind = cluster.groups[0].node, cluster.slowest_kind
    network = sum(nic.bytes_per_s or 0.0 for nic in node.nics if nic.up)
    return {
        "nic": max(network / max(len(node.gpus), 1), 1.0),
        "port": kind.nvlink_links * kind.nvlink_bytes_per_s or kind.pcie_bytes_per_s,
    }
