"""What a collective sends through the ports of its ranks."""

from __future__ import annotations

from collections.abc import Callable

from topology.rates.groups import GroupShape

# Which share of what a collective's ranks send through their ports each of them carries, per byte of the buffer.
TRAFFIC: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1.0,
    "send_recv": lambda _: 1.0,
}

# Algorithms that reduce inside a node before anything leaves it.
REDUCES_INSIDE = frozenset({"tree", "nvls", "nvls_tree"})


def port_share(op: str, algorithm: str, shape: GroupShape) -> float:
    """Return bytes through a rank's port, or a node's NICs, per byte of the buffer."""
    if op == "all_reduce" and shape.nodes > 1 and algorithm in REDUCES_INSIDE:
        return 2 * (shape.nodes - 1) / shape.nodes
    return TRAFFIC[op](shape.ranks)
