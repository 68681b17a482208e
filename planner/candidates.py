"""Every legal grid for N GPUs in one framework, and an account of what was left out and why.

Three levels, each multiplied only with what survived the one before: grids (degrees, ZeRO stage, sequence
parallelism), batches (micro batch, stages per rank, schedule), policies (recompute, resharding, overlap, method of
context parallelism). What a *rule* forbids
is counted under the rule's name in `rejected`; what a *bound* of the search leaves out, though it might be legal, is
counted in `pruned`. Both count at the level where it happened, so `total = legal + rejected + pruned` is the number of
leaves of the search tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.frameworks import SCHEDULES, Framework
from planner.legality import Grade, Question, question
from planner.rules import RULES, Level, divisors
from planner.rules.rule import Mask
from simulator.collectives import CollectiveModel
from simulator.group_times import GroupTimes
from simulator.model import Model
from simulator.plan import Plan
from simulator.plan_columns import PlanColumns, distinct
from simulator.plan_table import table_of_columns
from simulator.runtime import Runtime
from simulator.workload import Workload
from topology.cluster import Cluster
from topology.orders import node_orders, placed, undominated

NODE = (
    "dp_replicate",
    "dp_shard",
    "zero_stage",
    "tp",
    "sequence_parallel",
    "cp",
    "pp",
    "ep",
    "virtual_stages",
    "schedule",
    "micro_batch_size",
)
AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "zero_stage", "sequence_parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of the search that are no rules. None: no limit, except `max_tp`, where None is the size of a node."""

    max_tp: int | None = None
    max_cp: int | None = None
    max_pp: int | None = None
    max_micro_batch: int | None = 16
    micro_batch: int | None = None  # this size and no other
    max_virtual_stages: int | None = 8
    recomputes: tuple[str, ...] | None = None  # None: all that the framework has
    without_sequence_parallel: bool = False  # also without it where it could be on: same traffic, more memory
    odd_virtual_stages: bool = False  # also counts that neither divide the layers nor are powers of two
    min_tokens_per_context_rank: int = 1024  # context parallelism beyond it slices attention into crumbs


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Legal (grid, micro batch, schedule) and the policies each may have: the search tree, one level above its leaves.

    Policies come in two halves. Recomputation and resharding decide memory, so they are expanded first (`leaves`);
    overlap and the method of context parallelism cost none, so only what fits is multiplied by them (`variants`).
    """

    columns: PlanColumns
    choices: dict[str, tuple[tuple[Any, Mask], ...]]  # field: (value, where it is legal), the default value first
    rejected: dict[str, int]
    pruned: dict[str, int]

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def policies(self) -> NDArray[np.int64]:
        """Leaves of each node."""
        return self._count("recompute") * self._count("reshard") * self.free

    @property
    def free(self) -> NDArray[np.int64]:
        """Variants of each leaf of a node that cost no memory."""
        return self._count("tp_overlap") * self._count("cp_method") * self._count("placing")

    def with_recompute(self, word: str) -> Nodes:
        """Return the nodes with one way of recomputation in place of all."""
        return replace(self, choices={**self.choices, "recompute": ((word, np.ones(len(self), dtype=np.bool_)),)})

    def leaves(self, rows: NDArray[np.intp]) -> tuple[PlanColumns, NDArray[np.intp]]:
        """Return nodes `rows` under every recomputation and resharding, and the node that each came from."""
        return self._expanded(self.columns.take(rows), rows, ("recompute", "reshard"))

    def variants(self, leaves: PlanColumns, nodes: NDArray[np.intp]) -> tuple[PlanColumns, NDArray[np.intp]]:
        """Return leaves, which came from `nodes`, under every choice that costs no memory; and each one's leaf."""
        free = ("tp_overlap", "cp_method", "placing")
        found, of_node = self._expanded(leaves, nodes, free, origin=np.arange(len(nodes)))
        return found, of_node

    def settings(self, plan: PlanColumns) -> PlanColumns:
        """Return one plan of these nodes in every overlap mode and placement that its node may have."""
        same = np.logical_and.reduce([getattr(self.columns, name) == getattr(plan, name)[0] for name in NODE])
        return self._expanded(plan, np.nonzero(same)[0][:1], ("tp_overlap", "placing"))[0]

    def _count(self, field: str) -> NDArray[np.int64]:
        return sum((legal.astype(np.int64) for _, legal in self.choices[field]), np.zeros(len(self), dtype=np.int64))

    def _expanded(
        self,
        columns: PlanColumns,
        nodes: NDArray[np.intp],
        names: tuple[str, ...],
        origin: NDArray[np.intp] | None = None,
    ) -> tuple[PlanColumns, NDArray[np.intp]]:
        """Multiply rows by the legal values of some fields, in the order of the rows and then of the values."""
        origin = nodes if origin is None else origin
        every = list(product(*(self.choices[name] for name in names)))
        legal = np.stack([np.logical_and.reduce([mask[nodes] for _, mask in chosen]) for chosen in every], axis=1)
        rows, which = np.nonzero(legal)
        values = [np.array([chosen[i][0] for chosen in every])[which] for i in range(len(names))]
        return replace(columns.take(rows), **dict(zip(names, values, strict=True))), origin[rows]


