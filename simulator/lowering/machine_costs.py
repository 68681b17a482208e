"""Costs of a lowered plan's instructions on a cluster: the engine's `CostModel` from the tables of the analytical
model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from simulator.collectives.cost import CollectiveCost, CollectiveModel
from simulator.collectives.traffic import bottleneck_of, bottleneck_rates, port_share
from simulator.kernels.efficiency import efficiency
from simulator.lowering.steps import KernelKey
from simulator.lowering.writing import PEER_COPY, launch_key
from simulator.program.cost_model import Cost, GpuLimits, LinkUse, Ranks
from simulator.program.program import Collective, Copy, Instruction, Kernel, Launch, Recv, Send
from simulator.step.fsdp_copies import TAKEN
from simulator.step.host import QUEUED_LAUNCHES
from simulator.step.traffic import DATA_FAMILIES
from topology.cluster import Cluster
from topology.rates.groups import GroupShape


class _LinkUses(dict[int, LinkUse]):
    """Cache of the shares that transfers take of one direction of each GPU's port, or of its NIC."""

    def __init__(self, medium: str, way: str, share: float) -> None:
        self._medium, self._way, self._share = medium, way, share

    def __missing__(self, gpu: int) -> LinkUse:
        self[gpu] = LinkUse(link=(self._medium, self._way, gpu), share=self._share)
        return self[gpu]


@lru_cache(maxsize=16)
def _link_uses(medium: str, share: float) -> tuple[_LinkUses, _LinkUses]:
    """Return the uses out of a GPU and into it, which all plans on as large a cluster have in common."""
    return _LinkUses(medium, "out", share), _LinkUses(medium, "in", share)


