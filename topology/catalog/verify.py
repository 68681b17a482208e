"""Check that a `Cluster` is physically possible; problems are listed as sentences.

Files come from people and from programs of other versions, so nothing is assumed here: the checks work for any
`Cluster` that decodes, including empty ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from topology.catalog.gpus import gpu_kinds
from topology.catalog.platform import MAX_GPUS_PER_NODE, PCIE_BYTES_PER_S
from topology.cluster import Cluster, GpuKind, Link, LinkKind, Node
from topology.errors import BadCluster
from topology.ranges import Range, out_of_range

SLACK = 1.1  # a rate may exceed the datasheet by a tenth: signalling rates and rounding
BOOST = 1.2  # products may exceed it by more: a datasheet's rate is at a boost clock that cards for games run above
MAX_NIC_BYTES_PER_S = 200e9  # 1.6 Tb/s, twice the fastest port of today
MAX_SMP_BYTES_PER_S = 1e12
MIN_MEMORY_BYTES = 2 << 30  # of a GPU: a program's context alone takes 1.5 GiB
MAX_GPUS = 1 << 23
SLOWEST_PER_S = 1e6  # of bytes or FLOPs; the slowest port in use carries 10 Mb/s, a little more
UNKNOWN_KIND = "unknown"  # a GPU whose model the topology text did not name: its datasheet is all zeros
RANGES: dict[str, Range] = {
    "compute_capability": (0, 999),
    "sm_count": (0, 10_000),
    "nvlink_links": (0, 1024),
    "confidence": (0, 1),
    "latency_s": (0, 1),
    "oversubscription": (1, 1000),
    "nodes_per_leaf": (1, 10**6),
    "index": (0, 1 << 20),
    "tray": (0, 1 << 20),
    "rail": (0, 1 << 20),
}
SHOWN = 8  # values out of range named at once


def verify_cluster(cluster: Cluster) -> list[str]:
    """Return what is wrong with `cluster`, one sentence each; an empty list means nothing was found."""
    problems = list(islice(out_of_range(cluster, RANGES), SHOWN))
    if problems:  # Later checks compare sizes; they would report the same values again.
        return problems
    if cluster.gpu_count > MAX_GPUS:
        problems.append(f"the cluster has {cluster.gpu_count} GPUs, expected at most {MAX_GPUS}")
    if not cluster.groups or all(not group.node.gpus for group in cluster.groups):
        problems.append("the cluster has no GPUs")
    kinds = {kind.name: kind for kind in cluster.gpu_kinds}
    problems += _duplicates("GPU kind", (kind.name for kind in cluster.gpu_kinds))
    for kind in cluster.gpu_kinds:
        if kind.name != UNKNOWN_KIND:
            problems += _check_kind(kind)
    for position, group in enumerate(cluster.groups):
        where = f"node group {position}"
        if not 1 <= group.count <= 10**6:
            problems.append(f"{where} occurs {group.count} times, expected 1 to 1000000")
        problems += [f"{where}: {problem}" for problem in _check_node(group.node, kinds)]
    return problems


def require_possible(cluster: Cluster, *, where: str) -> None:
    """Raise BadCluster with what is wrong with `cluster`; `where` begins the message."""
    problems = verify_cluster(cluster)
    if problems:
        more = f" (and {len(problems) - 6} more)" if len(problems) > 6 else ""
        raise BadCluster(
            f"{where} describes an impossible cluster: {'; '.join(problems[:6])}{more}",
            remedy="correct the file; a GPU that is not as its datasheet says needs a kind with a name of its own",
        )


def _check_kind(kind: GpuKind) -> Iterator[str]:
    if kind.memory_bytes < MIN_MEMORY_BYTES:
        yield f"{kind.name}.memory_bytes is {kind.memory_bytes}, expected at least {MIN_MEMORY_BYTES}"
    numbers: dict[str, float] = {
        "memory_bytes": kind.memory_bytes,
        "memory_bytes_per_s": kind.memory_bytes_per_s,
        "sm_count": kind.sm_count,
        **{f"peak_flops[{dtype}]": rate for dtype, rate in kind.peak_flops.items()},
    }
    for name, value in numbers.items():
        least = 1 if name == "sm_count" else SLOWEST_PER_S
        if value < least:
            yield f"{kind.name}.{name} is {value:g}, expected at least {least:g}"
    optional = {
        "l2_bytes": kind.l2_bytes,
        "power_w": kind.power_w,
        "nvlink_links": kind.nvlink_links,
        "nvlink_bytes_per_s": kind.nvlink_bytes_per_s,
        "nvlink_nccl_bytes_per_s": kind.nvlink_nccl_bytes_per_s,
        "c2c_bytes_per_s": kind.c2c_bytes_per_s,
        "pcie_bytes_per_s": kind.pcie_bytes_per_s,
    }
    for dtype, achieved in kind.achieved_flops.items():
        if not (0 < achieved <= BOOST * kind.peak_flops.get(dtype, 0.0)):
            yield f"{kind.name}.achieved_flops[{dtype}] is {achieved:g}, above {BOOST} of its peak or not positive"
    known = {known.name: known for known in gpu_kinds()}.get(kind.name)
    if known is not None:
        for name, value in (numbers | optional).items():
            published = known.peak_flops.get(name[11:-1]) if name.startswith("peak_flops") else getattr(known, name)
            if published is not None and value > SLACK * published:
                yield f"{kind.name}.{name} is {value:g}, more than the datasheet's {published:g}"


def _check_node(node: Node, kinds: dict[str, GpuKind]) -> Iterator[str]:
    if not node.gpus:
        yield "it has no GPUs"
    if len(node.gpus) > MAX_GPUS_PER_NODE:
        yield f"it has {len(node.gpus)} GPUs, expected at most {MAX_GPUS_PER_NODE}"
    yield from _duplicates("GPU index", (str(gpu.index) for gpu in node.gpus))
    yield from _duplicates("GPU UUID", (gpu.uuid for gpu in node.gpus if gpu.uuid))
    yield from _duplicates(
        "PCI bus id", (f"{gpu.tray}:{gpu.pci_bus_id.lower()}" for gpu in node.gpus if gpu.pci_bus_id)
    )
    names = [*(g.vertex for g in node.gpus), *(v.id for v in node.vertices), *(n.vertex for n in node.nics)]
    yield from _duplicates("vertex", names)
    vertices = set(names)
    for gpu in node.gpus:
        kind = kinds.get(gpu.kind)
        if kind is None:
            yield f"GPU {gpu.index} is a {gpu.kind!r}, which gpu_kinds does not list"
        elif (
            kind.name != UNKNOWN_KIND
            and gpu.memory_bytes is not None
            and not MIN_MEMORY_BYTES <= gpu.memory_bytes <= SLACK * kind.memory_bytes
        ):
            yield f"GPU {gpu.index} has {gpu.memory_bytes} bytes of memory, a {kind.name} has {kind.memory_bytes}"
    for nic in node.nics:
        rate = nic.bytes_per_s
        if rate is not None and not (rate == 0 or SLOWEST_PER_S <= rate <= MAX_NIC_BYTES_PER_S):
            yield (
                f"network port {nic.label} runs at {rate:g} bytes/s, expected 0, or {SLOWEST_PER_S:g} to"
                f" {MAX_NIC_BYTES_PER_S:g}"
            )
    labels = {name for nic in node.nics for name in (nic.label, nic.name)}
    indices = {str(gpu.index) for gpu in node.gpus}
    for index, near in node.closest_nics.items():
        if index not in indices or not set(near) <= labels:
            yield f"closest_nics of GPU {index} names a GPU or port that is not there"
    kind_of = {g.vertex: kinds[g.kind] for g in node.gpus if g.kind in kinds and g.kind != UNKNOWN_KIND}
    for link in node.links:
        yield from _check_link(link, vertices, kind_of)


def _check_link(link: Link, vertices: set[str], kind_of: dict[str, GpuKind]) -> Iterator[str]:
    where = f"link {link.a} - {link.b}"
    if missing := [end for end in (link.a, link.b) if end not in vertices]:
        yield f"{where} names {', '.join(missing)}, which is not in the node"
    if link.a == link.b:
        yield f"{where} joins a vertex to itself"
    limit = _datasheet_limit(link, kind_of)
    for name, rate in (
        ("nominal", link.bytes_per_s),
        ("NCCL", link.nccl_bytes_per_s),
        ("measured", link.measured_bytes_per_s),
    ):
        if rate is None:
            continue
        if 0 < rate < SLOWEST_PER_S:
            yield f"{where} has a {name} rate of {rate:g} bytes/s, expected 0 or at least {SLOWEST_PER_S:g}"
        elif rate > SLACK * limit:
            yield f"{where} has a {name} rate of {rate:g} bytes/s, more than the datasheet's {limit:g}"


def _datasheet_limit(link: Link, kind_of: dict[str, GpuKind]) -> float:
    """Return the fastest this link can be, in bytes per second and direction, given the GPUs at its ends."""
    ends = [kind_of[end] for end in (link.a, link.b) if end in kind_of]
    if link.kind in {LinkKind.NVLINK, LinkKind.NVSWITCH} and ends:
        return min(min(link.count, kind.nvlink_links) * kind.nvlink_bytes_per_s for kind in ends)
    if link.kind is LinkKind.C2C and ends:
        return min(kind.c2c_bytes_per_s for kind in ends)
    if link.kind is LinkKind.PCIE and ends:
        return min(kind.pcie_bytes_per_s for kind in ends)
    if link.kind is LinkKind.PCIE:
        return max(*PCIE_BYTES_PER_S.values(), MAX_NIC_BYTES_PER_S)
    return MAX_SMP_BYTES_PER_S


def _duplicates(what: str, names: Iterable[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{what} {name} occurs {count} times"
