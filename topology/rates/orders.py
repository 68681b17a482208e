"""The orders of a node's GPUs that are worth trying, where link rates depend on which GPUs communicate.

A communicator inside a node takes ranks at a fixed stride: neighbours, every second, every fourth. The order in which
GPUs are given ranks decides which links each such pattern gets: NVLink bridges or the path through the sockets, a near
or a far NIC. Only the Pareto-optimal orders are kept (no other order is as good in every pattern), often two or three
out of 40,320; the search takes the order as one more choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from topology.cluster import Cluster, LinkKind
from topology.rates.groups import network_bytes_per_s
from topology.rates.node_rates import NodeRates, node_rates

MAX_GPUS = 8  # per node: all 8! = 40,320 orders are tried
Pattern = tuple[int, int, bool]  # (ranks of a group on the node, stride in ranks, whether only neighbour pairs talk)
Order = tuple[int, ...]


def irregular(cluster: Cluster) -> bool:
    """Return whether link rates depend on which GPUs of a node form a group.

    They do on nodes without NVSwitch whose GPU pairs have different classes, and where some GPUs are off the fabric.
    """
    for position, group in enumerate(cluster.groups):
        node = group.node
        if len(node_rates(cluster, position).on_fabric) < len(node.gpus):
            return True
        switched = any(link.kind is LinkKind.NVSWITCH for link in node.links)
        if not switched and len(set(node.pairs.values())) > 1:
            return True
    return False


def node_orders(cluster: Cluster, gpus: int) -> tuple[Order, ...]:
    """Return the Pareto-optimal orders of a node's GPUs for a plan on `gpus` GPUs; empty where the order is no choice.

    Every node of the cluster gets the same order. Also empty for nodes of different kinds, for nodes of more than
    `MAX_GPUS` GPUs, and for plans that fill their last node in part: `topology.rates.placement.place` finds one there.
    """
    return tuple(order for order, _ in _candidate_orders(cluster, gpus))


def undominated_orders(cluster: Cluster, gpus: int, patterns: Iterable[Pattern]) -> tuple[int, ...]:
    """Return the positions in `node_orders` that are Pareto-optimal in `patterns` alone; of equals the first."""
    known = _candidate_orders(cluster, gpus)
    every = _patterns(_gpus_on_node(cluster, gpus))
    # A pattern that does not divide the node was not costed, so it cannot choose between orders.
    columns = [every.index(pattern) for pattern in sorted(set(patterns)) if pattern in every]
    if len(known) < 2 or not columns:
        return (0,) if known else ()
    values = np.array([[value[column] for column in columns] for _, value in known])
    return tuple(_pareto_front(values.reshape(len(known), -1)))


def placement_of_order(order: Order, gpus: int, gpus_per_node: int) -> tuple[int, ...]:
    """Return a plan's placement that has `order` on every node: rank by rank, the physical GPU."""
    return tuple(rank // len(order) * gpus_per_node + order[rank % len(order)] for rank in range(gpus))


def order_of(placement: Sequence[int], gpus_per_node: int) -> Order:
    """Return the order that a placement has on every node, or () where nodes differ or are filled in part."""
    first = placement[0] // gpus_per_node if placement else 0
    order = tuple(gpu % gpus_per_node for gpu in placement if gpu // gpus_per_node == first)
    size = len(order)
    if not order or len(placement) % size:
        return ()
    nodes = [placement[start : start + size] for start in range(0, len(placement), size)]
    alike = all(
        len({gpu // gpus_per_node for gpu in node}) == 1 and tuple(gpu % gpus_per_node for gpu in node) == order
        for node in nodes
    )
    return order if alike else ()


def groups_on(order: Order, pattern: Pattern, rates: NodeRates) -> tuple[Order, ...]:
    """Return the groups of a pattern under an order. Of neighbour pairs, which run independently, only the slowest."""
    size, stride, pairs = pattern
    if pairs:
        neighbours = [(order[at], order[at + stride]) for at in range(len(order) - stride)]
        return (min(neighbours, key=lambda pair: rates.pair_bytes_per_s(*pair)),) if neighbours else ()
    block = size * stride
    return tuple(
        order[base + offset : base + block : stride]
        for base in range(0, len(order) - block + 1, block)
        for offset in range(stride)
    )


def _gpus_on_node(cluster: Cluster, gpus: int) -> int:
    return min(gpus, cluster.gpus_per_node)


def _patterns(count: int) -> tuple[Pattern, ...]:
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    groups = [
        (size, stride, False) for size in divisors for stride in divisors if size > 1 and count % (size * stride) == 0
    ]
    return (*groups, *((2, stride, True) for stride in divisors if stride < count))


Value = tuple[tuple[float, ...], ...]  # rates of each pattern: more is better


def _candidate_orders(cluster: Cluster, gpus: int) -> tuple[tuple[Order, Value], ...]:
    key = (id(cluster), gpus)
    entry = _orders_cache.get(key)
    if entry is None or entry[0] is not cluster:
        if len(_orders_cache) >= 64:
            _orders_cache.clear()
        entry = _orders_cache[key] = (cluster, _compute_candidate_orders(cluster, gpus))
    return entry[1]


# Each entry keeps its cluster alive, so that an id in a key cannot come to mean another cluster.
_orders_cache: dict[tuple[int, int], tuple[Cluster, tuple[tuple[Order, Value], ...]]] = {}


def _compute_candidate_orders(cluster: Cluster, gpus: int) -> tuple[tuple[Order, Value], ...]:
    count = _gpus_on_node(cluster, gpus)
    if len(cluster.groups) != 1 or count < 2 or gpus % count or not irregular(cluster):
        return ()
    rates = node_rates(cluster, 0)
    everything = range(len(rates.node.gpus))
    usable = rates.on_fabric if count <= len(rates.on_fabric) else tuple(everything)
    if len(usable) > MAX_GPUS:
        return ()
    orders = np.array(list(permutations(usable, count)))
    values = [_values(orders, pattern, rates, network=cluster.fabric is not None) for pattern in _patterns(count)]
    table = np.concatenate(values, axis=1)
    rows = np.sort(np.unique(table, axis=0, return_index=True)[1])
    rows = rows[_pareto_front(table[rows])]
    return tuple(
        (tuple(int(gpu) for gpu in orders[row]), tuple(tuple(part[row].tolist()) for part in values)) for row in rows
    )


def _values(orders: NDArray[np.int64], pattern: Pattern, rates: NodeRates, *, network: bool) -> NDArray[np.float64]:
    """Return, per order, the slowest group's ring rate, NCCL's view of it, minus its latency, and its network rate."""
    _, stride, pairs = pattern
    count = orders.shape[1]
    if pairs:
        every = range(len(rates.node.gpus))
        speed = np.array([[rates.pair_bytes_per_s(a, b) if a != b else np.inf for b in every] for a in every])
        slowest = speed[orders[:, : count - stride], orders[:, stride:]].min(axis=1)
        return np.stack([slowest, *[np.zeros_like(slowest)] * 3], axis=1)
    positions = np.array([list(group) for group in groups_on(tuple(range(count)), pattern, rates)])
    masks = np.sort((1 << orders[:, positions]).sum(axis=2), axis=1)
    kinds, which = np.unique(masks, axis=0, return_inverse=True)

    @cache
    def members(mask: int) -> Order:
        return tuple(gpu for gpu in range(len(rates.node.gpus)) if mask >> gpu & 1)

    found = []
    for kind in kinds:
        groups = tuple(members(int(mask)) for mask in kind)
        ring = min(rates.concurrent_rings(groups), key=lambda r: r.bytes_per_s)
        inter = network_bytes_per_s(rates, groups) if network else 0.0
        found.append((ring.bytes_per_s, ring.nccl_bytes_per_s, -ring.latency_s, inter))
    return np.array(found)[which.reshape(-1)]


def _pareto_front(values: NDArray[np.float64]) -> list[int]:
    """Return the Pareto-optimal rows: no other row is at least as good in every column; of equals the first."""
    kept: list[int] = []
    for row in np.lexsort((np.arange(len(values)), -values.sum(axis=1))):
        if not any((values[other] >= values[row]).all() for other in kept):
            kept.append(int(row))
    return sorted(kept)