def plan_of(columns: PlanColumns, row: int, cluster: Cluster) -> Plan:
    """Return a row as a plan, with its ranks placed on GPUs where the row says how."""
    plan, placing = columns.plan(row), int(columns.placing[row])
    if placing < 0:
        return plan
    order = node_orders(cluster, plan.gpus)[placing]
    return replace(plan, placement=placed(order, plan.gpus, cluster.gpus_per_node))


def enumerate_nodes(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    framework: str | Framework,
    *,
    gpus: int | None = None,
    runtime: Runtime | None = None,
    bounds: Bounds | None = None,
) -> Nodes:
    """Return what all legal plans that use exactly `gpus` GPUs (default: the whole cluster) branch from."""
    asked = question(model, cluster, workload, framework, runtime=runtime, gpus=gpus)
    bounds = bounds or Bounds()
    if bounds.max_tp is None:
        bounds = replace(bounds, max_tp=asked.gpus_per_node)
    rejected: Counter[str] = Counter()
    pruned: Counter[str] = Counter()

    table = _sift(_table(list(_grids(asked))), asked, Level.GRID, rejected)
    table = _prune(table, _grid_bounds(table, asked, bounds), pruned)
    table = _batches(table, asked, bounds, pruned)
    table = _sift(table, asked, Level.BATCH, rejected)
    choices = _choices(table, asked, bounds, rejected)
    choices["placing"] = _placings(table, cluster, workload, asked)
    return Nodes(columns=table, choices=choices, rejected=_ordered(rejected), pruned=_ordered(pruned))


