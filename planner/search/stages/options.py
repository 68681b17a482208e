"""The options of every rank of one pipeline, each with its lower bounds of the step.

An option of a rank is a number of layers, how many of them are leading dense layers (before those with experts), and a
recompute mode for each of its stages. Only the account of the step shows which options together are fastest
(`simulator.analytical.account`); lower bounds of a step, one option per row, show which need not be examined
(`simulator.bounds.lower_bound`).

With several stages per rank, layers are spread over them as evenly as possible, first stages first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.analytical.account import AccountInputs
from simulator.analytical.clocks import fastest
from simulator.analytical.memory import memory_of_ranks
from simulator.analytical.rank_memory import RankMemory
from simulator.bounds.screening import ROUNDED, ScreenedPlans, Screening, SharedBlocks
from simulator.columns.plan_columns import PlanColumns
from simulator.columns.plan_table import Floats
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.legality.frameworks import Framework
from simulator.pipeline.schedules.registry import schedule_kind
from simulator.pipeline.stages import StageLayout, rank_of_stage, stage_layers
from simulator.runtimes.library import canonical_recompute
from simulator.step.units import ENDS

Ints = NDArray[np.int64]
MAX_MIXES = 10  # combinations of recompute modes over a rank's stages; beyond, a rank has one mode


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFreedom:
    """What may differ between stages: the number of layers, and the recompute mode, one of `modes`."""

    layers: bool
    modes: tuple[str, ...]

    @property
    def any(self) -> bool:
        return self.layers or len(self.modes) > 1


def stage_freedom(framework: Framework, plan: Plan, model: Model, recomputes: Sequence[str]) -> StageFreedom:
    """Return what `framework` allows to differ between the stages of `plan`.

    If dense layers are between MoE layers, the cost of a stage depends on which layers it has, not only on how many;
    then the runtime's split of layers is kept. Torch recomputes under no schedule that splits the backward pass.
    """
    if plan.pp == 1:
        return StageFreedom(layers=False, modes=(plan.recompute,))
    split = framework.torch_pipelining and schedule_kind(plan.schedule_name).splits_backward
    return StageFreedom(
        layers=framework.lists_layers and model.dense_layers_lead,
        modes=tuple(recomputes) if framework.lists_recompute and not split else (plan.recompute,),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """The options of all ranks of one pipeline that fit into memory, one per entry, ordered by rank.

    An option has `layers`, `first_stage_layers` of them on the rank's first stage, and `dense` leading dense layers (0
    if all layers are of one kind); `mode_mix` is an index into `Pipeline.mode_mixes`. The seconds are those of
    `simulator.bounds.lower_bound.RankBounds`.
    """

    rank: Ints
    layers: Ints
    first_stage_layers: Ints
    dense: Ints
    mode_mix: Ints
    own_s: Floats
    drain_s: Floats
    deferred_s: Floats
    passing_s: Floats
    alone_s: Floats

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def at_least_s(self) -> Floats:
        """Lower bound of the step, whatever the options of other ranks."""
        return np.maximum(self.own_s + self.drain_s, self.alone_s)

    def take(self, which: Any) -> RankOptions:
        """Return the options that `which` (a mask or indices) selects."""
        return RankOptions(**{f.name: getattr(self, f.name)[which] for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One pipeline and the options of its ranks.

    `runtime_layers` are the layers of each stage if the runtime splits them, empty if they are free. `fixed_s` is added
    to the options' bounds of a step, and `inputs` are the inputs of its account.
    """

    plan: Plan  # without numbers of layers or recompute modes by stage
    layers: int
    leading_dense_layers: int  # dense layers before those with experts; 0 if both kinds cost the same
    mode_mixes: tuple[tuple[str, ...], ...]  # recompute modes of a rank's stages, first stage first
    canonical: dict[str, str]  # modes under their names in the runtime's description
    options: RankOptions
    runtime_layers: tuple[int, ...]
    fixed_s: float
    inputs: AccountInputs

    def accounted(self, plan: Plan) -> Plan:
        """Return a plan of this pipeline with its modes under their names in the runtime's description."""
        modes = tuple(self.canonical[word] for word in plan.recompute_per_stage)
        return replace(plan, recompute=self.canonical[plan.recompute], recompute_per_stage=modes)

    def plan_with(self, options: RankOptions) -> Plan:
        """Return the plan in which every rank has its option of `options`, one per rank."""
        plan = self.plan
        stages = plan.stages
        layers, words = [0] * stages, [""] * stages
        for row in range(len(options)):
            rank = int(options.rank[row])
            spread = _spread_layers(int(options.layers[row]), plan.virtual_stages)
            for number, stage in enumerate(stages_of(plan, rank)):
                layers[stage], words[stage] = spread[number], self.mode_mixes[int(options.mode_mix[row])][number]
        if not self.runtime_layers:
            plan = replace(plan, layers_per_stage=tuple(layers))
        if len(set(words)) == 1:
            return replace(plan, recompute=words[0])
        return replace(plan, recompute_per_stage=tuple(words))


