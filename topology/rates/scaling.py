"""Copies of a cluster with one property changed: link rates, memory, or the number of GPUs.

Flip points are found on such copies: "the second plan would win if the network gave 31 GB/s".
"""

from __future__ import annotations

from dataclasses import replace

from topology.cluster import Cluster, Link, LinkKind, Node, NodeGroup, part_of_node

_NVLINK = frozenset({LinkKind.NVLINK, LinkKind.NVSWITCH})


def _scaled_rate(rate: float | None, factor: float) -> float | None:
    return None if rate is None else rate * factor


def _scaled_link(link: Link, factor: float, kinds: frozenset[LinkKind]) -> Link:
    if link.kind not in kinds:
        return link
    return replace(
        link,
        bytes_per_s=_scaled_rate(link.bytes_per_s, factor),
        measured_bytes_per_s=_scaled_rate(link.measured_bytes_per_s, factor),
    )


def _map_nodes(cluster: Cluster, change: dict[int, Node]) -> Cluster:
    groups = tuple(replace(group, node=change[i]) for i, group in enumerate(cluster.groups))
    return replace(cluster, groups=groups)


def scale_network(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with every NIC and network link `factor` times as fast."""
    kinds = frozenset({LinkKind.NETWORK})
    changed = {
        i: replace(
            group.node,
            nics=tuple(replace(nic, bytes_per_s=_scaled_rate(nic.bytes_per_s, factor)) for nic in group.node.nics),
            links=tuple(_scaled_link(link, factor, kinds) for link in group.node.links),
        )
        for i, group in enumerate(cluster.groups)
    }
    return _map_nodes(cluster, changed)


def scale_nvlink(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with every NVLink `factor` times as fast.

    NCCL's own rates stay, so it chooses the same algorithms, protocols and channels as on `cluster`. Its formulas are
    made for real links; with scaled ones NCCL would sometimes change to a slower algorithm
    (examples/validation/monotone.md).
    """
    kinds = tuple(replace(kind, nvlink_bytes_per_s=kind.nvlink_bytes_per_s * factor) for kind in cluster.gpu_kinds)
    changed = {
        i: replace(group.node, links=tuple(_scaled_link(link, factor, _NVLINK) for link in group.node.links))
        for i, group in enumerate(cluster.groups)
    }
    return replace(_map_nodes(cluster, changed), gpu_kinds=kinds)


def scale_flops(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with every GPU `factor` times as fast at arithmetic; its memory is as fast as before."""
    kinds = tuple(
        replace(
            kind,
            peak_flops={name: flops * factor for name, flops in kind.peak_flops.items()},
            achieved_flops={name: flops * factor for name, flops in kind.achieved_flops.items()},
        )
        for kind in cluster.gpu_kinds
    )
    return replace(cluster, gpu_kinds=kinds)


def scale_memory(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with `factor` times the memory on every GPU."""
    kinds = tuple(replace(kind, memory_bytes=int(kind.memory_bytes * factor)) for kind in cluster.gpu_kinds)
    changed = {
        i: replace(
            group.node,
            gpus=tuple(
                gpu if gpu.memory_bytes is None else replace(gpu, memory_bytes=int(gpu.memory_bytes * factor))
                for gpu in group.node.gpus
            ),
        )
        for i, group in enumerate(cluster.groups)
    }
    return replace(_map_nodes(cluster, changed), gpu_kinds=kinds)


def network_bytes_per_s(cluster: Cluster) -> float:
    """Return the network rate per GPU in bytes/s and direction, 0.0 where there is no network."""
    node = cluster.groups[0].node
    return sum(nic.bytes_per_s or 0.0 for nic in node.nics if nic.up) / len(node.gpus)


def nvlink_bytes_per_s(cluster: Cluster) -> float:
    """Return the NVLink rate of one GPU in bytes/s and direction (datasheet), 0.0 where there is no NVLink."""
    if not any(link.kind in _NVLINK for group in cluster.groups for link in group.node.links):
        return 0.0
    kind = cluster.slowest_kind
    return kind.nvlink_links * kind.nvlink_bytes_per_s


def with_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """Return a cluster of `gpus` GPUs: copies of the first node, or fewer GPUs of it.

    Raises ValueError when `gpus` is neither a multiple of a node nor smaller than one.
    """
    node = cluster.groups[0].node
    size = len(node.gpus)
    if gpus >= size:
        if gpus % size:
            raise ValueError(f"{gpus} GPUs are no whole number of {size}-GPU nodes")
        return replace(cluster, groups=(NodeGroup(node=node, count=gpus // size),))
    return replace(cluster, groups=(NodeGroup(node=part_of_node(node, gpus), count=1),))