def _grids(asked: Question) -> Iterator[tuple[int, ...]]:
    """Yield (dp_replicate, dp_shard, tp, cp, pp, ep, zero, sp) for every factorisation of the GPU count."""
    framework = asked.framework
    experts = asked.model.moe.experts if asked.model.moe else 1
    for pp in divisors(asked.gpus):
        for tp in divisors(asked.gpus // pp):
            for cp in divisors(asked.gpus // pp // tp):
                dp = asked.gpus // pp // tp // cp
                # A model without experts has no expert parallelism to reject: ep > 1 is not a candidate at all.
                expert_degrees = [e for e in divisors(experts) if (dp * cp * tp) % e == 0]
                sharding = [(dp // s, s, -1) for s in divisors(dp)]
                if framework.zero_stages:
                    stages = framework.searched_zero_stages or framework.zero_stages
                    sharding = [(dp, 1, z) for z in stages if dp > 1 or z == 0]
                sequence = (0, 1) if tp > 1 and framework.sequence_parallel else (0,)
                for (replicate, shard, zero), ep, sp in product(sharding, expert_degrees, sequence):
                    yield replicate, shard, tp, cp, pp, ep, zero, sp


def _table(rows: list[tuple[int, ...]]) -> PlanColumns:
    data = np.array(rows, dtype=np.int64).reshape(len(rows), len(AXES))
    n = len(rows)
    given = {name: data[:, i] for i, name in enumerate(AXES)}
    return PlanColumns(
        dp_replicate=given["dp_replicate"],
        dp_shard=given["dp_shard"],
        tp=given["tp"],
        cp=given["cp"],
        pp=given["pp"],
        ep=given["ep"],
        zero_stage=given["zero_stage"],
        sequence_parallel=given["sequence_parallel"].astype(np.bool_),
        virtual_stages=np.ones(n, dtype=np.int64),
        schedule=np.full(n, ""),
        micro_batch_size=np.ones(n, dtype=np.int64),
        recompute=np.full(n, "none"),
        tp_overlap=np.full(n, "none"),
        cp_method=np.full(n, ""),
        reshard=np.full(n, -1, dtype=np.int64),
        capacity_factor=np.zeros(n),
        listed=np.zeros(n, dtype=np.bool_),
        placing=np.full(n, -1, dtype=np.int64),
    )


def _sift(table: PlanColumns, asked: Question, level: Level, rejected: Counter[str]) -> PlanColumns:
    """Drop rows that an illegal rule of `level` breaks, each counted under the first rule that did."""
    keep = np.ones(len(table), dtype=np.bool_)
    for rule in RULES:
        if rule.level is level and rule.grade is Grade.ILLEGAL and rule.applies(asked):
            hit = keep & rule.broken(table, asked)
            if hit.any():
                rejected[rule.name] += int(hit.sum())
                keep &= ~hit
    return table.take(keep)


def _grid_bounds(table: PlanColumns, asked: Question, bounds: Bounds) -> dict[str, NDArray[np.bool_]]:
    def over(values: NDArray[np.int64], limit: int | None) -> NDArray[np.bool_]:
        return values > limit if limit is not None else np.zeros(len(values), dtype=np.bool_)

    could = (table.tp > 1) & ((asked.workload.seq_len // table.cp) % table.tp == 0)
    off = (
        could & ~table.sequence_parallel & (asked.framework.sequence_parallel and not bounds.without_sequence_parallel)
    )
    crumbs = (table.cp > 1) & (asked.workload.seq_len // table.cp < bounds.min_tokens_per_context_rank)
    return {
        f"tp > {bounds.max_tp}": over(table.tp, bounds.max_tp),
        f"cp > {bounds.max_cp}": over(table.cp, bounds.max_cp),
        f"pp > {bounds.max_pp}": over(table.pp, bounds.max_pp),
        f"seq / cp < {bounds.min_tokens_per_context_rank}": crumbs,
        "sequence parallelism off": off,
    }


def _prune(table: PlanColumns, masks: dict[str, NDArray[np.bool_]], pruned: Counter[str]) -> PlanColumns:
    keep = np.ones(len(table), dtype=np.bool_)
    for name, mask in masks.items():
        hit = keep & mask
        if hit.any():
            pruned[name] += int(hit.sum())
            keep &= ~hit
    return table.take(keep)


def _batches(table: PlanColumns, asked: Question, bounds: Bounds, pruned: Counter[str]) -> PlanColumns:
    """Multiply each grid by micro batches that divide its share, and by schedules with their stages per rank."""
    batch = asked.workload.global_batch_size
    rows: list[int] = []
    micro: list[int] = []
    stages: list[int] = []
    schedules: list[str] = []
    for row in range(len(table)):
        local = batch // int(table.dp[row])
        # A share that does not come out whole stays in as micro batch 1, so that the rule counts its rejection.
        sizes = divisors(local) if local and batch % int(table.dp[row]) == 0 else [1]
        limit = bounds.max_micro_batch or max(sizes)
        if bounds.micro_batch is not None:
            pruned[f"micro batch not {bounds.micro_batch}"] += sum(size != bounds.micro_batch for size in sizes)
            sizes, limit = [size for size in sizes if size == bounds.micro_batch], bounds.micro_batch
        orders, odd = _orders(int(table.pp[row]), asked, bounds)
        if odd:
            pruned["odd virtual stages"] += odd * sum(size <= limit for size in sizes)
        too_large = sum(size > limit for size in sizes)
        if too_large:
            pruned[f"micro batch > {limit}"] += too_large
        for size in (s for s in sizes if s <= limit):
            for schedule, virtual in orders:
                rows.append(row)
                micro.append(size)
                stages.append(virtual)
                schedules.append(schedule)
    table = table.take(np.array(rows, dtype=np.int64))
    return replace(
        table,
        micro_batch_size=np.array(micro, dtype=np.int64),
        virtual_stages=np.array(stages, dtype=np.int64),
        schedule=np.array(schedules, dtype=np.str_),
    )


def _orders(pp: int, asked: Question, bounds: Bounds) -> tuple[list[tuple[str, int]], int]:
    """Return (schedule, stages per rank) to try for a pipeline of `pp` ranks, and how many a bound left out."""
    if pp == 1:
        return [("", 1)], 0
    layers = asked.model.layers
    most = min(bounds.max_virtual_stages or layers, max(1, layers // pp))
    every = [
        (name, count)
        for name in asked.framework.schedules
        for count in range(SCHEDULES[name].least_stages, max(SCHEDULES[name].least_stages, most) + 1)
        if count <= (SCHEDULES[name].most_stages or count)
    ]
    kept = [
        (name, count)
        for name, count in every
        if bounds.odd_virtual_stages or count & (count - 1) == 0 or layers % (pp * count) == 0
    ]
    return kept, len(every) - len(kept)


def _choices(
    table: PlanColumns, asked: Question, bounds: Bounds, rejected: Counter[str]
) -> dict[str, tuple[tuple[Any, Mask], ...]]:
    """Return the values of every policy and the nodes where each is legal.

    Policies are judged one at a time: no rule reads two of them. FSDP may keep parameters gathered after the forward
    pass or not; overlap is a choice where sequence parallelism has something to overlap.
    """
    everywhere = np.ones(len(table), dtype=np.bool_)
    sharded = (table.dp_shard * table.cp > 1) & (table.zero_stage < 0)
    overlapping = (table.tp > 1) & table.sequence_parallel
    own, *other = _methods(asked)
    offers: dict[str, list[tuple[Any, Mask]]] = {
        "recompute": [(word, everywhere) for word in bounds.recomputes or asked.framework.recomputes],
        "reshard": [(1, sharded), (0, sharded), (-1, ~sharded)],
        "tp_overlap": [("none", everywhere), *((mode, overlapping) for mode in asked.framework.overlaps)],
        "cp_method": [(own, everywhere), *((method, table.cp > 1) for method in other)],
    }
    choices: dict[str, tuple[tuple[Any, Mask], ...]] = {}
    for name, values in offers.items():
        legal = []
        for value, offered in values:
            keep = offered.copy()
            tried = replace(table, **{name: np.full(len(table), value)})
            for rule in RULES:
                if rule.level is Level.POLICY and rule.grade is Grade.ILLEGAL and rule.applies(asked):
                    hit = keep & rule.broken(tried, asked)
                    if hit.any():
                        rejected[rule.name] += int(hit.sum())
                        keep &= ~hit
            legal.append((value, keep))
        choices[name] = tuple(legal)
    return choices


def _placings(
    table: PlanColumns, cluster: Cluster, workload: Workload, asked: Question
) -> tuple[tuple[Any, Mask], ...]:
    """Return the orders of a node's GPUs (`topology.orders`) and the nodes for whose groups no other order is better."""
    everywhere = np.ones(len(table), dtype=np.bool_)
    orders = node_orders(cluster, asked.gpus) if len(table) else ()
    if not orders:
        return ((-1, everywhere),)
    legal = np.zeros((len(orders), len(table)), dtype=np.bool_)
    degrees = (table.dp_replicate, table.dp_shard, table.tp, table.cp, table.pp, table.ep)
    rows, which = distinct(*degrees, table.zero_stage, table.sequence_parallel)
    groups = GroupTimes(cluster, table_of_columns(table.take(rows), workload), CollectiveModel(cluster))
    for number in range(len(rows)):
        legal[list(undominated(cluster, asked.gpus, groups.patterns(number))), :] |= which == number
    return tuple((number, legal[number]) for number in range(len(orders)) if legal[number].any())


def _methods(asked: Question) -> tuple[str, ...]:
    """Return the methods of context parallelism to try: "", the runtime's own, and what else the framework has."""
    own = asked.cp_method
    return ("", *(method for method in asked.framework.cp_methods if method != own))


def _ordered(counts: Counter[str]) -> dict[str, int]:
    """Most frequent first, names in order among equals: the same on every run."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
