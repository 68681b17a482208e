"""The shape of a communicator on the machine, and its bottleneck rates there.

A collective's cost depends on few facts: how many ranks, how many of them share a node, how many sibling groups send
through the same NICs at the same time, and the bottleneck rates inside and between nodes. `GroupShape` and `GroupRates`
are hashable, so the few distinct groups among thousands of candidate plans are costed once each.

Rates come from the links of the node (`topology.rates.node_rates`), not from the name of the machine. Only one node of
each kind is looked at, so 16,384 GPUs cost as much as sixteen.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from topology.cluster import Cluster, Nic
from topology.rates.node_rates import HOST_LATENCY_S, Edge, NodeRates, Ring, node_rates
from topology.rates.partition import best_partition

# NCCL takes 10 Gb/s for a port whose speed it cannot read: NVIDIA/nccl @5067397c src/graph/topo.cc.
UNKNOWN_NIC_BYTES_PER_S = 10e9 / 8
MAX_SCORED_EXACTLY = 2000  # most sets of GPUs of one size that are scored exactly: all of a node with 12 GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """`ranks` ranks, `ranks_per_node` of them on a node; `siblings` such groups communicate there at the same time.

    `stride` is the distance in physical GPU index between neighbours inside a node (1: adjacent GPUs). `span_nodes` is
    how many nodes lie between the first and the last of the group, both included; 0 means that they are adjacent.
    `placed` are the GPU positions of each group on a node where the placement is decided; empty: the best ones.
    """

    ranks: int
    ranks_per_node: int
    siblings: int = 1
    stride: int = 1
    span_nodes: int = 0
    placed: tuple[tuple[int, ...], ...] = ()

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRates:
    """Bottleneck rates of one group in bytes/s, per rank and per direction; shared links are divided among siblings.

    The `nccl` fields are the same with the rates of NCCL's topology model. `inter_bytes_per_s` is for neighbour
    patterns (rings, trees), `inter_all_to_all_bytes_per_s` for patterns where every node sends to every other, which
    cross the spine more. A rate of zero means that there is no path.
    """

    intra_bytes_per_s: float  # between neighbours in a node; infinite for a single rank per node
    inter_bytes_per_s: float  # NIC bandwidth this group gets on each node, all its ranks there together
    inter_latency_s: float
    nvls: bool = False  # the NVSwitch hub of all ranks on a node can reduce and multicast in the switch
    compute_capability: int = 0
    intra_nccl_bytes_per_s: float = 0.0
    inter_all_to_all_bytes_per_s: float = 0.0
    ports_bytes_per_s: float = 0.0  # what `inter_bytes_per_s` would be if only ports limited it, not the host's links
    layer: str = ""  # what the ring of a node runs on: nvswitch, nvlink, host, or self for one rank
    gpus: tuple[int, ...] = ()  # positions of the slowest such group on its node


def group_shape(*, size: int, stride: int, gpus_per_node: int, world: int) -> GroupShape:
    """Return the shape of the groups of a mesh axis with `size` ranks, `stride` apart, ranks filling nodes in order."""
    per_node = 1 if stride >= gpus_per_node else min(size, max(1, gpus_per_node // stride))
    on_node = min(gpus_per_node, world)
    siblings = max(1, on_node // per_node) if size > per_node else max(1, on_node // max(size, 1))
    nodes = -(-size // per_node)
    span = -(-((size - 1) * stride + 1) // gpus_per_node) if nodes > 1 else 1
    return GroupShape(
        ranks=size,
        ranks_per_node=per_node,
        siblings=siblings,
        stride=stride if per_node > 1 else 1,
        span_nodes=span if span > nodes else 0,
    )


def group_rates(cluster: Cluster, shape: GroupShape, gpus: tuple[int, ...] | None = None) -> GroupRates:
    """Return the bottleneck rates of a group of `shape` on `cluster`; the worst node and the worst sibling decide.

    The ranks of a node get the best GPUs for them (GPUs off the fabric are left out while there are enough others),
    or those at the positions `gpus` of every node, alone. A group that needs a network where there is none, or more
    GPUs than a node has, gets the rate zero.
    """
    key = (id(cluster), shape, gpus)
    entry = _group_rates_cache.get(key)
    if entry is None or entry[0] is not cluster:
        if len(_group_rates_cache) >= 4096:
            _group_rates_cache.clear()
        entry = _group_rates_cache[key] = (cluster, _group_rates(cluster, shape, gpus))
    return entry[1]


# Each entry keeps its cluster alive, so that an id in a key cannot come to mean another cluster.
_group_rates_cache: dict[tuple[int, GroupShape, tuple[int, ...] | None], tuple[Cluster, GroupRates]] = {}


def _group_rates(cluster: Cluster, shape: GroupShape, gpus: tuple[int, ...] | None) -> GroupRates:
    worst: GroupRates | None = None
    for position, group in enumerate(cluster.groups):
        if not group.node.gpus:
            continue
        rates = _rates_on_node(cluster, node_rates(cluster, position), shape, gpus)
        if worst is None:
            worst = rates
        else:
            slower = min(worst, rates, key=lambda r: r.intra_bytes_per_s)
            worst = replace(
                slower,
                intra_nccl_bytes_per_s=min(worst.intra_nccl_bytes_per_s, rates.intra_nccl_bytes_per_s),
                inter_bytes_per_s=min(worst.inter_bytes_per_s, rates.inter_bytes_per_s),
                inter_all_to_all_bytes_per_s=min(
                    worst.inter_all_to_all_bytes_per_s, rates.inter_all_to_all_bytes_per_s
                ),
                ports_bytes_per_s=min(worst.ports_bytes_per_s, rates.ports_bytes_per_s),
                nvls=worst.nvls and rates.nvls,
                compute_capability=min(worst.compute_capability, rates.compute_capability),
            )
    if worst is None:
        raise ValueError(f"cluster {cluster.name} has no GPUs")
    return worst


def _rates_on_node(cluster: Cluster, rates: NodeRates, shape: GroupShape, gpus: tuple[int, ...] | None) -> GroupRates:
    groups = (gpus,) if gpus is not None else shape.placed or sibling_groups(rates, shape)
    if not groups or len(groups[0]) < shape.ranks_per_node:
        slowest = Ring(bytes_per_s=0.0, nccl_bytes_per_s=0.0, latency_s=HOST_LATENCY_S, layer="host")
        chosen: tuple[int, ...] = ()
    else:
        rings = rates.concurrent_rings(groups)
        at = min(range(len(rings)), key=lambda i: rings[i].bytes_per_s)
        slowest, chosen = rings[at], tuple(groups[at])
    networked = cluster.fabric is not None
    inter = network_bytes_per_s(rates, groups) if networked else 0.0
    ports = network_bytes_per_s(rates, groups, ports_alone=True) if networked else 0.0
    ring, all_to_all = _spine_shares(cluster, shape)
    hubs = {rates.ports[gpu][0] for gpu in chosen if gpu in rates.ports}
    kinds = [cluster.kind(rates.node.gpus[gpu].kind) for gpu in chosen] or [cluster.slowest_kind]
    return GroupRates(
        intra_bytes_per_s=slowest.bytes_per_s,
        intra_nccl_bytes_per_s=slowest.nccl_bytes_per_s,
        inter_bytes_per_s=inter * ring,
        inter_all_to_all_bytes_per_s=inter * all_to_all,
        ports_bytes_per_s=ports * ring,
        inter_latency_s=cluster.fabric.latency_s if cluster.fabric is not None else 0.0,
        nvls=slowest.layer == "nvswitch" and hubs <= rates.multicast,
        compute_capability=min(kind.compute_capability for kind in kinds),
        layer=slowest.layer,
        gpus=chosen,
    )


# Which GPUs of a node each group uses


def sibling_groups(rates: NodeRates, shape: GroupShape) -> tuple[tuple[int, ...], ...]:
    """Return the GPU positions of each of the node's groups of `shape`, from the best order of its GPUs.

    Empty when the node has too few GPUs for even one group.
    """
    per_group, block = shape.ranks_per_node, shape.ranks_per_node * shape.stride
    count = len(rates.node.gpus)
    if per_group > count:
        return ()
    if per_group == 1:
        usable = rates.on_fabric if shape.siblings <= len(rates.on_fabric) else tuple(range(count))
        return tuple((gpu,) for gpu in usable[: shape.siblings])
    # Blocks of contiguous ranks: the groups themselves, or as many interleaved groups as the stride.
    order = gpu_order(rates, shape.stride if shape.stride > 1 else per_group, per_group * shape.siblings)
    groups = []
    for base in range(0, len(order) - block + 1, block):
        groups += [order[base + offset : base + block : shape.stride] for offset in range(shape.stride)]
    if not groups:  # the stride does not fit: spread the group over all GPUs in the order
        step = max(1, len(order) // per_group)
        groups = [order[: step * per_group : step]]
    return tuple(groups[: shape.siblings])


def gpu_order(rates: NodeRates, block: int, need: int) -> tuple[int, ...]:
    """Return GPU positions so that each run of `block` is a group with fast links: at least `need` positions, more if
    they fit.

    GPUs off the fabric come last, and only if `need` cannot be met without them.
    """
    count = len(rates.node.gpus)
    usable = rates.on_fabric if need <= len(rates.on_fabric) // block * block else tuple(range(count))
    if rates.uniform and len(usable) == count:
        return usable
    groups = len(usable) // block
    split = best_partition(usable, block, groups, lambda group: group_score(rates, group))
    ordered = tuple(gpu for group in split for gpu in group)
    return ordered + tuple(gpu for gpu in usable if gpu not in ordered)


def group_score(rates: NodeRates, group: tuple[int, ...]) -> tuple[float, float]:
    """Return how good a group is: its ring's rate, then how few shared edges it uses.

    On nodes with thousands of possible groups a single ring approximates the best mix of rings.
    """
    many = math.comb(len(rates.node.gpus), len(group)) > MAX_SCORED_EXACTLY
    ring = rates.single_ring(group) if many else rates.ring(group)
    return ring.bytes_per_s, -float(sum(ring.loads.values()))


# The network


def network_bytes_per_s(rates: NodeRates, groups: tuple[tuple[int, ...], ...], *, ports_alone: bool = False) -> float:
    """Return the NIC bandwidth the worst group has on this node, in bytes/s and direction.

    Each GPU uses the ports nearest to it; a port is divided among the GPUs that use it, and so is every host edge,
    which `ports_alone` takes to be fast enough.
    """
    ports = [nic for nic in rates.node.nics if nic.up]
    if not groups or not ports:
        return 0.0
    used = {gpu: near_ports(rates, gpu) for group in groups for gpu in group}
    sharers = Counter(nic.label for near in used.values() for nic in near)
    flows: list[tuple[int, float, tuple[Edge, ...]]] = []
    loads: dict[Edge, float] = {}
    for gpu, near in used.items():
        for nic in near:
            share = _port_rate(nic) / sharers[nic.label]
            path = rates.host_path(rates.node.gpus[gpu].vertex, nic.vertex) or ()
            flows.append((gpu, share, path))
            for edge in path:
                loads[edge] = loads.get(edge, 0.0) + share
    by_gpu: dict[int, float] = dict.fromkeys(used, 0.0)
    for gpu, share, path in flows:
        slow = 0.0 if ports_alone else max((loads[a, b] / rates.host[a][b][0] for a, b in path), default=0.0)
        by_gpu[gpu] += share / max(1.0, slow)
    return min(sum(by_gpu[gpu] for gpu in group) for group in groups)


def near_ports(rates: NodeRates, gpu: int) -> tuple[Nic, ...]:
    """Return the working ports nearest to a GPU: as the node lists them, else by hops, else all of its tray."""
    node = rates.node
    ports = [nic for nic in node.nics if nic.up]
    listed = node.closest_nics.get(str(node.gpus[gpu].index), ())
    near = [nic for nic in ports if nic.label in listed or nic.name in listed]
    if near:
        return tuple(near)
    hops = {nic.label: rates.host_path(node.gpus[gpu].vertex, nic.vertex) for nic in ports}
    reached = [len(path) for path in hops.values() if path is not None]
    if reached:
        return tuple(nic for nic in ports if (path := hops[nic.label]) is not None and len(path) == min(reached))
    return tuple(nic for nic in ports if nic.tray == node.gpus[gpu].tray) or tuple(ports)


def _port_rate(nic: Nic) -> float:
    return nic.bytes_per_s if nic.bytes_per_s is not None else UNKNOWN_NIC_BYTES_PER_S


def _spine_shares(cluster: Cluster, shape: GroupShape) -> tuple[float, float]:
    """Return the fractions of its NIC rate that a ring and an all-to-all keep where they leave the leaf switch.

    A ring crosses each leaf boundary once. With nodes `d` apart in a group, `min(d, leaf)` rings cross there at the
    same time and share the uplinks, which carry `leaf / oversubscription` ports' worth. Of an all-to-all, all but one
    leaf's share leaves the leaf.
    """
    fabric, span = cluster.fabric, max(shape.span_nodes, shape.nodes)
    if fabric is None or fabric.oversubscription <= 1 or span <= fabric.nodes_per_leaf:
        return 1.0, 1.0
    others = max(1, shape.nodes - 1)
    distance = max(1, round((span - 1) / others))
    ring = fabric.nodes_per_leaf / (fabric.oversubscription * min(distance, fabric.nodes_per_leaf))
    own = min(shape.nodes, max(1, fabric.nodes_per_leaf // distance))
    leaving = (shape.nodes - own) / others
    return min(1.0, ring), min(1.0, 1.0 / (fabric.oversubscription * leaving)) if leaving > 0 else 1.0
