"""Machines of several kinds on one fabric, and single parts of a machine that are slower than the rest.

A cluster has a group for each kind of node; plans assume the slowest kind where all GPUs wait for each other
(`Cluster.slowest_kind`, `topology.rates.groups`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from topology.cluster import Cluster, GpuKind, LinkState, Node, NodeGroup
from topology.errors import BadCluster


def joined(parts: Sequence[Cluster], *, where: str) -> Cluster:
    """Return one cluster with the nodes of all `parts`. Raises BadCluster where a part has no network."""
    fabrics = [part.fabric for part in parts]
    bare = next((part for part in parts if part.fabric is None), None)
    if bare is not None or any(fabric is None for fabric in fabrics):
        raise BadCluster(
            f"{where} joins {bare.name if bare else 'nodes'} without a network to others",
            why="ranks of one step exchange data over a fabric that all nodes are on",
            remedy='say "nic_gbit_per_gpu" of every part, or plan each part by itself with --cluster',
        )
    known = [fabric for fabric in fabrics if fabric is not None]
    return Cluster(
        name=" + ".join(part.name for part in parts),
        gpu_kinds=tuple({kind.name: kind for part in parts for kind in part.gpu_kinds}.values()),
        groups=tuple(group for part in parts for group in part.groups),
        fabric=replace(
            known[0],
            oversubscription=max(fabric.oversubscription for fabric in known),
            latency_s=max(fabric.latency_s for fabric in known),
            rdma=all(fabric.rdma for fabric in known),
        ),
        findings=tuple(finding for part in parts for finding in part.findings),
    )


def with_slow_parts(
    cluster: Cluster,
    *,
    gpus: Sequence[tuple[float, ...]] = (),
    links: Sequence[tuple[float, ...]] = (),
    ports: Sequence[tuple[float, ...]] = (),
    where: str,
) -> Cluster:
    """Return a cluster of whose first node some `gpus` compute at a share of their rate, and some NVLink `links` and
    network `ports` of GPUs carry a share of theirs: pairs of a GPU and the share. Raises BadCluster.
    """
    first, *others = cluster.groups
    node, kinds = first.node, list(cluster.gpu_kinds)
    for gpu, share in _pairs(gpus, node, f"{where}: slow_gpus"):
        kind = _slower(cluster.kind(node.gpus[gpu].kind), share)
        kinds.append(kind)
        slow = tuple(replace(one, kind=kind.name) if at == gpu else one for at, one in enumerate(node.gpus))
        node = replace(node, gpus=slow)
    for gpu, share in _pairs(links, node, f"{where}: slow_links"):
        end = node.gpus[gpu].vertex
        changed = tuple(
            replace(
                link,
                bytes_per_s=_share(link.bytes_per_s, share),
                nccl_bytes_per_s=_share(link.nccl_bytes_per_s, share),
                state=LinkState.DEGRADED,
            )
            if end in {link.a, link.b} and link.label.startswith("NV")
            else link
            for link in node.links
        )
        if changed == node.links:
            raise BadCluster(f"{where}: slow_links names GPU {gpu}, which has no NVLink", remedy="slow_ports")
        node = replace(node, links=changed)
    for gpu, share in _pairs(ports, node, f"{where}: slow_ports"):
        if gpu >= len(node.nics):
            raise BadCluster(f"{where}: slow_ports names port {gpu} of {len(node.nics)}")
        slow_ports = tuple(
            replace(nic, bytes_per_s=_share(nic.bytes_per_s, share)) if at == gpu else nic
            for at, nic in enumerate(node.nics)
        )
        node = replace(node, nics=slow_ports)
    rest = (replace(first, count=first.count - 1),) if first.count > 1 else ()
    return replace(
        cluster,
        gpu_kinds=tuple({kind.name: kind for kind in kinds}.values()),
        groups=(NodeGroup(node=node), *rest, *others),
    )


def with_host_memory(cluster: Cluster, nbytes: int, where: str) -> Cluster:
    """Return the cluster with `host_memory_bytes` of every node's host replaced. Raises BadCluster."""
    if nbytes <= 0:
        raise BadCluster(f"{where}: host_memory_gib is not above zero", remedy='"host_memory_gib": 512')
    groups = (replace(one, node=replace(one.node, host_memory_bytes=nbytes)) for one in cluster.groups)
    return replace(cluster, groups=tuple(groups))


def _share(rate: float | None, share: float) -> float | None:
    """Return `share` of a rate; None for an unknown rate."""
    return None if rate is None else rate * share


def _pairs(pairs: Sequence[tuple[float, ...]], node: Node, where: str) -> list[tuple[int, float]]:
    for pair in pairs:
        if len(pair) != 2 or pair[0] != int(pair[0]) or not 0 <= pair[0] < len(node.gpus) or not 0 < pair[1] <= 1:
            raise BadCluster(
                f"{where} has {list(pair)}",
                why=f"each is a GPU of the first node, 0 to {len(node.gpus) - 1}, and a share of its rate, up to 1",
                remedy="[[3, 0.8]]",
            )
    return [(int(gpu), float(share)) for gpu, share in pairs]


def _slower(kind: GpuKind, share: float) -> GpuKind:
    """Return the kind with compute rates multiplied by a share, as by heat or a power limit; memory keeps its rate."""

    def scaled(rates: dict[str, float]) -> dict[str, float]:
        return {dtype: rate * share for dtype, rate in rates.items()}

    return replace(
        kind,
        name=f"{kind.name}-at-{share:.2g}",
        title=f"{kind.title} at {share:.0%}",
        aliases=(),
        peak_flops=scaled(kind.peak_flops),
        achieved_flops=scaled(kind.achieved_flops),
    )
