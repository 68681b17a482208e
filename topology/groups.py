"""How a communicator lies on the machine, and the rates it finds there.

A collective's cost depends on few facts: how many ranks, how many of them share a node, how many sibling groups send
through the same NICs at the same time, and the bottleneck rates inside and between nodes. Both types are hashable, so
the handful of distinct groups among thousands of candidate plans is costed once each.
"""

from __future__ import annotations

from dataclasses import dataclass

from topology.cluster import Cluster, LinkKind


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """`ranks` of which `ranks_per_node` sit together; `siblings` such groups of every node talk at the same time.

    `stride` is the distance in physical GPU index between neighbours inside a node (1: adjacent GPUs).
    """

    ranks: int
    ranks_per_node: int
    siblings: int = 1
    stride: int = 1

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRates:
    """Bottleneck rates of one group, per rank and per direction, shared links already divided among siblings."""

    intra_bytes_per_s: float  # between neighbours in a node; infinite for a single rank per node
    intra_latency_s: float
    inter_bytes_per_s: float  # NIC bandwidth this group gets on each node, all its ranks there together
    inter_latency_s: float
    nvswitch: bool = False  # the ranks of a node hang on one NVSwitch hub
    nvls: bool = False  # and it can reduce and multicast
    compute_capability: int = 0


def group_shape(*, size: int, stride: int, gpus_per_node: int, world: int) -> GroupShape:
    """Return the shape of the groups of a mesh axis with `size` ranks, `stride` apart, ranks filling nodes in order."""
    per_node = 1 if stride >= gpus_per_node else min(size, max(1, gpus_per_node // stride))
    on_node = min(gpus_per_node, world)
    siblings = max(1, on_node // per_node) if size > per_node else max(1, on_node // max(size, 1))
    return GroupShape(ranks=size, ranks_per_node=per_node, siblings=siblings, stride=stride if per_node > 1 else 1)


def group_rates(cluster: Cluster, shape: GroupShape) -> GroupRates:
    """Return the bottleneck rates of a group on the first node of `cluster` (all nodes alike)."""
    node = cluster.groups[0].node
    kind = cluster.slowest_kind
    switched = any(link.kind is LinkKind.NVSWITCH for link in node.links)
    intra = kind.nvlink_links * kind.nvlink_bytes_per_s if switched else kind.pcie_bytes_per_s
    nic_total = sum(nic.bytes_per_s or 0.0 for nic in node.nics if nic.up)
    return GroupRates(
        intra_bytes_per_s=intra,
        intra_latency_s=2e-6 if switched else 5e-6,
        inter_bytes_per_s=nic_total / shape.siblings if nic_total else 0.0,
        inter_latency_s=cluster.fabric.latency_s if cluster.fabric else 0.0,
        nvswitch=switched,
        nvls=any(vertex.multicast for vertex in node.vertices),
        compute_capability=kind.compute_capability,
    )
