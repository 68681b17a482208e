"""The properties of the machine that a group's collectives depend on, found once per group shape."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from simulator.collectives.constants import generation_for
from simulator.collectives.curves import Curve, Generation, PeerCurve
from simulator.collectives.nccl_model import NcclMachine
from topology.cluster import Cluster, GpuKind, LinkKind, Node
from topology.rates.groups import GroupShape, group_rates

GB = 1e9
# NCCL 2.30.7 assumes 40 GB/s. Earlier versions seem to have had Hopper's figure for Blackwell: four GB200 with 2.29.2
# leave LL for Simple and never run LL128, which 40 would make them do at 8 MiB (inferred from public tables).
LL128_BLACKWELL_GB_S = 36.7


class Fabric(StrEnum):
    """What connects the ranks of one node."""

    NVLINK = "nvlink"  # switch, bridge or mesh: NCCL sees per-GPU bandwidth either way
    XGMI = "xgmi"
    PCIE = "pcie"


# One GPU without links among GPUs on an NVSwitch slows the whole communicator: NCCL's search falls back to two channels
# through host memory, whatever PCIe could do. A GB300 tray then reaches 4.5 to 6.7 GB/s bus bandwidth in all-reduce
# (datacrunch report of 2026-08-14, topology file with count=0), which at the efficiency of this path is a link of 9.3
# GB/s.
LOST_GPU_BYTES_PER_S = 9.3e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """One group of ranks. Rates are bytes per second and direction; latencies seconds."""

    ranks: int
    nodes: int
    fabric: Fabric
    link_bytes_per_s: float  # one GPU's links to the rest of the group inside its node
    generation: Generation | None  # NVLink generation; None on other fabrics
    nvls: bool
    inter_bytes_per_s: float  # bytes/s of this group through the network ports of one node
    hop_s: float  # one network hop as the fabric declares it
    nccl: NcclMachine
    compute_capability: int
    architecture: str = ""
    inter_peer_bytes_per_s: float = 0.0  # the network when every node sends to every other
    ports_bytes_per_s: float = 0.0  # the same, if only the ports limited it

    @property
    def ranks_per_node(self) -> int:
        return max(1, -(-self.ranks // self.nodes))


def communicator(cluster: Cluster, shape: GroupShape) -> Communicator:
    """Return the communicator of a group of `shape` on the first node of `cluster`."""
    node, kind = cluster.groups[0].node, cluster.slowest_kind
    per_node = min(shape.ranks_per_node, shape.ranks)
    rates = group_rates(cluster, shape)
    members = rates.gpus[:per_node] or tuple(i * shape.stride % len(node.gpus) for i in range(per_node))
    links, nccl_links, multicast = _scale_up(node, kind, members)
    lost = shape.nodes == 1 and not links and _some_on_a_switch(node, members)
    fabric = Fabric.PCIE if not links else Fabric.XGMI if kind.by_amd else Fabric.NVLINK
    intra = links or min(
        rates.intra_bytes_per_s, kind.pcie_bytes_per_s or math.inf, LOST_GPU_BYTES_PER_S if lost else math.inf
    )
    nics = [nic for nic in node.nics if nic.up and nic.bytes_per_s]
    nccl = NcclMachine(
        ranks=shape.ranks,
        nodes=shape.nodes,
        compute_capability=kind.compute_capability or 80,
        nvlink=nccl_links / GB if fabric is Fabric.NVLINK else 0.0,
        pcie=_nccl_pcie(node, kind) / GB,
        nic=max((nic.bytes_per_s or 0.0 for nic in nics), default=0.0) / GB,
        nics=max(1, len(nics) // max(1, shape.siblings)) if nics else 0,
        nvls=multicast,
        ll128_blackwell=LL128_BLACKWELL_GB_S,
    )
    generation = None
    if fabric is Fabric.NVLINK:
        generation = _scaled(generation_for(kind.compute_capability), kind.nvlink_links * kind.nvlink_bytes_per_s)
    return Communicator(
        ranks=shape.ranks,
        nodes=shape.nodes,
        fabric=fabric,
        link_bytes_per_s=intra,
        generation=generation,
        nvls=multicast and kind.compute_capability >= 90,
        inter_bytes_per_s=rates.inter_bytes_per_s,
        hop_s=rates.inter_latency_s,
        nccl=nccl,
        compute_capability=kind.compute_capability,
        architecture=kind.architecture,
        inter_peer_bytes_per_s=rates.inter_all_to_all_bytes_per_s or rates.inter_bytes_per_s,
        ports_bytes_per_s=rates.ports_bytes_per_s,
    )


def _some_on_a_switch(node: Node, positions: tuple[int, ...]) -> bool:
    """Whether at least one GPU has a working NVSwitch port; if `_scale_up` finds no fabric for all, a GPU has lost its
    links.
    """
    members = {node.gpus[position].vertex for position in positions if position < len(node.gpus)}
    return any(
        link.kind is LinkKind.NVSWITCH and (link.best_bytes_per_s or 0.0) > 0 and members & {link.a, link.b}
        for link in node.links
    )


def _scale_up(node: Node, kind: GpuKind, positions: tuple[int, ...]) -> tuple[float, float, bool]:
    """Return (bytes/s of the worst member's links to the group, the same as NCCL counts them, multicast).

    Zero when any member has none, or the links leave islands: the whole communicator then runs over PCIe.
    """
    members = [node.gpus[position].vertex for position in positions if position < len(node.gpus)]
    if len(members) < 2:
        return 0.0, 0.0, False
    inside, hubs = set(members), {vertex.id: vertex.multicast for vertex in node.vertices}
    joined: dict[str, set[str]] = {member: set() for member in members}
    real = dict.fromkeys(members, 0.0)
    nccl = dict.fromkeys(members, 0.0)
    switched: set[str] = set()
    for link in node.links:
        if link.kind not in {LinkKind.NVLINK, LinkKind.NVSWITCH}:
            continue
        rate = link.best_bytes_per_s or 0.0
        counted = link.nccl_bytes_per_s or link.count * kind.nvlink_nccl_bytes_per_s or rate
        for here, there in ((link.a, link.b), (link.b, link.a)):
            if here in inside and (there in inside or link.kind is LinkKind.NVSWITCH):
                real[here] += rate
                nccl[here] += counted if rate else 0.0
                if rate:
                    joined[here].add(there)
                    joined.setdefault(there, set()).add(here)
                if link.kind is LinkKind.NVSWITCH:
                    switched.add(there)
    multicast = bool(switched) and all(hubs.get(hub, False) for hub in switched)
    slowest = min(real.values())
    reached, queue = {members[0]}, [members[0]]
    while queue:
        new = joined[queue.pop()] - reached
        reached |= new
        queue += new
    return (slowest, min(nccl.values()), multicast) if slowest > 0 and reached >= inside else (0.0, 0.0, False)


def _nccl_pcie(node: Node, kind: GpuKind) -> float:
    """Return the narrowest PCIe or socket link of the node, as NCCL counts it; 12 GB/s is its default."""
    rates = [
        link.nccl_bytes_per_s
        for link in node.links
        if link.kind in {LinkKind.PCIE, LinkKind.SMP} and link.nccl_bytes_per_s
    ]
    return min(rates) if rates else 0.76 * kind.pcie_bytes_per_s or 12e9  # width x speed / 80 over nominal


def on_slower_ports(comm: Communicator, share: float) -> Communicator:
    """Return a communicator whose ports have `share` of their rate, on the same host links."""
    kept = min(1.0, share * comm.ports_bytes_per_s / comm.inter_bytes_per_s) if comm.inter_bytes_per_s else 1.0
    return replace(
        comm,
        inter_bytes_per_s=comm.inter_bytes_per_s * kept,
        inter_peer_bytes_per_s=comm.inter_peer_bytes_per_s * kept,
        ports_bytes_per_s=comm.ports_bytes_per_s * share,
        nccl=replace(comm.nccl, nic=comm.nccl.nic * share),
    )


def on_fitted_links(comm: Communicator) -> Communicator | None:
    """Return a communicator with the NVLink rate at which its curves were fitted; None where it has that rate."""
    generation = comm.generation
    if generation is None or math.isclose(comm.link_bytes_per_s, generation.link_bytes_per_s):
        return None
    return replace(
        comm,
        link_bytes_per_s=generation.link_bytes_per_s,
        nccl=replace(comm.nccl, nvlink=generation.nccl_bytes_per_s / GB),
        generation=generation.fitted or generation,
    )


def _scaled(generation: Generation, link_bytes_per_s: float) -> Generation:
    """Speed a generation's kernels up for links faster than any it was fitted on. On slower links their ceiling
    applies.
    """
    if link_bytes_per_s <= 1.2 * generation.link_bytes_per_s:
        return generation
    ratio = generation.link_bytes_per_s / link_bytes_per_s
    return replace(
        generation,
        name=f"{generation.name} x {1 / ratio:.1f}",
        fitted_ranks=0,
        fitted=generation,
        curves={name: _faster(curve, ratio) for name, curve in generation.curves.items()},
        peer=_faster_peer(generation.peer, ratio),
    )


def _faster(curve: Curve, ratio: float) -> Curve:
    costs = {
        op: replace(cost, sent_s=cost.sent_s * ratio, buffer_s=cost.buffer_s * ratio)
        for op, cost in curve.bytes.items()
    }
    return replace(curve, bytes=costs)


def _faster_peer(peer: PeerCurve, ratio: float) -> PeerCurve:
    return replace(
        peer,
        sent_s=peer.sent_s * ratio,
        buffer_s=peer.buffer_s * ratio,
        channel_bytes_per_s=peer.channel_bytes_per_s / ratio,
        pair_bytes_per_s=peer.pair_bytes_per_s / ratio,
    )
