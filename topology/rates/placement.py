"""Which physical GPU runs which rank.

Ranks are numbered with tensor parallelism fastest, so neighbouring ranks communicate most. On a node with uniform
links any order is as good as any other. On an irregular node tensor-parallel groups are put on bridged pairs or quads
first, then groups that are neighbours in rank are put near each other. The same order on every node puts the i-th GPU
of each node into one data-parallel group, so that its traffic stays on one rail of the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from math import factorial, prod

from topology.cluster import Cluster
from topology.errors import BadPlan, Infeasible
from topology.rates.groups import group_score
from topology.rates.node_rates import NodeRates, node_rates
from topology.rates.partition import Score, best_partition

# Fastest first: the reverse of the mesh order that plans and frameworks use.
AXES = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
MAX_ALIGNED_ORDERS = 24  # largest number of orders of a group tried when aligning it with the group before it


def place(cluster: Cluster, plan_shape: Mapping[str, int]) -> tuple[int, ...]:
    """Return, rank by rank, the physical GPU: node number * `cluster.gpus_per_node` + position in the node.

    `plan_shape` maps mesh axes to sizes (absent: 1); `ep` may be given and changes nothing, since it divides the
    others. Tensor-parallel groups get the split of a node whose slowest group is fastest, then the best sum; exact for
    nodes of up to 16 GPUs. A GPU that is unhealthy or off the fabric is left out when the rest suffice. Raises BadPlan
    for unknown axes and sizes below one, Infeasible for too few GPUs.
    """
    sizes = _sizes(plan_shape)
    ranks = prod(sizes)
    if ranks > cluster.gpu_count:
        raise Infeasible(
            f"the plan needs {ranks} GPUs, {cluster.name} has {cluster.gpu_count}",
            remedy="lower a degree, or add nodes",
        )
    per_node = cluster.gpus_per_node
    nodes = [position for position, group in enumerate(cluster.groups) for _ in range(group.count)]
    offered = [min(per_node, len(node_rates(cluster, position).node.gpus)) for position in range(len(cluster.groups))]
    if ranks <= max(offered):
        return _on_best_node(cluster, nodes, sizes, ranks, per_node)

    healthy = [_whole_groups(node_rates(cluster, p), offered[p], sizes[0]) for p in range(len(cluster.groups))]
    take = healthy if sum(healthy[p] for p in nodes) >= ranks else offered
    if sum(take[p] for p in nodes) < ranks:
        raise Infeasible(
            f"the plan needs {ranks} GPUs, the nodes of {cluster.name} offer {sum(take[p] for p in nodes)}",
            why="every node counts as having as many GPUs as the smallest",
            remedy="lower a degree, or leave out the smaller nodes",
        )
    local: dict[tuple[int, int], tuple[int, ...]] = {}
    placed: list[int] = []
    for number, position in enumerate(nodes):
        count = min(take[position], ranks - len(placed))
        if count <= 0:
            continue
        if (position, count) not in local:
            local[position, count] = place_on_node(
                node_rates(cluster, position), _sizes_in_node(sizes, count), offered[position]
            )
        placed += [number * per_node + gpu for gpu in local[position, count]]
    return tuple(placed)


def place_on_node(rates: NodeRates, sizes: Sequence[int], offered: int | None = None) -> tuple[int, ...]:
    """Return GPU positions for the ranks of one node; `sizes` are the axes' sizes inside it, fastest first."""
    ranks = prod(sizes)
    limit = len(rates.node.gpus) if offered is None else offered
    every = tuple(range(limit))
    usable = tuple(gpu for gpu in rates.on_fabric if gpu < limit)
    if ranks > len(usable):
        usable = every
    if rates.uniform:
        return usable[:ranks]
    inner = sizes[0]
    blocks = list(best_partition(usable, inner, ranks // inner, lambda group: group_score(rates, group)))
    for size in sizes[1:]:
        # Group neighbouring blocks axis by axis, so that the members of every axis are near each other.
        if size > 1 and len(blocks) > size:
            blocks = [
                _aligned_blocks(rates, [blocks[i] for i in chosen]) for chosen in _grouped_blocks(rates, blocks, size)
            ]
        elif size > 1:
            blocks = [_aligned_blocks(rates, blocks)]
    return tuple(gpu for block in blocks for gpu in block)


def _grouped_blocks(rates: NodeRates, blocks: Sequence[tuple[int, ...]], size: int) -> tuple[tuple[int, ...], ...]:
    def score(chosen: tuple[int, ...]) -> Score:
        return group_score(rates, tuple(gpu for i in chosen for gpu in blocks[i]))

    return best_partition(range(len(blocks)), size, len(blocks) // size, score)


def _aligned_blocks(rates: NodeRates, blocks: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return `blocks` concatenated, each permuted so that its i-th GPU is near the i-th of the block before."""
    result = list(blocks[0])
    before = blocks[0]
    for block in blocks[1:]:
        if factorial(len(block)) <= MAX_ALIGNED_ORDERS:
            previous = before

            def score(order: tuple[int, ...], previous: tuple[int, ...] = previous) -> tuple[float, float]:
                speeds = [rates.pair_bytes_per_s(a, b) for a, b in zip(previous, order, strict=True)]
                return min(speeds), sum(speeds)

            before = max(permutations(block), key=score)  # the first of equals, so the result is deterministic
        else:
            before = block
        result += before
    return tuple(result)


def _on_best_node(
    cluster: Cluster, nodes: Sequence[int], sizes: Sequence[int], ranks: int, per_node: int
) -> tuple[int, ...]:
    """Place a plan that fits in one node on the kind of node where its slowest tensor-parallel group is fastest."""
    best: tuple[Score, int, tuple[int, ...]] | None = None
    for position in dict.fromkeys(nodes):
        rates = node_rates(cluster, position)
        offered = min(per_node, len(rates.node.gpus))
        if offered < ranks:
            continue
        order = place_on_node(rates, sizes, offered)
        groups = [order[i : i + sizes[0]] for i in range(0, ranks, sizes[0])]
        whole = rates.ring(order).bytes_per_s
        score = (min(ring.bytes_per_s for ring in rates.concurrent_rings(groups)), whole)
        if best is None or score > best[0]:
            best = score, nodes.index(position), order
    if best is None:
        raise Infeasible(f"no node of {cluster.name} has {ranks} GPUs to offer", remedy="lower a degree")
    _, number, order = best
    return tuple(number * per_node + gpu for gpu in order)


def _sizes(plan_shape: Mapping[str, int]) -> tuple[int, ...]:
    unknown = [axis for axis in plan_shape if axis not in AXES and axis != "ep"]
    if unknown:
        raise BadPlan(f"unknown mesh axes: {', '.join(unknown)}", remedy=f"use {', '.join(AXES)}")
    sizes = tuple(plan_shape.get(axis, 1) for axis in AXES)
    if any(size < 1 for size in sizes):
        raise BadPlan(f"mesh sizes {dict(plan_shape)} are not all at least one", remedy="give whole degrees")
    return sizes


def _whole_groups(rates: NodeRates, offered: int, inner: int) -> int:
    """Return how many healthy GPUs of a node belong to whole tensor-parallel groups."""
    healthy = sum(1 for gpu in rates.on_fabric if gpu < offered)
    return healthy // inner * inner if inner <= offered else healthy


def _sizes_in_node(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the part of each axis that lies inside a node with `count` ranks, fastest first."""
    inside, left = [], count
    for size in sizes:
        part = size if left % size == 0 else left
        inside.append(part)
        left //= part
    return (*inside[:-1], inside[-1] * left) if inside else ()