@dataclass(slots=True)
class MachineCosts:
    """Costs of one lowered plan. `placement[r]` is the physical GPU of rank r (node * gpus_per_node + index)."""

    cluster: Cluster
    collectives: CollectiveModel
    kernels: Mapping[KernelKey, tuple[Cost, float]]
    collective_host_s: float
    own_host_s: Mapping[str, float] = field(default_factory=dict)  # of collectives with other costs, by op
    placement: tuple[int, ...] = ()
    families: Mapping[str, GroupShape] = field(default_factory=dict)
    peer_copies: Mapping[int, float] = field(default_factory=dict)  # bytes -> seconds
    own_copies: Mapping[tuple[str, int], float] = field(default_factory=dict)  # (kind, bytes) -> seconds
    host_copy_bytes_per_s: float = 0.0  # between host and GPU
    held_sms: Mapping[str, float] = field(default_factory=dict)  # by op of the groups in `held_by`, where measured
    held_by: Container[str] = DATA_FAMILIES
    factor: float = 1.0  # factor of collectives in the runtime's steps, over their time alone
    _known: dict[tuple[str, int, GroupShape], CollectiveCost] = field(default_factory=dict)
    _gpus_per_node: int = field(init=False)
    _one_kind: str = field(init=False)  # empty if GPUs differ
    _link_rates: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        """Compute once what every group of ranks asks for."""
        self._gpus_per_node = self.cluster.gpus_per_node
        kinds = {gpu.kind for group in self.cluster.groups for gpu in group.node.gpus}
        self._one_kind = self.cluster.slowest_kind.name if len(kinds) == 1 else ""
        self._link_rates = bottleneck_rates(self.cluster)

    def cost(self, instruction: Kernel, ranks: Ranks) -> Cost:
        if isinstance(instruction, Launch):
            return self.kernels[launch_key(instruction)][0]
        if isinstance(instruction, Copy):
            if instruction.kind == PEER_COPY:
                seconds = self.peer_copies[instruction.nbytes]
                rate = instruction.nbytes / seconds if seconds else 0.0
                return Cost(seconds=seconds, hbm_bytes_per_s=rate, link_bytes_per_s=rate)
            own_s = self.own_copies.get((instruction.kind, instruction.nbytes))
            if own_s is not None:
                return Cost(seconds=own_s, taken=TAKEN)
            rate = self.host_copy_bytes_per_s
            return Cost(seconds=instruction.nbytes / rate, hbm_bytes_per_s=rate)
        op = instruction.op if isinstance(instruction, Collective) else "send_recv"
        shape = self.shape(instruction.group, ranks)
        chosen = self._chosen(op, instruction.nbytes, shape)
        seconds = self.factor * chosen.time_s.value
        sms = float(chosen.sms)
        if isinstance(instruction, Collective) and instruction.group in self.held_by:
            sms = self.held_sms.get(op, sms)
        sent = instruction.nbytes * port_share(op, chosen.algorithm, shape)
        # Alone, a transfer takes its given time, whatever the rate that time comes from.
        medium, share = bottleneck_of(nodes=shape.nodes, ranks_per_node=shape.ranks_per_node)
        rate = min(sent / seconds, self._link_rates[medium] / share) if seconds else 0.0
        hbm = 2 * sent / seconds if seconds else 0.0
        return Cost(seconds=seconds, sms=sms, hbm_bytes_per_s=hbm, link_bytes_per_s=rate)

    def host_s(self, instruction: Instruction) -> float:
        if isinstance(instruction, Launch):
            return self.kernels[launch_key(instruction)][1]
        if not isinstance(instruction, (Collective, Send, Recv)):
            return 0.0
        op = instruction.op if isinstance(instruction, Collective) else ""
        return self.own_host_s.get(op, self.collective_host_s)

    def limits(self, rank: int) -> GpuLimits:
        kind = self.cluster.kind(self._gpu_kind(rank))
        known = efficiency(kind.architecture)
        hbm_bytes_per_s = kind.memory_bytes_per_s * known.hbm
        return GpuLimits(sms=float(kind.sm_count), hbm_bytes_per_s=hbm_bytes_per_s, queue=QUEUED_LAUNCHES)

    def routes(self, ranks: Ranks) -> tuple[LinkUse, ...]:
        """Ports of the ranks, each direction apart: NVLink or PCIe inside a node, NICs between nodes.

        A group of two ranks is a message, which uses one direction.
        """
        physical = [self.placement[rank] for rank in ranks] if self.placement else list(ranks)
        per_node, nodes = self._spread(physical)
        medium, share = bottleneck_of(nodes=nodes, ranks_per_node=per_node)
        out, into = _link_uses(medium, share)
        if len(ranks) == 2:
            return out[physical[0]], into[physical[1]]
        return (*[out[gpu] for gpu in physical], *[into[gpu] for gpu in physical])

    def link_bytes_per_s(self, link: Hashable) -> float:
        assert isinstance(link, tuple)  # noqa: S101 - made by routes above
        return self._link_rates[link[0]]

    def kind(self, ranks: Ranks) -> Hashable:
        """Groups with the same placement on nodes with the same GPU have the same cost."""
        if len(ranks) == 1:
            return self._gpu_kind(ranks[0])
        physical = [self.placement[rank] for rank in ranks] if self.placement else ranks
        kinds = self._one_kind or tuple(sorted({self._gpu_kind(rank) for rank in ranks}))
        if not self.placement and len(ranks) > 2:
            # The ranks of a family are evenly spread, so all nodes have as many as the first.
            return (len(ranks), *self._spread(physical), kinds)
        per = self._gpus_per_node
        if len(ranks) == 2:
            return (2, physical[0] // per == physical[1] // per, kinds)
        nodes = [gpu // per for gpu in physical]
        return (len(ranks), tuple(sorted(nodes.count(node) for node in set(nodes))), kinds)

    def shape(self, family: str, ranks: Ranks) -> GroupShape:
        """Return the shape of a group on the machine: from its family in the plan, else from the placement of its
        ranks.
        """
        planned = self.families.get(family)
        if planned is not None and planned.ranks == len(ranks) and (planned.placed or not self.placement):
            return planned
        per_node, _ = self._spread([self._physical(rank) for rank in ranks])
        siblings = max(1, self._gpus_per_node // per_node) if planned is None else planned.siblings
        return GroupShape(ranks=len(ranks), ranks_per_node=per_node, siblings=siblings)

    def _spread(self, physical: Sequence[int]) -> tuple[int, int]:
        """Return (largest number of the group's GPUs on one node, number of its nodes)."""
        per = self._gpus_per_node
        first, last = physical[0] // per, physical[-1] // per
        if first == last and (not self.placement or all(gpu // per == first for gpu in physical)):
            return len(physical), 1
        if not self.placement:  # families lie evenly
            nodes = len({gpu // per for gpu in physical})
            return -(-len(physical) // nodes), nodes
        count = Counter(gpu // per for gpu in physical)
        return max(count.values()), len(count)

    def _chosen(self, op: str, nbytes: int, shape: GroupShape) -> CollectiveCost:
        key = (op, nbytes, shape)
        if key not in self._known:
            self._known[key] = self.collectives.choose(op, float(nbytes), shape)
        return self._known[key]

    def _physical(self, rank: int) -> int:
        return self.placement[rank] if self.placement else rank

    def _gpu_kind(self, rank: int) -> str:
        if self._one_kind:
            return self._one_kind
        gpu = self._physical(rank)
        for group in self.cluster.groups:
            size = group.count * len(group.node.gpus)
            if gpu < size:
                return group.node.gpus[gpu % len(group.node.gpus)].kind
            gpu -= size
        return self.cluster.slowest_kind.name
