"""What the host offers its GPUs: copies to and from its memory, and how fast its CPUs read and write there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from topology.cluster import COPY_SHARE, Cluster, LinkKind, VertexKind
from topology.rates.node_rates import ASSUMED_PCIE_BYTES_PER_S, Edge, NodeRates, node_rates

# Nominal memory bandwidth of a CPU socket, bytes/s, by the generation of its PCIe slots: the CPUs of DGX-2, DGX A100
# and DGX H100 (Xeon Platinum 8168: 6 channels of DDR4-2666; EPYC 7742: 8 of DDR4-3200; Xeon Platinum 8480C: 8 of
# DDR5-4800), and 12 channels of DDR5-6400 for the generation after them.
SOCKET_BYTES_PER_S = {"gen3": 128e9, "gen4": 204.8e9, "gen5": 307.2e9, "gen6": 614.4e9}
SLOT_BYTES_PER_S = {"gen3": 15.75e9, "gen4": 31.5e9, "gen5": 63e9, "gen6": 126e9}  # 16 lanes, one direction
GRACE_BYTES_PER_S = 500e9  # NVIDIA Grace, LPDDR5X, datasheet; CPUs that GPUs are joined to by C2C
SOCKETS = 2  # of a node, or a tray of one, that lists none; NUMA nodes may be parts of a socket


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """Bytes/s for each of several GPUs of a node while all of them transfer: `copy_bytes_per_s` of copies in one
    direction, `memory_bytes_per_s` of the CPUs' nominal memory bandwidth. `source` is the source of the latter.
    """

    copy_bytes_per_s: float
    memory_bytes_per_s: float
    source: str
    memory_bytes: float | None = None  # a GPU's share of the host's memory; None where unknown


def host_rates(cluster: Cluster, gpus: int) -> HostRates:
    """Return the rates for `gpus` GPUs of `cluster`, of which the first node takes as many as it has."""
    rates = node_rates(cluster)
    used = max(1, min(gpus, len(rates.node.gpus)))
    kinds = {link.kind for link in rates.node.links}
    sockets, memory = _sockets(rates), rates.node.host_memory_bytes
    if LinkKind.C2C in kinds:
        socket, what = GRACE_BYTES_PER_S, "Grace"
    else:
        slot = cluster.slowest_kind.pcie_bytes_per_s or ASSUMED_PCIE_BYTES_PER_S
        generation = min(SLOT_BYTES_PER_S, key=lambda gen: abs(SLOT_BYTES_PER_S[gen] - slot))
        socket, what = SOCKET_BYTES_PER_S[generation], f"servers with PCIe {generation}"
    return HostRates(
        copy_bytes_per_s=COPY_SHARE * _copy_bytes_per_s(rates, used),
        memory_bytes_per_s=sockets * socket / used,
        source=f"assumed: {sockets} CPU sockets of {socket / 1e9:.0f} GB/s nominal, as in {what}",
        memory_bytes=None if memory is None else memory / used,
    )


def _sockets(rates: NodeRates) -> int:
    trays = max(1, len({gpu.tray for gpu in rates.node.gpus}))
    listed = sum(vertex.kind is VertexKind.CPU for vertex in rates.node.vertices)
    return trays * min(SOCKETS, max(1, listed // trays)) if listed else trays * SOCKETS


def _copy_bytes_per_s(rates: NodeRates, used: int) -> float:
    """Return the slowest nominal rate between one of the first `used` GPUs and its CPU while all of them copy."""
    cpus = [vertex.id for vertex in rates.node.vertices if vertex.kind is VertexKind.CPU]
    paths: list[tuple[Edge, ...]] = []
    slowest = float("inf")
    for gpu in rates.node.gpus[:used]:
        found = [path for cpu in cpus if (path := rates.host_path(gpu.vertex, cpu))]
        if found:
            paths.append(min(found, key=len))
        else:  # no link listed: the slot bounds it
            slowest = min(slowest, rates.cluster.kind(gpu.kind).pcie_bytes_per_s or ASSUMED_PCIE_BYTES_PER_S)
    uses = Counter(edge for path in paths for edge in path)
    return min([slowest, *(rates.host[a][b][0] / count for (a, b), count in uses.items())])
