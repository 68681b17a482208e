"""What the instructions of a lowered plan cost on a cluster: the engine's `CostModel` over our own cost tables."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from simulator.collectives import CollectiveCost, CollectiveModel
from simulator.costs import Cost, GpuLimits, LinkUse, Ranks
from simulator.lowering.block_code import KernelKey
from simulator.lowering.writing import PEER_COPY, launch_key
from simulator.program import Collective, Copy, Instruction, Kernel, Launch, Recv, Send
from simulator.roofline import efficiency
from topology.cluster import Cluster
from topology.groups import GroupShape

# Which share of what a collective's ranks send through their ports each of them carries, per byte of the buffer.
TRAFFIC: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1.0,
    "send_recv": lambda _: 1.0,
}


@dataclass(slots=True)
class MachineCosts:
    """Costs of one lowered plan. `placement[r]` is the physical GPU of rank r (node * gpus_per_node + index)."""

    cluster: Cluster
    collectives: CollectiveModel
    kernels: Mapping[KernelKey, tuple[Cost, float]]
    collective_host_s: float
    placement: tuple[int, ...] = ()
    families: Mapping[str, GroupShape] = field(default_factory=dict)
    peer_copies: Mapping[int, float] = field(default_factory=dict)  # bytes -> seconds
    _known: dict[tuple[str, int, GroupShape], CollectiveCost] = field(default_factory=dict)

    def cost(self, instruction: Kernel, ranks: Ranks) -> Cost:
        if isinstance(instruction, Launch):
            return self.kernels[launch_key(instruction)][0]
        if isinstance(instruction, Copy):
            if instruction.kind == PEER_COPY:
                seconds = self.peer_copies[instruction.nbytes]
                rate = instruction.nbytes / seconds if seconds else 0.0
                return Cost(seconds=seconds, hbm_bytes_per_s=rate, link_bytes_per_s=rate)
            rate = self.cluster.slowest_kind.pcie_bytes_per_s
            return Cost(seconds=instruction.nbytes / rate, hbm_bytes_per_s=rate)
        op = instruction.op if isinstance(instruction, Collective) else "send_recv"
        shape = self.shape(instruction.group, ranks)
        chosen = self._chosen(op, instruction.nbytes, shape)
        seconds = chosen.time_s.value
        sent = instruction.nbytes * TRAFFIC[op](shape.ranks)
        return Cost(
            seconds=seconds,
            sms=float(chosen.sms),
            hbm_bytes_per_s=2 * sent / seconds if seconds else 0.0,
            link_bytes_per_s=sent / seconds if seconds else 0.0,
        )

    def host_s(self, instruction: Instruction) -> float:
        if isinstance(instruction, Launch):
            return self.kernels[launch_key(instruction)][1]
        return self.collective_host_s if isinstance(instruction, (Collective, Send, Recv)) else 0.0

    def limits(self, rank: int) -> GpuLimits:
        kind = self.cluster.kind(self._gpu_kind(rank))
        known = efficiency(kind.architecture)
        return GpuLimits(sms=float(kind.sm_count), hbm_bytes_per_s=kind.memory_bytes_per_s * known.hbm)

    def routes(self, ranks: Ranks) -> tuple[LinkUse, ...]:
        """Ports of the ranks, each direction apart: NVLink or PCIe inside a node, NICs between nodes.

        A ring enters and leaves every node once, whatever it has ranks there, and its channels spread that over the
        ranks' NICs; so each NIC carries that many times less than a port. Two ranks are taken for a message, which
        loads one direction.
        """
        nodes = [self._node(rank) for rank in ranks]
        per_node = max(nodes.count(node) for node in set(nodes))
        medium, share = ("port", 1.0) if per_node == len(ranks) else ("nic", 1.0 / per_node)
        if len(ranks) == 2:
            source, target = (self._physical(rank) for rank in ranks)
            return (
                LinkUse(link=(medium, "out", source), share=share),
                LinkUse(link=(medium, "in", target), share=share),
            )
        physical = [self._physical(rank) for rank in ranks]
        return tuple(LinkUse(link=(medium, way, gpu), share=share) for way in ("out", "in") for gpu in physical)

    def link_bytes_per_s(self, link: Hashable) -> float:
        assert isinstance(link, tuple)  # noqa: S101 - made by routes above
        kind = self.cluster.slowest_kind
        node = self.cluster.groups[0].node
        if link[0] == "nic":
            total = sum(nic.bytes_per_s or 0.0 for nic in node.nics if nic.up)
            return max(total / max(len(node.gpus), 1), 1.0)
        return kind.nvlink_links * kind.nvlink_bytes_per_s or kind.pcie_bytes_per_s

    def kind(self, ranks: Ranks) -> Hashable:
        """Groups that lie alike on nodes of the same GPU cost the same."""
        nodes = [self._node(rank) for rank in ranks]
        pattern = tuple(sorted(nodes.count(node) for node in set(nodes)))
        return (len(ranks), pattern, tuple(sorted({self._gpu_kind(rank) for rank in ranks})))

    def shape(self, family: str, ranks: Ranks) -> GroupShape:
        """Return how a group lies on the machine: as planned for its family, else as its ranks are placed."""
        planned = self.families.get(family)
        if planned is not None and planned.ranks == len(ranks) and not self.placement:
            return planned
        nodes = [self._node(rank) for rank in ranks]
        per_node = max(nodes.count(node) for node in set(nodes))
        gpus = self.cluster.gpus_per_node
        siblings = max(1, gpus // per_node) if planned is None else planned.siblings
        return GroupShape(ranks=len(ranks), ranks_per_node=per_node, siblings=siblings)

    def _chosen(self, op: str, nbytes: int, shape: GroupShape) -> CollectiveCost:
        key = (op, nbytes, shape)
        if key not in self._known:
            self._known[key] = self.collectives.choose(op, float(nbytes), shape)
        return self._known[key]

    def _physical(self, rank: int) -> int:
        return self.placement[rank] if self.placement else rank

    def _node(self, rank: int) -> int:
        return self._physical(rank) // self.cluster.gpus_per_node

    def _gpu_kind(self, rank: int) -> str:
        node = self._node(rank)
        for group in self.cluster.groups:
            if node < group.count:
                return group.node.gpus[self._physical(rank) % len(group.node.gpus)].kind
            node -= group.count
        return self.cluster.slowest_kind.name
