"""What a fault costs in time: a reference operation on the machine with the fault, and without it.

The reference is an all-reduce of 256 MiB (a gradient bucket of a large model), where bandwidth decides. Times are those
of a ring at the link rates: they compare two states of one machine and do not predict NCCL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from topology.cluster import Cluster, Finding, GpuKind, Link, LinkKind, LinkState, Node, NodeGroup, Severity, VertexKind
from topology.rates.groups import GroupShape, group_rates
from topology.units import MIB, in_mib, in_seconds

REFERENCE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one operation with the fault and without it. `source`: whether rates are datasheet or measured."""

    op: str
    nbytes: int
    gpus: tuple[int, ...]
    now_s: float
    expected_s: float
    source: str = "datasheet"

    @property
    def text(self) -> str:
        times = f"takes {in_seconds(self.now_s)} instead of {in_seconds(self.expected_s)}"
        ratio = self.now_s / self.expected_s if self.expected_s else 0.0
        who = f" on GPUs {', '.join(map(str, self.gpus))}" if 1 < len(self.gpus) <= 16 else ""
        return f"{self.op} of {in_mib(self.nbytes)}{who} {times} ({ratio:.1f}x, {self.source} rates)"


def without_faults(cluster: Cluster) -> Cluster:
    """Return `cluster` with every NVLink of its first node as in the datasheet, else as its siblings have it.

    GPUs off the NVSwitch are put back, missing links are restored, measured NVLink rates are dropped. Cables keep their
    count, since the number of bridges that were fitted is not known.
    """
    node = cluster.groups[0].node
    kinds = {kind.name: kind for kind in cluster.gpu_kinds}
    kind_of = {gpu.vertex: kinds[gpu.kind] for gpu in node.gpus if gpu.kind in kinds}
    common = most_common_link_count(node)
    links = [_without_fault(link, kind_of, common) for link in node.links]
    hubs = [vertex.id for vertex in node.vertices if vertex.kind is VertexKind.NVSWITCH]
    on_hub = {link.a for link in node.links if link.kind is LinkKind.NVSWITCH}
    if len(hubs) == 1 and 2 * len(on_hub) > len(node.gpus):
        for gpu in node.gpus:
            if gpu.vertex not in on_hub:
                bare = Link(a=gpu.vertex, b=hubs[0], kind=LinkKind.NVSWITCH, state=LinkState.ABSENT, count=0)
                links.append(_without_fault(bare, kind_of, common))
    gpus = tuple(replace(gpu, healthy=True) for gpu in node.gpus)
    repaired = replace(node, gpus=gpus, links=tuple(links))
    return replace(cluster, groups=(NodeGroup(node=repaired, count=cluster.groups[0].count), *cluster.groups[1:]))


def most_common_link_count(node: Node) -> int:
    """Return the link count that most GPUs of the NVSwitch fabric have; the larger where two are equally common."""
    counts = Counter(link.count for link in node.links if link.kind is LinkKind.NVSWITCH and link.count)
    return max(counts, key=lambda count: (counts[count], count)) if counts else 0


def links_in_use(node: Node, vertex: str) -> int:
    """Return how many NVLinks of a GPU are in use, to a switch or to peers."""
    return sum(
        link.count
        for link in node.links
        if vertex in {link.a, link.b}
        and link.kind in {LinkKind.NVLINK, LinkKind.NVSWITCH}
        and link.state is not LinkState.ABSENT
    )


def _without_fault(link: Link, kind_of: dict[str, GpuKind], common: int) -> Link:
    if link.kind not in {LinkKind.NVLINK, LinkKind.NVSWITCH}:
        return link
    ends = [kind_of[end] for end in (link.a, link.b) if end in kind_of and kind_of[end].nvlink_links]
    count = link.count
    if link.kind is LinkKind.NVSWITCH:
        count = max(common, min((kind.nvlink_links for kind in ends), default=0))
    if count == link.count and link.state is LinkState.UP:
        return replace(link, measured_bytes_per_s=None)
    rate = count * min((kind.nvlink_bytes_per_s for kind in ends), default=0.0)
    return replace(
        link, count=count, bytes_per_s=rate or None, measured_bytes_per_s=None, state=LinkState.UP, confidence=1.0
    )


def all_reduce_s(cluster: Cluster, positions: Sequence[int], nbytes: int = REFERENCE_BYTES) -> float | None:
    """Return the seconds of a ring all-reduce over GPUs of one node, given by position; None where a rate is
    unknown.
    """
    ranks = len(positions)
    if ranks < 2:
        return None
    rates = group_rates(cluster, GroupShape(ranks=ranks, ranks_per_node=ranks), tuple(positions))
    if rates.intra_bytes_per_s <= 0:
        return None
    return 2 * (ranks - 1) / ranks * nbytes / rates.intra_bytes_per_s


