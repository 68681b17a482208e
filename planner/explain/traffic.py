"""Bytes that GPUs send in a step, by axis of the mesh and by kind of link: NVLink, PCIe, or the network between nodes.

Counted on the step that the simulation runs: every collective and message of every rank. A collective moves the
bytes of a ring with neighbours on the same node where possible, so that each node sends into the network once;
reductions by tree or switch also enter the network once per node. All-to-all sends each peer its part directly. Overlap
changes when bytes move, not how many, so the plan is counted without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.question.question import Question
from simulator.collectives.traffic import REDUCES_INSIDE, TRAFFIC
from simulator.config.estimate import Estimate
from simulator.config.plan import Plan
from simulator.lowering.machine_costs import MachineCosts
from simulator.lowering.training import sent_bytes
from simulator.pipeline.schedules.registry import SCHEDULES, schedule_kind
from simulator.program.program import Collective, Copy, RankCode, Send
from topology.cluster import Cluster
from topology.rates.groups import GroupShape, group_rates
from topology.rates.scaling import network_bytes_per_s, nvlink_bytes_per_s

HOST = "host"
NVLINK, PCIE, NETWORK = "nvlink", "pcie", "network"
LINKS = (NVLINK, PCIE, NETWORK)
HOST_COPIES = ("h2d", "d2h")
# A step is counted with this many micro batches and with one more: each further one adds the same bytes.
FEW = 2

Sent = dict[tuple[str, str], float]  # (axis, link) -> bytes
OfRanks = tuple[tuple[int, ...], Sent]  # what each of some ranks sends


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisTraffic:
    """Bytes that the groups along one axis send in a step, per GPU, averaged over all GPUs of the plan.

    Axes: `tp`, `cp`, `ep`, `pp` (neighbouring stages), `fsdp` (shards of parameters), `replicate` (replicas of shards),
    `dp` (ranks with whole parameters), and `expert_fsdp`, `expert_dp`, the same for routed experts; `host` is traffic
    to and from host memory where state is kept there.
    """

    axis: str
    ranks: int
    ranks_per_node: int
    nvlink_bytes: float
    pcie_bytes: float
    network_bytes: float

    @property
    def sent_bytes(self) -> float:
        return self.nvlink_bytes + self.pcie_bytes + self.network_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTraffic:
    """Bytes that cross one kind of link in a step.

    `mean_bytes` and `busiest_bytes` are per GPU, on average and at most; `bytes_per_s` is the rate of a GPU's share of
    such links by the datasheet, in one direction, and `busy_share` the part of the step that `busiest_bytes` take at
    that rate.
    """

    link: str
    mean_bytes: float
    busiest_bytes: float
    total_bytes: float
    bytes_per_s: float
    busy_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTraffic:
    """Bytes that each of `ranks` sends in a step, by kind of link; ranks of one pipeline stage send the same."""

    ranks: tuple[int, ...]
    sent_bytes: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    axes: tuple[AxisTraffic, ...]
    links: tuple[LinkTraffic, ...]
    by_rank: tuple[RankTraffic, ...]


def traffic_of(question: Question, plan: Plan, estimate: Estimate) -> Traffic | None:
    """Return the bytes that the GPUs of `plan` send in the step of `estimate`; None if the plan is not legal.

    Raises BadPlan as `sent_bytes` does.
    """
    if not question.legal(plan):
        return None
    batch = question.workload.global_batch_size
    count = plan.micro_batches(batch)
    few = replace(plan, tp_overlap="none", ep_overlap="none", schedule=_schedule(plan, count))
    (by_rank, *more), shapes = _sent(question, few, (count,) if count <= FEW + 1 else (FEW, FEW + 1))
    if more:
        by_rank = [
            (ranks, _further(one, two, count - FEW)) for (ranks, one), (_, two) in zip(by_rank, more[0], strict=True)
        ]
    counted = [(len(ranks), sent) for ranks, sent in by_rank]
    return Traffic(
        axes=_axes(counted, shapes),
        links=_links(counted, question.cluster, estimate.step_s.value),
        by_rank=tuple(RankTraffic(ranks=ranks, sent_bytes=_by_link(sent)) for ranks, sent in by_rank),
    )


def _schedule(plan: Plan, count: int) -> str | None:
    """Return a schedule with the same stages on the same ranks that also runs with few micro batches."""
    if plan.pp == 1 or count <= FEW + 1 or not (kind := schedule_kind(plan.schedule_name)).every_stage:
        return plan.schedule
    return next(
        other.name
        for other in SCHEDULES.values()
        if other.v_shaped == kind.v_shaped and other.has_stages(plan.virtual_stages) and not other.every_stage
    )


def _further(one: Sent, two: Sent, times: int) -> Sent:
    """Return the bytes with `times` more micro batches than in `one`; `two` has one more than `one`."""
    return {key: one.get(key, 0.0) + times * (two[key] - one.get(key, 0.0)) for key in two}


def _by_link(sent: Sent) -> dict[str, float]:
    total: dict[str, float] = dict.fromkeys(LINKS, 0.0)
    for (_, link), nbytes in sent.items():
        total[link] += nbytes
    return total


def _sent(
    question: Question, plan: Plan, counts: Sequence[int]
) -> tuple[list[list[OfRanks]], Mapping[str, GroupShape]]:
    """Return for each number of micro batches, by pipeline rank, the ranks on its GPUs and the bytes that each sends;
    and the placement of each axis's groups.
    """
    found = sent_bytes(question, plan, counts)
    counter = _Counter(question.cluster, plan, found[0].costs)
    return [
        [(tuple(code.ranks), counter.count(code)) for code in lowered.program.codes] for lowered in found
    ], counter.shapes


class _Counter:
    """Sums what the code of one rank sends."""

    def __init__(self, cluster: Cluster, plan: Plan, costs: MachineCosts) -> None:
        self.cluster, self.costs, self.stride = cluster, costs, plan.gpus // plan.pp
        self.shapes: dict[str, GroupShape] = {
            **costs.families,
            "pp": costs.shape("pipeline", tuple(range(0, plan.gpus, self.stride))),
            HOST: GroupShape(ranks=1, ranks_per_node=1),
        }
        self.nodes = np.array(plan.placement or range(plan.gpus)) // cluster.gpus_per_node
        self._known: dict[tuple[str, str, int], tuple[tuple[str, float], ...]] = {}
        # Between two pipeline ranks: the link inside a node, and what part of their GPUs is on two nodes.
        self._between: dict[tuple[str, int, int], tuple[str, float]] = {}

    def count(self, code: RankCode) -> Sent:
        sent: Sent = defaultdict(float)
        for instruction in code.instructions:
            if isinstance(instruction, Collective):
                parts: Iterable[tuple[str, float]] = self._collective(instruction)
            elif isinstance(instruction, Send):
                parts = self._message(instruction, code)
            elif isinstance(instruction, Copy) and instruction.kind in HOST_COPIES:
                sent[HOST, PCIE] += instruction.nbytes
                continue
            else:
                continue
            for link, nbytes in parts:
                sent[instruction.group, link] += nbytes
        return dict(sent)

    def _collective(self, instruction: Collective) -> tuple[tuple[str, float], ...]:
        key = (instruction.op, instruction.group, instruction.nbytes)
        if key not in self._known:
            shape = self.shapes[instruction.group]
            inside, outside = self._split(instruction.op, float(instruction.nbytes), shape)
            self._known[key] = ((self._inner_link(shape), inside), (NETWORK, outside))
        return self._known[key]

    def _split(self, op: str, nbytes: float, shape: GroupShape) -> tuple[float, float]:
        """Return the bytes that a rank sends inside its node and out of it, averaged over the group."""
        ranks, nodes, here = shape.ranks, shape.nodes, shape.ranks_per_node
        if op == "all_to_all":
            return nbytes * (here - 1) / ranks, nbytes * (ranks - here) / ranks
        if op == "all_reduce" and nodes > 1 and self._algorithm(op, nbytes, shape) in REDUCES_INSIDE:
            return 2 * nbytes * (here - 1) / here, 2 * nbytes * (nodes - 1) / ranks
        whole = nbytes * TRAFFIC[op](ranks)
        outside = whole * nodes / ranks if nodes > 1 else 0.0
        return whole - outside, outside

    def _algorithm(self, op: str, nbytes: float, shape: GroupShape) -> str:
        return self.costs.collectives.choose(op, nbytes, shape).algorithm

    def _message(self, instruction: Send, code: RankCode) -> tuple[tuple[str, float], ...]:
        nbytes = float(instruction.nbytes)
        if instruction.relative:  # round a ring
            shape = self.shapes[instruction.group]
            outside = nbytes * shape.nodes / shape.ranks if shape.nodes > 1 else 0.0
            return (self._inner_link(shape), nbytes - outside), (NETWORK, outside)
        key = instruction.group, code.ranks[0], instruction.peer
        if key not in self._between:
            mine = np.array(code.ranks)
            theirs = mine % self.stride + instruction.peer * self.stride
            crossing = float(np.mean(self.nodes[mine] != self.nodes[theirs]))
            self._between[key] = self._inner_link(self.shapes[instruction.group]), crossing
        inner, crossing = self._between[key]
        return (inner, nbytes * (1 - crossing)), (NETWORK, nbytes * crossing)

    def _inner_link(self, shape: GroupShape) -> str:
        """Return the kind of link inside a node; a group that leaves NVLink anywhere counts as PCIe."""
        pair = shape if shape.ranks_per_node > 1 else replace(shape, ranks=2, ranks_per_node=2)
        return NVLINK if group_rates(self.cluster, pair).layer in {"nvswitch", "nvlink"} else PCIE


def _axes(by_rank: list[tuple[int, Sent]], shapes: Mapping[str, GroupShape]) -> tuple[AxisTraffic, ...]:
    mean = _mean(by_rank)
    names = dict.fromkeys(axis for axis, _ in mean)
    found = (
        AxisTraffic(
            axis=axis,
            ranks=shapes[axis].ranks,
            ranks_per_node=shapes[axis].ranks_per_node,
            **{f"{link}_bytes": mean.get((axis, link), 0.0) for link in LINKS},
        )
        for axis in names
    )
    return tuple(sorted(found, key=lambda one: -one.sent_bytes))


def _links(by_rank: list[tuple[int, Sent]], cluster: Cluster, step_s: float) -> tuple[LinkTraffic, ...]:
    kind = cluster.slowest_kind
    rates = {NVLINK: nvlink_bytes_per_s(cluster), PCIE: kind.pcie_bytes_per_s, NETWORK: network_bytes_per_s(cluster)}
    gpus = sum(count for count, _ in by_rank)
    found = []
    for link in LINKS:
        each = [(count, sum(nbytes for (_, on), nbytes in sent.items() if on == link)) for count, sent in by_rank]
        total = sum(count * nbytes for count, nbytes in each)
        busiest, rate = max(nbytes for _, nbytes in each), rates[link]
        if total:
            busy = busiest / rate / step_s if rate else 0.0
            found.append(
                LinkTraffic(
                    link=link,
                    mean_bytes=total / gpus,
                    busiest_bytes=busiest,
                    total_bytes=total,
                    bytes_per_s=rate,
                    busy_share=busy,
                )
            )
    return tuple(found)


def _mean(by_rank: list[tuple[int, Sent]]) -> Sent:
    gpus = sum(count for count, _ in by_rank)
    total: Sent = defaultdict(float)
    for count, sent in by_rank:
        for key, nbytes in sent.items():
            total[key] += count * nbytes / gpus
    return dict(total)
