"""Every legal grid for N GPUs in one framework, and an account of what was left out and why.

Three levels, each multiplied only with what survived the one before: grids (degrees, ZeRO stage, sequence
parallelism), batches (micro batch, stages per rank, schedule), policies (recompute, resharding). What a *rule* forbids
is counted under the rule's name in `rejected`; what a *bound* of the search leaves out, though it might be legal, is
counted in `pruned`. Both count at the level where it happened, so `total = legal + rejected + pruned` is the number of
leaves of the search tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from planner.frameworks import SCHEDULES, Framework
from planner.legality import Grade, Question, question
from planner.rules import RULES, Level, divisors
from simulator.model import Model
from simulator.plan import Plan
from simulator.plan_columns import PlanColumns
from simulator.runtime import Runtime
from simulator.workload import Workload
from topology.cluster import Cluster

AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "zero_stage", "sequence_parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of the search that are no rules. None: no limit, except `max_tp`, where None is the size of a node."""

    max_tp: int | None = None
    max_cp: int | None = None
    max_pp: int | None = None
    max_micro_batch: int | None = 16
    max_virtual_stages: int | None = 8
    recomputes: tuple[str, ...] | None = None  # None: all that the framework has
    without_sequence_parallel: bool = False  # also without it where it could be on: same traffic, more memory
    odd_virtual_stages: bool = False  # also counts that neither divide the layers nor are powers of two
    min_tokens_per_context_rank: int = 1024  # context parallelism beyond it slices attention into crumbs


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Legal plans as columns, with the account of the rest."""

    columns: PlanColumns
    rejected: dict[str, int]
    pruned: dict[str, int]

    @property
    def total(self) -> int:
        return len(self) + sum(self.rejected.values()) + sum(self.pruned.values())

    def __len__(self) -> int:
        return len(self.columns)

    def plans(self, start: int = 0, stop: int | None = None) -> list[Plan]:
        """Return the plans of rows `start` to `stop`."""
        return [self.columns.plan(row) for row in range(start, len(self) if stop is None else min(stop, len(self)))]


def enumerate_candidates(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    framework: str | Framework,
    *,
    gpus: int | None = None,
    runtime: Runtime | None = None,
    bounds: Bounds | None = None,
) -> Candidates:
    """Return all legal plans that use exactly `gpus` GPUs (default: the whole cluster)."""
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
    table = _policies(table, asked, bounds)
    table = _sift(table, asked, Level.POLICY, rejected)
    return Candidates(columns=table, rejected=_ordered(rejected), pruned=_ordered(pruned))


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
        for name in asked.framework.searched_schedules
        for count in range(SCHEDULES[name].least_stages, max(SCHEDULES[name].least_stages, most) + 1)
        if count <= (SCHEDULES[name].most_stages or count)
    ]
    kept = [
        (name, count)
        for name, count in every
        if bounds.odd_virtual_stages or count & (count - 1) == 0 or layers % (pp * count) == 0
    ]
    return kept, len(every) - len(kept)


def _policies(table: PlanColumns, asked: Question, bounds: Bounds) -> PlanColumns:
    """Multiply by recompute policies, and by whether FSDP reshards parameters after the forward pass."""
    recomputes = np.array(bounds.recomputes or asked.framework.recomputes, dtype=np.str_)
    sharded = (table.dp_shard * table.cp > 1) & (table.zero_stage < 0)
    repeats = np.where(sharded, 2, 1) * len(recomputes)
    index = np.repeat(np.arange(len(table)), repeats)
    starts = np.repeat(np.cumsum(repeats) - repeats, repeats)
    inner = np.arange(len(index)) - starts
    return replace(
        table.take(index),
        recompute=recomputes[inner % len(recomputes)],
        reshard=np.where(sharded[index], 1 - inner // len(recomputes), -1),
    )


def _ordered(counts: Counter[str]) -> dict[str, int]:
    """Most frequent first, names in order among equals: the same on every run."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
