"""Enumerate the legal plans for N GPUs in one framework, and count what was left out and why.

Plans are enumerated in three levels, each for the remaining nodes of the previous one: grids (degrees, ZeRO stage,
sequence parallelism), batches (micro batch, stages per rank, schedule), and policies (recompute, resharding, overlap,
method of context parallelism). What a *rule* forbids is counted under its name in `rejected`; what a *bound* of the
search leaves out, although it might be legal, is counted in `pruned`. Both count at the level where it happened, so
`total = legal + rejected + pruned` is the number of leaves of the search tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from planner.question.question import Question
from planner.search.plan_space.stated import Spans, Values, among, each_value, within
from simulator.collectives.cost import CollectiveModel
from simulator.collectives.group_times import GroupTimes
from simulator.columns.plan_columns import CARRIED, PlanColumns, columns_with, distinct
from simulator.columns.plan_table import plan_table
from simulator.config.plan import MESH_AXES, Plan
from simulator.legality.rule import Grade, Level, Mask, Rule, RuleFacts, divisors
from simulator.legality.rules import RULES
from simulator.pipeline.schedules.registry import SCHEDULES
from topology.cluster import Cluster
from topology.rates.orders import node_orders, placement_of_order, undominated_orders
from topology.time_limit import check_time

POLICIES = ("recompute", "reshard_after_forward", "tp_overlap", "cp_method")  # fields that no grid nor batch decides
NODE_FIELDS = tuple(name for name in CARRIED if name not in POLICIES)
# The fields of a pipeline, except those in which its stages may differ.
PIPELINE_FIELDS = (*NODE_FIELDS, "cp_method", "reshard_after_forward")
# Fields whose values a search tries if they are not stated.
SEARCHED = (
    *(*MESH_AXES, "ep", "etp", "virtual_stages", "micro_batch_size"),
    *("schedule", "recompute", "offload", "ep_overlap"),
)
ENDS = (0, 1, 2)  # ends that count as layers: none, the loss, or the embedding as well
GRID_FIELDS = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "etp", "zero_stage", "sequence_parallel", "offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of the search, which are not rules. None means no limit, except for `max_tp`: the size of a node.

    `stated` has, by field of a plan, the values that the user fixed: plans have only these, whatever the other limits.
    A stated schedule requires a pipeline. If not stated, state stays on the GPUs, the all-to-all of experts is either
    not overlapped or overlapped in the framework's most effective way, and all recompute modes of the framework are
    tried.
    """

    stated: Mapping[str, Values] = field(default_factory=dict)
    max_tp: int | None = None
    max_cp: int | None = None
    max_pp: int | None = None
    max_micro_batch: int | None = 16
    max_virtual_stages: int | None = 8
    batch_step: int | None = None  # sequences of which micro batch x data parallel is a divisor
    without_sequence_parallel: bool = False  # also search plans without sequence parallelism: same traffic, more memory
    odd_virtual_stages: bool = False  # also numbers that neither divide the layers nor are powers of two
    min_tokens_per_context_rank: int = 1024  # with fewer, attention kernels become too small

    def fixing(self, **values: Values | None) -> Bounds:
        """Return the same limits with other values of some fields; None frees a field."""
        stated = {name: value for name, value in {**self.stated, **values}.items() if value is not None}
        return replace(self, stated=stated)

    def spans(self, name: str) -> Spans | None:
        """Return the stated spans of a numeric field; None if it is free."""
        return cast("Spans | None", self.stated.get(name))

    def words(self, name: str) -> tuple[str, ...] | None:
        """Return the stated words of a field; None if it is free."""
        return cast("tuple[str, ...] | None", self.stated.get(name))

    @property
    def offloads(self) -> tuple[str, ...]:
        return self.words("offload") or ("none",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Legal (grid, micro batch, schedule) and the policies of each: the search tree above its leaves.

    Recomputation and resharding determine memory, so they are expanded first (`leaves`). Overlap, placement and the
    method of context parallelism hardly affect memory, so only leaves that fit are multiplied by them (`variants`).
    """

    columns: PlanColumns
    choices: dict[str, tuple[tuple[Any, Mask], ...]]  # by field: (value, nodes for which it is legal), default first
    rejected: dict[str, int]
    pruned: dict[str, int]

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def leaf_counts(self) -> NDArray[np.int64]:
        """Number of leaves and variants of each node."""
        return self._count("recompute") * self._count("reshard_after_forward") * self.variants_per_leaf

    @property
    def variants_per_leaf(self) -> NDArray[np.int64]:
        """Number of variants of each leaf of a node."""
        return self._count("tp_overlap") * self._count("cp_method") * self._count("placing")

    def where(self, mask: Mask) -> Nodes:
        """Return the nodes of a mask."""
        if mask.all():
            return self
        choices = {
            name: tuple((value, legal[mask]) for value, legal in values) for name, values in self.choices.items()
        }
        return replace(self, columns=self.columns.take(mask), choices=choices)

    def leaves(self, rows: NDArray[np.intp]) -> tuple[PlanColumns, NDArray[np.intp]]:
        """Return nodes `rows` with every recompute mode and resharding, and the node of each."""
        return self._multiply(self.columns.take(rows), rows, ("recompute", "reshard_after_forward"))

    def variants(self, leaves: PlanColumns, nodes: NDArray[np.intp]) -> tuple[PlanColumns, NDArray[np.intp]]:
        """Return the variants of `leaves`, whose nodes are `nodes`, and the leaf of each."""
        free = ("tp_overlap", "cp_method", "placing")
        found, of_node = self._multiply(leaves, nodes, free, origin=np.arange(len(nodes)))
        return found, of_node

    def settings(self, plan: PlanColumns) -> PlanColumns:
        """Return one plan of these nodes in every overlap mode and placement that its node allows."""
        return self._multiply(plan, self.of(plan), ("tp_overlap", "placing"))[0]

    def of(self, plan: PlanColumns) -> NDArray[np.intp]:
        """Return the number of the node of one plan."""
        same = np.logical_and.reduce([getattr(self.columns, name) == getattr(plan, name)[0] for name in NODE_FIELDS])
        return np.nonzero(same)[0][:1]

    def _count(self, field: str) -> NDArray[np.int64]:
        return sum((legal.astype(np.int64) for _, legal in self.choices[field]), np.zeros(len(self), dtype=np.int64))

    def _multiply(
        self,
        columns: PlanColumns,
        nodes: NDArray[np.intp],
        names: tuple[str, ...],
        origin: NDArray[np.intp] | None = None,
    ) -> tuple[PlanColumns, NDArray[np.intp]]:
        """Return rows with every legal value of the fields `names`, in the order of rows and then of values."""
        origin = nodes if origin is None else origin
        every = list(product(*(self.choices[name] for name in names)))
        legal = np.stack([np.logical_and.reduce([mask[nodes] for _, mask in chosen]) for chosen in every], axis=1)
        rows, which = np.nonzero(legal)
        values = [np.array([chosen[i][0] for chosen in every])[which] for i in range(len(names))]
        return replace(columns.take(rows), **dict(zip(names, values, strict=True))), origin[rows]


def plan_of(columns: PlanColumns, row: int, cluster: Cluster) -> Plan:
    """Return a row as a plan, with the placement of ranks on GPUs if the row has one."""
    plan, placing = columns.plan(row), int(columns.placing[row])
    if placing < 0:
        return plan
    order = node_orders(cluster, plan.gpus)[placing]
    return replace(plan, placement=placement_of_order(order, plan.gpus, cluster.gpus_per_node))


def enumerate_nodes(question: Question, *, bounds: Bounds | None = None) -> Nodes:
    """Return the nodes of all legal plans that use exactly the GPUs of the question."""
    facts = question.facts()
    bounds = bounds or Bounds()
    if bounds.max_tp is None and bounds.spans("tp") is None:
        bounds = replace(bounds, max_tp=facts.gpus_per_node)
    rejected: Counter[str] = Counter()
    pruned: Counter[str] = Counter()

    table = _grid_columns(list(_grids(facts, bounds)), bounds.offloads)
    table = _remove_illegal(table, facts, Level.GRID, rejected)
    table = _apply_bounds(table, _grid_bound_masks(table, facts, bounds), pruned)
    table = with_stated(_with_batches(table, facts, bounds, pruned), bounds)
    table = _remove_illegal(table, facts, Level.BATCH, rejected)
    choices = _policy_choices(table, facts, bounds, rejected)
    choices["placing"] = _placement_choices(table, question)
    found = Nodes(
        columns=table, choices=choices, rejected=_most_frequent_first(rejected), pruned=_most_frequent_first(pruned)
    )
    return found.where(found.leaf_counts > 0)


def _grids(facts: RuleFacts, bounds: Bounds) -> Iterator[tuple[int, ...]]:
    """Yield (dp_replicate, dp_shard, tp, cp, pp, ep, etp, zero, sp, number of the offload) for every factorisation of
    the GPU count into possible degrees.
    """
    framework = facts.framework
    experts = facts.model.moe.experts if facts.model.moe else 1
    for pp in among(divisors(facts.gpus), bounds.spans("pp")):
        for tp in among(divisors(facts.gpus // pp), bounds.spans("tp")):
            for cp in among(divisors(facts.gpus // pp // tp), bounds.spans("cp")):
                dp = facts.gpus // pp // tp // cp
                # A model without experts has no expert parallelism to reject: ep > 1 is not a candidate at all.
                expert_degrees = [e for e in among(divisors(experts), bounds.spans("ep")) if (dp * cp * tp) % e == 0]
                sharding = [(dp // s, s, -1) for s in divisors(dp)]
                if framework.zero_stages:
                    stages = framework.searched_zero_stages or framework.zero_stages
                    # A single rank shards nothing, but needs a ZeRO stage for offloading.
                    alone = dp == 1 and set(bounds.offloads) == {"none"}
                    sharding = [(dp, 1, z) for z in stages if not alone or z == 0]
                sequence = (0, 1) if tp > 1 and framework.sequence_parallel else (0,)
                offloads, splits = range(len(bounds.offloads)), _splits(tp, dp * cp * tp, facts, bounds)
                for (replicate, shard, zero), ep, etp, sp, away in product(
                    sharding, expert_degrees, splits, sequence, offloads
                ):
                    useless = dp == 1 and zero > 0 and bounds.offloads[away] == "none"
                    if (
                        not useless
                        and within(replicate, bounds.spans("dp_replicate"))
                        and within(shard, bounds.spans("dp_shard"))
                    ):
                        yield replicate, shard, tp, cp, pp, ep, etp, zero, sp, away


def _splits(tp: int, ranks: int, facts: RuleFacts, bounds: Bounds) -> list[int]:
    """Return the numbers of ranks over which each expert may be split: stated ones, else one rank and all of tensor
    parallelism if the framework has a choice. -1 is its default.
    """
    stated = bounds.spans("etp")
    if stated is not None:
        return [degree for degree in divisors(ranks) if within(degree, stated)]
    return sorted({1, tp}) if tp > 1 and facts.model.moe and facts.framework.splits_experts else [-1]


def _grid_columns(rows: list[tuple[int, ...]], offloads: tuple[str, ...]) -> PlanColumns:
    data = np.array(rows, dtype=np.int64).reshape(len(rows), len(GRID_FIELDS))
    given: dict[str, NDArray[Any]] = {name: data[:, i] for i, name in enumerate(GRID_FIELDS)}
    given["sequence_parallel"] = given["sequence_parallel"].astype(np.bool_)
    given["offload"] = np.array(offloads)[given["offload"]]
    return columns_with(len(rows), **given)


def _remove_illegal(table: PlanColumns, facts: RuleFacts, level: Level, rejected: Counter[str]) -> PlanColumns:
    """Remove rows that break a rule of `level`, each counted under the first rule it breaks."""
    everywhere = np.ones(len(table), dtype=np.bool_)
    return table.take(_legal(everywhere, (rule for rule in RULES if rule.level is level), table, facts, rejected))


def _legal(keep: Mask, rules: Iterable[Rule], table: PlanColumns, facts: RuleFacts, rejected: Counter[str]) -> Mask:
    """Return which of the rows to `keep` break none of some rules."""
    keep = keep.copy()
    for rule in rules:
        check_time()
        if rule.grade is Grade.ILLEGAL and rule.applies(facts):
            hit = keep & rule.broken(table, facts)
            if hit.any():
                rejected[rule.name] += int(hit.sum())
                keep &= ~hit
    return keep


def _grid_bound_masks(table: PlanColumns, facts: RuleFacts, bounds: Bounds) -> dict[str, NDArray[np.bool_]]:
    def over(values: NDArray[np.int64], limit: int | None) -> NDArray[np.bool_]:
        return values > limit if limit is not None else np.zeros(len(values), dtype=np.bool_)

    could = (table.tp > 1) & ((facts.workload.seq_len // table.cp) % table.tp == 0)
    off = (
        could & ~table.sequence_parallel & (facts.framework.sequence_parallel and not bounds.without_sequence_parallel)
    )
    crumbs = (table.cp > 1) & (facts.workload.seq_len // table.cp < bounds.min_tokens_per_context_rank)
    crumbs &= bounds.spans("cp") is None
    return {
        f"tensor parallelism over {bounds.max_tp}": over(table.tp, bounds.max_tp),
        f"context parallelism over {bounds.max_cp}": over(table.cp, bounds.max_cp),
        f"pipeline parallelism over {bounds.max_pp}": over(table.pp, bounds.max_pp),
        f"under {bounds.min_tokens_per_context_rank:,} tokens of a sequence on a rank": crumbs,
        "sequence parallelism off": off,
    }


def _apply_bounds(table: PlanColumns, masks: dict[str, NDArray[np.bool_]], pruned: Counter[str]) -> PlanColumns:
    keep = np.ones(len(table), dtype=np.bool_)
    for name, mask in masks.items():
        hit = keep & mask
        if hit.any():
            pruned[name] += int(hit.sum())
            keep &= ~hit
    return table.take(keep)


def _with_batches(table: PlanColumns, facts: RuleFacts, bounds: Bounds, pruned: Counter[str]) -> PlanColumns:
    """Return each grid with every micro batch that divides its share of the batch, and every schedule, number of stages
    per rank and overlap mode of the all-to-all of experts.
    """
    firsts, which = distinct(table.dp, table.pp, table.ep)  # what the choices follow from
    alike = np.bincount(which, minlength=len(firsts)).tolist()
    every = [
        _batches(table, row, facts, bounds, pruned, count) for row, count in zip(firsts.tolist(), alike, strict=True)
    ]
    counts = np.array([len(choices) for choices in every], dtype=np.int64)
    of_row = counts[which]
    rows = np.repeat(np.arange(len(table)), of_row)
    # The choices of a row follow each other, from where those of its kind begin.
    chosen = np.repeat((np.cumsum(counts) - counts)[which] - (np.cumsum(of_row) - of_row), of_row) + np.arange(
        len(rows)
    )
    columns = zip(*chain.from_iterable(every), strict=True) if len(rows) else ((),) * len(BATCH_FIELDS)
    given: dict[str, Any] = {
        name: np.array(values, dtype=dtype)[chosen]
        for (name, dtype), values in zip(BATCH_FIELDS.items(), columns, strict=True)
    }
    return replace(table.take(rows), **given)


# What `_batches` chooses, and the type of each column.
BATCH_FIELDS = {"micro_batch_size": np.int64, "schedule": np.str_, "virtual_stages": np.int64, "ep_overlap": np.str_}


def _batches(
    table: PlanColumns, row: int, facts: RuleFacts, bounds: Bounds, pruned: Counter[str], alike: int
) -> list[tuple[int, str, int, str]]:
    """Return the choices for a grid, in the order of BATCH_FIELDS; what bounds leave out counts for each of so many
    grids that are `alike`.
    """
    check_time()
    dp, pp, ep = int(table.dp[row]), int(table.pp[row]), int(table.ep[row])
    local, rest = divmod(facts.workload.global_batch_size, dp)
    # If the batch does not divide, keep micro batch 1, so that the rule counts the rejection.
    sizes = divisors(local) if local and not rest else [1]
    limit = bounds.max_micro_batch or max(sizes)
    if (sizes_stated := bounds.spans("micro_batch_size")) is not None:
        sizes, limit = among(sizes, sizes_stated), max(sizes)
    if bounds.batch_step is not None:
        whole = [size for size in sizes if bounds.batch_step % (size * dp) == 0]
        pruned[f"micro batch x data parallel not a divisor of {bounds.batch_step}"] += (len(sizes) - len(whole)) * alike
        sizes = whole
    orders, odd = _schedules(pp, facts, bounds)
    small = [size for size in sizes if size <= limit]
    if odd and small:
        pruned["odd virtual stages"] += odd * len(small) * alike
    if len(small) < len(sizes):
        pruned[f"micro batch over {limit}"] += (len(sizes) - len(small)) * alike
    return [
        (size, schedule, virtual, overlap)
        for size in small
        for (schedule, virtual), overlap in product(orders, _ep_overlaps(ep, local // size, facts, bounds))
    ]


def with_stated(table: PlanColumns, bounds: Bounds) -> PlanColumns:
    """Return each plan with every stated value of the fields that no search varies."""
    for name in bounds.stated.keys() - {*SEARCHED}:
        values = np.array(each_value(bounds.stated[name], name))
        rows, which = np.divmod(np.arange(len(table) * len(values)), len(values))
        changed: dict[str, Any] = {name: values[which]}
        table = replace(table.take(rows), **changed)
    return table


def _ep_overlaps(ep: int, micro_batches: int, facts: RuleFacts, bounds: Bounds) -> tuple[str, ...]:
    """Return the overlap modes of the all-to-all of experts to search; all stated ones if any."""
    stated = bounds.words("ep_overlap")
    if stated is not None:
        return stated
    return ("none", *facts.framework.ep_overlaps[-1:]) if ep > 1 and micro_batches > 1 else ("none",)


def _schedules(pp: int, facts: RuleFacts, bounds: Bounds) -> tuple[list[tuple[str, int]], int]:
    """Return the (schedule, stages per rank) to search for `pp` ranks, and the number that a bound left out."""
    orders = bounds.words("schedule")
    if pp == 1:
        return ([("", 1)] if orders is None and within(1, bounds.spans("virtual_stages")) else []), 0
    layers, stated = facts.model.layers, bounds.spans("virtual_stages")
    most = min(
        (bounds.max_virtual_stages if stated is None else None) or layers, max(1, (layers + 2) // pp)
    )  # embedding and head may count as layers
    possible = [
        (name, count)
        for name in facts.framework.schedules
        if orders is None or name in orders
        for count in range(SCHEDULES[name].least_stages, max(SCHEDULES[name].least_stages, most) + 1)
        if count <= (SCHEDULES[name].most_stages or count) and within(count, stated)
    ]
    searched = [
        (name, count)
        for name, count in possible
        if stated is not None or bounds.odd_virtual_stages or count & (count - 1) == 0 or layers % (pp * count) == 0
    ]
    if not facts.framework.uneven_stages and stated is None and not bounds.odd_virtual_stages:
        # Numbers of stages that only an explicit layout allows are for ranks whose layers no number of stages divides.
        even = [(name, count) for name, count in searched if any((layers + ends) % (pp * count) == 0 for ends in ENDS)]
        searched = even or searched
    return searched, len(possible) - len(searched)


def _policy_choices(
    table: PlanColumns, facts: RuleFacts, bounds: Bounds, rejected: Counter[str]
) -> dict[str, tuple[tuple[Any, Mask], ...]]:
    """Return the values of every policy and the nodes for which each is legal.

    Policies are checked one at a time, since no rule reads two of them. Resharding is a choice if FSDP shards
    parameters, and overlap if sequence parallelism has communication to overlap.
    """
    everywhere = np.ones(len(table), dtype=np.bool_)
    sharded = (table.dp_shard * table.cp > 1) & (table.zero_stage < 0)
    overlapping = (table.tp > 1) & table.sequence_parallel
    own, *other = _cp_methods(facts)
    offers: dict[str, list[tuple[Any, Mask]]] = {
        "recompute": [(word, everywhere) for word in bounds.words("recompute") or facts.framework.recomputes],
        "reshard_after_forward": [(1, sharded), (0, sharded), (-1, ~sharded)],
        "tp_overlap": [("none", everywhere), *((mode, overlapping) for mode in facts.framework.overlaps)],
        "cp_method": [(own, everywhere), *((method, table.cp > 1) for method in other)],
    }
    choices: dict[str, tuple[tuple[Any, Mask], ...]] = {}
    for name, values in offers.items():
        rules = [rule for rule in RULES if rule.policy == name]
        choices[name] = tuple(
            (value, _legal(offered, rules, replace(table, **{name: np.full(len(table), value)}), facts, rejected))
            for value, offered in values
        )
    return choices


def _placement_choices(table: PlanColumns, question: Question) -> tuple[tuple[Any, Mask], ...]:
    """Return the orders of GPUs (`topology.rates.orders`), each with the nodes for which no other order is better."""
    everywhere = np.ones(len(table), dtype=np.bool_)
    cluster, gpus = question.cluster, question.count
    orders = node_orders(cluster, gpus) if len(table) else ()
    if not orders:
        return ((-1, everywhere),)
    legal = np.zeros((len(orders), len(table)), dtype=np.bool_)
    degrees = (table.dp_replicate, table.dp_shard, table.tp, table.cp, table.pp, table.ep, table.etp)
    rows, which = distinct(*degrees, table.zero_stage, table.sequence_parallel)
    groups = GroupTimes(cluster, plan_table(table.take(rows), question.workload), CollectiveModel(cluster))
    for number in range(len(rows)):
        legal[list(undominated_orders(cluster, gpus, groups.patterns(number))), :] |= which == number
    return tuple((number, legal[number]) for number in range(len(orders)) if legal[number].any())


def _cp_methods(facts: RuleFacts) -> tuple[str, ...]:
    """Return the methods of context parallelism to search: "" (the runtime's default) and the framework's others."""
    own = facts.cp_method
    return ("", *(method for method in facts.framework.cp_methods if method != own))


def _most_frequent_first(counts: Counter[str]) -> dict[str, int]:
    """Return counts by frequency, largest first, then by name."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
