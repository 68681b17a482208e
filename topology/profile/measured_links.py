"""Write measured rates into the links of a cluster, so that plans use them.

A link gets the rate that one flow reached over it, in addition to its nominal rate. A fabric whose state was unknown
counts as working once copies over it reached `TRUSTED_SHARE` of their nominal rate.
"""

from __future__ import annotations

from dataclasses import replace

from topology.cluster import Cluster, Link, LinkKind, LinkState, Node, Source
from topology.profile.measurement import Flow, Measurement, gpu_index, median_or_none, shared_groups

TRUSTED_SHARE = 0.75  # of the nominal rate; healthy copies reach 88 % (NVIDIA/nccl#1264)
CEILING = 1.1  # of the nominal rate: the slack that `topology.catalog.verify` allows


def with_measured_rates(cluster: Cluster, measured: Measurement) -> Cluster:
    """Return `cluster` with measured rates on the links of its first node. A dry run on a CPU changes nothing.

    NVSwitch port: the median over peers of the slower direction. Cable: the slower direction of its pair. Slot: the
    slower of to and from the host. Uplink shared by a group of GPUs: what the group reached together. Rates above the
    datasheet by more than a tenth are a fault of the measurement and are left out.
    """
    if measured.device == "cpu":
        return cluster
    node = cluster.groups[0].node
    links = tuple(_measured(link, node, measured) for link in node.links)
    return replace(cluster, groups=(replace(cluster.groups[0], node=replace(node, links=links)), *cluster.groups[1:]))


def _measured(link: Link, node: Node, measured: Measurement) -> Link:
    if link.state is LinkState.ABSENT:
        return link
    rate = _rate(link, node, measured)
    if rate is None or (link.bytes_per_s and rate > CEILING * link.bytes_per_s):
        return link
    trusted = link.bytes_per_s is not None and rate >= TRUSTED_SHARE * link.bytes_per_s
    state = LinkState.UP if link.state is LinkState.UNKNOWN and trusted else link.state
    return replace(link, measured_bytes_per_s=rate, source=Source.MEASURED, state=state, confidence=1.0)


def _rate(link: Link, node: Node, measured: Measurement) -> float | None:
    index_of = {gpu.vertex: gpu.index for gpu in node.gpus}
    pairs = measured.pairs()
    gpu, other = index_of.get(link.a), index_of.get(link.b)
    if link.kind is LinkKind.NVLINK and gpu is not None and other is not None:
        return _slower(pairs.get((gpu, other)), pairs.get((other, gpu)))
    if link.kind is LinkKind.NVSWITCH and gpu is not None:
        on_hub = [index_of[spoke.a] for spoke in node.links if spoke.b == link.b and spoke.a in index_of]
        rates = [_slower(pairs.get((gpu, peer)), pairs.get((peer, gpu))) for peer in on_hub if peer != gpu]
        return median_or_none(rate for rate in rates if rate is not None)
    if link.kind is LinkKind.PCIE and gpu is not None:
        return _slower(measured.host("host_to_device").get(gpu), measured.host("device_to_host").get(gpu))
    if link.kind is LinkKind.PCIE:
        return _uplink(link, node, measured)
    return None


def _slower(one: Flow | None, other: Flow | None) -> float | None:
    known = [flow.bytes_per_s for flow in (one, other) if flow is not None]
    return min(known) if len(known) == 2 else None


def _uplink(link: Link, node: Node, measured: Measurement) -> float | None:
    """Return the total rate of the GPUs below a switch, if they are one of the measured groups that share an uplink."""
    below = sorted(_below(link.a, node))
    if below not in shared_groups(measured):
        return None
    totals = []
    for flows in measured.flows:
        if flows.pattern in {"all_host_to_device", "all_device_to_host"}:
            ends = [gpu_index(flow.dst if flow.src == "host" else flow.src) for flow in flows.flows]
            totals.append(sum(f.bytes_per_s for end, f in zip(ends, flows.flows, strict=True) if end in below))
    return min(totals) if len(totals) == 2 else None


def _below(vertex: str, node: Node) -> set[int]:
    """Return the GPUs below `vertex` in the PCIe tree; links go from the lower end to the upper."""
    index_of = {gpu.vertex: gpu.index for gpu in node.gpus}
    found: set[int] = set()
    waiting, seen = [vertex], {vertex}
    while waiting:
        at = waiting.pop()
        for link in node.links:
            if link.kind is LinkKind.PCIE and link.b == at and link.a not in seen:
                seen.add(link.a)
                waiting.append(link.a)
                if link.a in index_of:
                    found.add(index_of[link.a])
    return found
