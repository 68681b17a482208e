"""What a fault costs in time: the machine as it should be beside the machine as it is, under one reference operation.

The reference is an all-reduce of 256 MiB, a gradient bucket of a large model: big enough that bandwidth decides. Times
are of the ring at the rates of the links, so they compare two states of one machine; they are not predictions of NCCL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from topology.cluster import Cluster, GpuKind, Link, LinkKind, LinkState, Node, NodeGroup, VertexKind
from topology.groups import GroupShape, group_rates

REFERENCE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one operation now, and as it should be. `source` says what the rates are: datasheet or measured."""

    op: str
    nbytes: int
    gpus: tuple[int, ...]
    now_s: float
    expected_s: float
    source: str = "datasheet"

    @property
    def text(self) -> str:
        times = f"takes {duration(self.now_s)} instead of {duration(self.expected_s)}"
        ratio = self.now_s / self.expected_s if self.expected_s else 0.0
        who = f" on GPUs {', '.join(map(str, self.gpus))}" if 1 < len(self.gpus) <= 16 else ""
        return f"{self.op} of {self.nbytes / 2**20:.0f} MiB{who} {times} ({ratio:.1f}x, {self.source} rates)"


def duration(seconds: float) -> str:
    """Return a time with the unit that fits it."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def as_expected(cluster: Cluster) -> Cluster:
    """Return `cluster` with every NVLink of its first node as the datasheet, else its siblings, would have it.

    GPUs that fell off an NVSwitch are put back, lost links are restored, measured NVLink rates are dropped.
    Cables keep their count: which bridges a machine was bought with cannot be known.
    """
    node = cluster.groups[0].node
    kinds = {kind.name: kind for kind in cluster.gpu_kinds}
    kind_of = {gpu.vertex: kinds[gpu.kind] for gpu in node.gpus if gpu.kind in kinds}
    usual = usual_links(node)
    links = [_restored(link, kind_of, usual) for link in node.links]
    hubs = [vertex.id for vertex in node.vertices if vertex.kind is VertexKind.NVSWITCH]
    on_hub = {link.a for link in node.links if link.kind is LinkKind.NVSWITCH}
    if len(hubs) == 1 and 2 * len(on_hub) > len(node.gpus):
        for gpu in node.gpus:
            if gpu.vertex not in on_hub:
                bare = Link(a=gpu.vertex, b=hubs[0], kind=LinkKind.NVSWITCH, state=LinkState.ABSENT, count=0)
                links.append(_restored(bare, kind_of, usual))
    gpus = tuple(replace(gpu, healthy=True) for gpu in node.gpus)
    mended = replace(node, gpus=gpus, links=tuple(links))
    return replace(cluster, groups=(NodeGroup(node=mended, count=cluster.groups[0].count), *cluster.groups[1:]))


def usual_links(node: Node) -> int:
    """Return the link count that most GPUs of the NVSwitch fabric have; the larger where two are equally common."""
    counts = Counter(link.count for link in node.links if link.kind is LinkKind.NVSWITCH and link.count)
    return max(counts, key=lambda count: (counts[count], count)) if counts else 0


def links_of(node: Node, vertex: str) -> int:
    """Return how many NVLinks of a GPU are in use, to a switch or to peers."""
    return sum(
        link.count
        for link in node.links
        if vertex in {link.a, link.b}
        and link.kind in {LinkKind.NVLINK, LinkKind.NVSWITCH}
        and link.state is not LinkState.ABSENT
    )


def _restored(link: Link, kind_of: dict[str, GpuKind], usual: int) -> Link:
    if link.kind not in {LinkKind.NVLINK, LinkKind.NVSWITCH}:
        return link
    ends = [kind_of[end] for end in (link.a, link.b) if end in kind_of and kind_of[end].nvlink_links]
    count = link.count
    if link.kind is LinkKind.NVSWITCH:
        count = max(usual, min((kind.nvlink_links for kind in ends), default=0))
    if count == link.count and link.state is LinkState.UP:
        return replace(link, measured_bytes_per_s=None)
    rate = count * min((kind.nvlink_bytes_per_s for kind in ends), default=0.0)
    return replace(
        link, count=count, bytes_per_s=rate or None, measured_bytes_per_s=None, state=LinkState.UP, confidence=1.0
    )


def all_reduce_s(cluster: Cluster, positions: Sequence[int], nbytes: int = REFERENCE_BYTES) -> float | None:
    """Return the seconds of a ring all-reduce over GPUs of one node, given by position; None where a rate is unknown."""
    ranks = len(positions)
    if ranks < 2:
        return None
    rates = group_rates(cluster, GroupShape(ranks=ranks, ranks_per_node=ranks), tuple(positions))
    if rates.intra_bytes_per_s <= 0:
        return None
    return 2 * (ranks - 1) / ranks * nbytes / rates.intra_bytes_per_s


def group_cost(cluster: Cluster, positions: Sequence[int] | None = None) -> Cost | None:
    """Return what the state of the links costs a group of the first node (all its GPUs by default).

    None when the links are as expected, or when rates are unknown.
    """
    node = cluster.groups[0].node
    chosen = tuple(range(len(node.gpus))) if positions is None else tuple(positions)
    now, expected = all_reduce_s(cluster, chosen), all_reduce_s(as_expected(cluster), chosen)
    if now is None or expected is None or now <= 1.001 * expected:
        return None
    measured = any(link.measured_bytes_per_s is not None for link in node.links)
    return Cost(
        op="all-reduce",
        nbytes=REFERENCE_BYTES,
        gpus=tuple(node.gpus[at].index for at in chosen),
        now_s=now,
        expected_s=expected,
        source="measured and datasheet" if measured else "datasheet",
    )


def without_nvlink(cluster: Cluster) -> Cost | None:
    """Return what all GPUs of the first node lose if none of its NVLinks carries data; None where rates are unknown."""
    node = cluster.groups[0].node
    nvlinks = {LinkKind.NVLINK, LinkKind.NVSWITCH}
    dead = tuple(replace(link, state=LinkState.ABSENT) if link.kind in nvlinks else link for link in node.links)
    dark = replace(cluster, groups=(replace(cluster.groups[0], node=replace(node, links=dead)), *cluster.groups[1:]))
    everyone = range(len(node.gpus))
    now, expected = all_reduce_s(dark, everyone), all_reduce_s(as_expected(cluster), everyone)
    if now is None or expected is None or now <= 1.001 * expected:
        return None
    indices = tuple(gpu.index for gpu in node.gpus)
    return Cost(op="all-reduce", nbytes=REFERENCE_BYTES, gpus=indices, now_s=now, expected_s=expected)


def bridged_cost(cluster: Cluster, alone: Sequence[int]) -> Cost | None:
    """Return what a pair with a GPU of `alone` (indices without a bridge) takes beside a bridged pair."""
    node = cluster.groups[0].node
    position = {gpu.index: at for at, gpu in enumerate(node.gpus)}
    bridged = [
        tuple(sorted(int(end.removeprefix("gpu")) for end in (link.a, link.b)))
        for link in node.links
        if link.kind is LinkKind.NVLINK and link.state is not LinkState.ABSENT
    ]
    if not bridged or not alone or not {*bridged[0], alone[0]} <= set(position):
        return None
    pair = (bridged[0][0], alone[0])
    now = all_reduce_s(cluster, [position[gpu] for gpu in pair])
    expected = all_reduce_s(cluster, [position[gpu] for gpu in bridged[0]])
    if now is None or expected is None:
        return None
    return Cost(op="all-reduce", nbytes=REFERENCE_BYTES, gpus=pair, now_s=now, expected_s=expected)


def without_text(cluster: Cluster, lost: Sequence[int]) -> str:
    """Say what the same operation takes without the GPUs `lost` (nvidia-smi's indices), where that can be known."""
    node = cluster.groups[0].node
    rest = [at for at, gpu in enumerate(node.gpus) if gpu.index not in set(lost)]
    seconds = all_reduce_s(cluster, rest)
    return f"; without GPU {', '.join(map(str, lost))} it takes {duration(seconds)}" if seconds is not None else ""


def host_slowdown(cluster: Cluster, gpus: Sequence[int], share: float) -> Cost | None:
    """Return what a host link at `share` of its rate costs a copy of the reference size; None for unknown models."""
    rates = [
        cluster.kind(gpu.kind).pcie_bytes_per_s
        for gpu in cluster.groups[0].node.gpus
        if gpu.index in set(gpus) and cluster.kind(gpu.kind).pcie_bytes_per_s
    ]
    if not rates or not 0 < share < 1:
        return None
    expected = REFERENCE_BYTES / min(rates)
    return Cost(op="copy", nbytes=REFERENCE_BYTES, gpus=tuple(gpus), now_s=expected / share, expected_s=expected)