def stages_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return the stages of a pipeline rank, in the order of the network."""
    every = range(plan.stages)
    return tuple(stage for stage in every if rank_of_stage(stage, plan.pp, plan.schedule or "") == rank)


def _spread_layers(count: int, stages: int) -> tuple[int, ...]:
    return tuple(count // stages + (number < count % stages) for number in range(stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedPlans:
    """Plans and the costs of their blocks, computed together, since many plans take little longer than one. `needs`
    has what is known of their memory, by number and cutoff.
    """

    plans: tuple[Plan, ...]  # without numbers of layers or recompute modes by stage
    columns: PlanColumns
    shared: SharedBlocks
    needs: dict[tuple[int, float], RankNeeds] = field(default_factory=dict)


def cost_blocks(screening: Screening, plans: Sequence[Plan], columns: PlanColumns, modes: Sequence[str]) -> CostedPlans:
    """Return `plans`, which `columns` has as rows, with the costs of their blocks in every recompute mode."""
    bare = tuple(replace(plan, layers_per_stage=(), recompute_per_stage=()) for plan in plans)
    return CostedPlans(plans=bare, columns=columns, shared=screening.blocks(columns, modes))


def build_pipeline(
    screening: Screening,
    costs: CostedPlans,
    number: int,
    freedom: StageFreedom,
    cutoff_s: float,
    limit_bytes: float = np.inf,
) -> Pipeline | None:
    """Return the options of the ranks of plan `number`, except those with which a step takes `cutoff_s` or more.

    None if all ranks together do not have enough memory for all layers.
    """
    fitting = fitting_options(screening, costs, number, freedom, cutoff_s, limit_bytes)
    if fitting is None:
        return None
    single, counts, modes, runtime_layers = fitting
    model, plan = screening.scenario.model, costs.plans[number]
    mixes = _mode_mixes(freedom.modes, plan.virtual_stages)
    words = [_canonical(screening, word) for word in freedom.modes]
    rows = np.full(len(counts.rank), number)
    costed = screening.plans(costs.columns.take(rows), costs.shared, rows)
    options, fixed_s = _bounded_options(costed, counts, counts.as_rows(plan, modes, words))
    at_least_s = options.at_least_s + fixed_s
    below_cutoff = np.isfinite(at_least_s) & np.isfinite(options.passing_s) & (at_least_s < cutoff_s)
    return Pipeline(
        plan=plan,
        layers=model.layers,
        leading_dense_layers=_leading_dense_layers(model) if freedom.layers else 0,
        mode_mixes=mixes,
        canonical=dict(zip(freedom.modes, words, strict=True))
        | {plan.recompute: _canonical(screening, plan.recompute)},
        options=options.take(below_cutoff),
        runtime_layers=() if freedom.layers else runtime_layers,
        fixed_s=fixed_s,
        inputs=single.inputs,
    )


def fitting_options(
    screening: Screening,
    costs: CostedPlans,
    number: int,
    freedom: StageFreedom,
    cutoff_s: float,
    limit_bytes: float = np.inf,
) -> tuple[ScreenedPlans, _LayerCounts, Ints, tuple[int, ...]] | None:
    """Return plan `number`, the layers and modes that each rank has memory for, and the layers of its stages if the
    runtime splits them. None if all ranks together do not have enough memory for all layers.
    """
    needs = rank_needs(screening, costs, number, freedom, cutoff_s)
    limit_bytes, which = min(limit_bytes, screening.limit_bytes), int(screening.sure > 0)
    if needs.least_room[which] > limit_bytes:
        return None
    fits = np.nonzero(needs.held[:, which] <= limit_bytes)[0]
    return needs.single, needs.counts.take(fits), needs.modes[fits], needs.runtime_layers


@dataclass(frozen=True)  # no slots, for the cached property
class RankNeeds:
    """The layers and modes that each rank of a plan could have, and what they allocate and reserve at least in bytes,
    shape (entries, 2).
    """

    single: ScreenedPlans
    counts: _LayerCounts
    modes: Ints
    runtime_layers: tuple[int, ...]
    held: Floats

    @cached_property
    def least_room(self) -> Floats:
        """The least limits, of allocated and of reserved bytes, with which all ranks together hold all layers."""
        ranks, layers = self.counts.rank, self.counts.sizes.sum(axis=1)
        own = np.where(ranks == np.arange(int(self.single.table["pp"][0]))[:, None], layers, 0)
        found = []
        for held in self.held.T:
            order = np.argsort(held, kind="stable")
            most = np.maximum.accumulate(own[:, order], axis=1)  # layers of each rank with so much memory
            enough = (most > 0).all(axis=0) & (most.sum(axis=0) >= self.single.screening.scenario.model.layers)
            found.append(float(held[order[enough.argmax()]]) if enough.any() else np.inf)
        return np.array(found)


def rank_needs(
    screening: Screening, costs: CostedPlans, number: int, freedom: StageFreedom, cutoff_s: float
) -> RankNeeds:
    """Return what the ranks of plan `number` could hold if its step is to take less than `cutoff_s`."""
    if (known := costs.needs.get((number, cutoff_s))) is not None:
        return known
    model, plan = screening.scenario.model, costs.plans[number]
    mixes = _mode_mixes(freedom.modes, plan.virtual_stages)
    row = np.array([number])
    single = screening.plans(costs.columns.take(row), costs.shared, row)
    runtime_layers = stage_layers(model.layers, plan, single.operators.spec.pipeline)
    counts = (
        _free_layer_counts(model, plan, _max_layers(single, cutoff_s))
        if freedom.layers
        else _runtime_layer_counts(model, plan, runtime_layers)
    )
    counts = counts.with_mixes(len(mixes))
    words = [_canonical(screening, word) for word in freedom.modes]
    modes = np.array([[freedom.modes.index(word) for word in mix] for mix in mixes])[counts.mode_mix]
    layout = counts.as_one_row(plan, modes, words)
    ranks = RankMemory(model, single.operators, single.context, layout, single.blocks, single.parameters)
    memory = memory_of_ranks(ranks).scaled(single.known)
    held = np.stack([memory.peak_bytes[0], memory.reserved_bytes[0]], axis=1)
    found = costs.needs[number, cutoff_s] = RankNeeds(single, counts, modes, runtime_layers, held)
    return found


def _canonical(screening: Screening, word: str) -> str:
    return canonical_recompute(word, screening.scenario.runtime)


def _mode_mixes(modes: Sequence[str], stages: int) -> tuple[tuple[str, ...], ...]:
    """Return the combinations of recompute modes over a rank's stages, earlier `modes` on earlier stages."""
    every = tuple(combinations_with_replacement(modes, stages))
    return every if len(every) <= MAX_MIXES else tuple((mode,) * stages for mode in modes)