def group_cost(cluster: Cluster) -> Cost | None:
    """Return the cost of the link faults of the first node to a group of all its GPUs.

    None when there is no fault, or when rates are unknown.
    """
    measured = any(link.measured_bytes_per_s is not None for link in cluster.groups[0].node.links)
    return _cost_to_all(cluster, cluster, "measured and datasheet" if measured else "datasheet")


def cost_without_nvlink(cluster: Cluster) -> Cost | None:
    """Return the cost to all GPUs of the first node if no NVLink carries data; None where rates are unknown."""
    node = cluster.groups[0].node
    nvlinks = {LinkKind.NVLINK, LinkKind.NVSWITCH}
    absent = tuple(replace(link, state=LinkState.ABSENT) if link.kind in nvlinks else link for link in node.links)
    no_nvlink = replace(
        cluster, groups=(replace(cluster.groups[0], node=replace(node, links=absent)), *cluster.groups[1:])
    )
    return _cost_to_all(no_nvlink, cluster, "datasheet")


def _cost_to_all(found: Cluster, whole: Cluster, source: str) -> Cost | None:
    """Return what the faults of `found` cost all GPUs of the first node, compared with `whole` without its own."""
    gpus = tuple(gpu.index for gpu in whole.groups[0].node.gpus)
    now, expected = all_reduce_s(found, range(len(gpus))), all_reduce_s(without_faults(whole), range(len(gpus)))
    if now is None or expected is None or now <= 1.001 * expected:
        return None
    return Cost(op="all-reduce", nbytes=REFERENCE_BYTES, gpus=gpus, now_s=now, expected_s=expected, source=source)


def unbridged_pair_cost(cluster: Cluster, unbridged: Sequence[int]) -> Cost | None:
    """Return the cost of a pair with a GPU of `unbridged` (indices), compared with a bridged pair."""
    node = cluster.groups[0].node
    position = {gpu.index: at for at, gpu in enumerate(node.gpus)}
    bridged = [
        tuple(sorted(int(end.removeprefix("gpu")) for end in (link.a, link.b)))
        for link in node.links
        if link.kind is LinkKind.NVLINK and link.state is not LinkState.ABSENT
    ]
    if not bridged or not unbridged or not {*bridged[0], unbridged[0]} <= set(position):
        return None
    pair = (bridged[0][0], unbridged[0])
    now = all_reduce_s(cluster, [position[gpu] for gpu in pair])
    expected = all_reduce_s(cluster, [position[gpu] for gpu in bridged[0]])
    if now is None or expected is None:
        return None
    return Cost(op="all-reduce", nbytes=REFERENCE_BYTES, gpus=pair, now_s=now, expected_s=expected)


def time_without_text(cluster: Cluster, lost: Sequence[int]) -> str:
    """Return text with the time of the same operation without the GPUs `lost` (indices); empty where unknown."""
    node = cluster.groups[0].node
    rest = [at for at, gpu in enumerate(node.gpus) if gpu.index not in set(lost)]
    seconds = all_reduce_s(cluster, rest)
    return f"; without GPU {', '.join(map(str, lost))} it takes {in_seconds(seconds)}" if seconds is not None else ""


def slow_host_link_cost(cluster: Cluster, gpus: Sequence[int], share: float) -> Cost | None:
    """Return the cost of a host link at `share` of its rate to a copy of REFERENCE_BYTES; None for unknown models."""
    rates = [
        cluster.kind(gpu.kind).pcie_bytes_per_s
        for gpu in cluster.groups[0].node.gpus
        if gpu.index in set(gpus) and cluster.kind(gpu.kind).pcie_bytes_per_s
    ]
    if not rates or not 0 < share < 1:
        return None
    expected = REFERENCE_BYTES / min(rates)
    return Cost(op="copy", nbytes=REFERENCE_BYTES, gpus=tuple(gpus), now_s=expected / share, expected_s=expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthItem(Finding):
    """A difference between expected and found.

    `consequence` ends with the time that it costs, where rates are known; `cost` has the numbers. `source` is where it
    was found: `probe`, `links` or `measured`.
    """

    cost: Cost | None = None
    source: str = ""


def health_item(
    source: str,
    code: str,
    severity: Severity,
    what: str,
    why: str,
    consequence: str,
    remedy: str,
    gpus: tuple[int, ...] = (),
    cost: Cost | None = None,
) -> HealthItem:
    """Return a `HealthItem` from its texts in reading order."""
    return HealthItem(
        code=code,
        severity=severity,
        what=what,
        why=why,
        consequence=consequence,
        remedy=remedy,
        gpus=gpus,
        cost=cost,
        source=source,
    )