def _max_layers(single: ScreenedPlans, cutoff_s: float) -> int:
    """Return the largest number of layers of a rank whose kernels take no more than `cutoff_s`."""
    blocks = [block for name, block in single.blocks.items() if name not in ENDS]
    shortest_s = min(float((b.forward.device_s + b.backward.device_s)[0]) for b in blocks)
    layer_s = float(single.table.micro_batches[0]) * fastest(single.context) * shortest_s
    layers = single.screening.scenario.model.layers
    return int(cutoff_s / layer_s) if layer_s * layers > cutoff_s else layers


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerCounts:
    """Numbers of layers that ranks could have, one possibility per entry: by stage of the rank, all and dense ones."""

    rank: Ints
    sizes: Ints  # shape (entries, stages of a rank)
    dense: Ints  # same shape; equal to sizes if all layers are dense
    mode_mix: Ints
    distinguishes_dense: bool  # whether dense and MoE layers are distinguished

    def take(self, which: NDArray[np.intp]) -> _LayerCounts:
        return _LayerCounts(
            rank=self.rank[which],
            sizes=self.sizes[which],
            dense=self.dense[which],
            mode_mix=self.mode_mix[which],
            distinguishes_dense=self.distinguishes_dense,
        )

    def with_mixes(self, mixes: int) -> _LayerCounts:
        """Return every entry with each of `mixes` mode mixes."""
        rows = np.repeat(np.arange(len(self.rank)), mixes)
        return replace(self.take(rows), mode_mix=np.tile(np.arange(mixes), len(self.rank)))

    def as_one_row(self, plan: Plan, modes: Ints, words: Sequence[str]) -> StageLayout:
        """Return a layout of one plan whose columns are all entries instead of its ranks, to cost their memory."""
        return self._layout(plan, modes, words, lambda values: values[None, :])

    def as_rows(self, plan: Plan, modes: Ints, words: Sequence[str]) -> StageLayout:
        """Return a layout with one row per entry, whose rank is alone in it: in column 0 if it is the first, else 1."""

        def alone_in_row(values: NDArray[Any]) -> NDArray[Any]:
            empty = np.zeros_like(values)
            return np.stack([np.where(self.rank == 0, values, empty), np.where(self.rank == 0, empty, values)], axis=1)

        return self._layout(plan, modes, words, alone_in_row)

    def _layout(
        self, plan: Plan, modes: Ints, words: Sequence[str], shaped: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> StageLayout:
        dense, rest = self.dense, self.sizes - self.dense
        last = rank_of_stage(plan.stages - 1, plan.pp, plan.schedule or "")
        there = shaped(np.ones(len(self.rank), dtype=np.int64)) > 0
        return StageLayout(
            dense=np.where(there, shaped(dense.sum(axis=1)), -1),
            moe=np.where(there, shaped(rest.sum(axis=1)), -1),
            rank=np.where(there, shaped(self.rank), -1),
            rank_count=there.astype(np.int64),
            first=shaped(self.rank == 0) & there,
            last=shaped(self.rank == last) & there,
            largest=shaped(self.sizes.max(axis=1)),
            by_mode={
                word: (
                    shaped((dense * (modes == number)).sum(axis=1)) * 1.0,
                    shaped((rest * (modes == number)).sum(axis=1)) * 1.0,
                )
                for number, word in enumerate(words)
            },
        )


def _leading_dense_layers(model: Model) -> int:
    """Return the number of dense layers before those with experts."""
    return model.dense_layers if model.moe else 0


def _free_layer_counts(model: Model, plan: Plan, max_layers: int) -> _LayerCounts:
    """Return all numbers of layers, and of leading dense ones on its first stage, that each rank could have.

    Leading dense layers are on first stages only: splits with which they reach the second round of a looped schedule
    are left out.
    """
    stages = plan.virtual_stages
    max_layers = min(max_layers, model.layers - (plan.pp - 1) * stages)
    leading = _leading_dense_layers(model)
    shape = (plan.pp, max(0, max_layers - stages + 1), leading + 1)
    rank, count, dense = (index.ravel() for index in np.indices(shape))
    count = count + stages
    number = np.arange(stages)[None, :]
    sizes = count[:, None] // stages + (number < count[:, None] % stages)
    possible = dense <= sizes[:, 0]
    rank, sizes, dense = rank[possible], sizes[possible], dense[possible]
    dense_by_stage = np.zeros_like(sizes)
    dense_by_stage[:, 0] = dense
    return _LayerCounts(
        rank=rank,
        sizes=sizes,
        dense=dense_by_stage if model.moe else sizes,
        mode_mix=np.zeros(len(rank), dtype=np.int64),
        distinguishes_dense=model.moe is not None,
    )


def _runtime_layer_counts(model: Model, plan: Plan, layers_of_stage: Sequence[int]) -> _LayerCounts:
    """Return the runtime's split of layers over ranks."""
    dense = np.diff(np.array(model.dense_before)[np.concatenate([[0], np.cumsum(layers_of_stage)])])
    stages = np.array([stages_of(plan, rank) for rank in range(plan.pp)])
    return _LayerCounts(
        rank=np.arange(plan.pp),
        sizes=np.array(layers_of_stage)[stages],
        dense=dense[stages],
        mode_mix=np.zeros(plan.pp, dtype=np.int64),
        distinguishes_dense=False,
    )


def _bounded_options(plans: ScreenedPlans, counts: _LayerCounts, layout: StageLayout) -> tuple[RankOptions, float]:
    """Return the entries with their lower bounds of the step, and the seconds that are added for all of them."""
    column = np.where(counts.rank == 0, 0, 1)
    every = np.arange(len(column))
    first_stage = counts.sizes[:, 0]
    with np.errstate(invalid="ignore"):
        bound = plans.lower_bound(layout)
        ranks = bound.of_ranks(first_stage[:, None].astype(np.float64))
        fixed_s = float(bound.fixed_s()[0]) * ROUNDED

    def seconds(name: str) -> Floats:
        return np.asarray(getattr(ranks, name)[every, column])

    told_apart = counts.distinguishes_dense
    none = np.zeros_like(counts.rank)
    options = RankOptions(
        rank=counts.rank,
        layers=counts.sizes.sum(axis=1),
        first_stage_layers=first_stage if told_apart else none,
        dense=counts.dense.sum(axis=1) if told_apart else none,
        mode_mix=counts.mode_mix,
        own_s=seconds("own_s") * ROUNDED,
        drain_s=seconds("drain_s") * ROUNDED,
        deferred_s=seconds("deferred_s"),
        passing_s=seconds("passing_s") * ROUNDED,
        alone_s=seconds("alone_s") * ROUNDED,
    )
    return options, fixed_s
