"""The division of layers into stages and over pipeline ranks, and the micro batches in flight on them: columns, one row
per plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_columns import distinct, words
from simulator.columns.plan_table import Floats, PlanTable
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.pipeline.schedules.kind import PipelineRanks, ScheduleKind
from simulator.pipeline.schedules.registry import schedule_kind, schedules_that, where
from simulator.pipeline.schedules.table import stage_rank
from simulator.runtimes.parts import PipelineSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """Layers held by pipeline ranks, shape (plans, columns); columns that a plan does not have hold -1.

    Column c of a plan is its pipeline rank `rank[c]` and stands for `rank_count[c]` ranks. A full layout has a
    column for every rank; a merged one has a column for each kind of rank, the first of its kind, which is enough for
    sums and maxima over ranks. `by_mode[mode]` counts the (dense, MoE) layers that run under each recompute mode, zero
    where there are none.
    """

    dense: NDArray[np.int64]
    moe: NDArray[np.int64]
    rank: NDArray[np.int64]
    rank_count: NDArray[np.int64]
    first: NDArray[np.bool_]  # holds the embedding
    last: NDArray[np.bool_]  # holds the head
    largest: NDArray[np.int64]  # layers of the rank's largest stage
    by_mode: dict[str, tuple[Floats, Floats]] = field(default_factory=dict)
    exists: NDArray[np.bool_] = field(init=False)
    layers: tuple[NDArray[np.int64], NDArray[np.int64]] = field(init=False)  # (dense, MoE); zero where there is none

    def __post_init__(self) -> None:
        object.__setattr__(self, "exists", self.dense >= 0)
        object.__setattr__(self, "layers", (np.maximum(self.dense, 0), np.maximum(self.moe, 0)))

    def under(self, mode: str) -> StageLayout:
        """Return the same ranks with all layers under one recompute mode."""
        dense, moe = (counts.astype(np.float64) for counts in self.layers)
        return replace(self, by_mode={mode: (dense, moe)})


def stage_layers(model_layers: int, plan: Plan, spec: PipelineSpec) -> tuple[int, ...]:
    """Return the layers of each of the pp * virtual_stages stages, first stage first.

    The embedding and the head count as `embedding_weight` and `head_weight` layers; the remainder goes to the first
    stages, as in torchtitan's splitter.
    """
    if plan.layers_per_stage:
        return plan.layers_per_stage
    stages = plan.stages
    if stages == 1:
        return (model_layers,)
    if spec.by_arithmetic:
        return _filled_in_turn(model_layers, stages, spec.head_weight)
    weights = [0.0] * stages
    weights[0], weights[-1] = counted_ends(model_layers, stages, spec)
    total = model_layers + int(sum(weights))
    counts = [total // stages + (1 if i < total % stages else 0) for i in range(stages)]
    return tuple(max(0, count - int(weight)) for count, weight in zip(counts, weights, strict=True))


def _filled_in_turn(model_layers: int, stages: int, head_weight: float) -> tuple[int, ...]:
    """Return the layers of stages that are filled one after the other: a stage is full when it and those before have
    more than their share of the layers and the head (nanotron, models/base.py: build_model). The head is taken to be on
    the last stage, although shares below one layer may leave the last stages empty.
    """
    counts, stage = [0] * stages, 0
    for layers in range(1, model_layers + 1):
        counts[stage] += 1
        if layers > (model_layers + head_weight) * (stage + 1) / stages:
            stage += 1
    return tuple(counts)


def counted_ends(model_layers: int, stages: int, spec: PipelineSpec) -> tuple[float, float]:
    """Return for how many layers the embedding and the head count when layers are divided into `stages`: see
    `PipelineSpec`.

    Megatron-LM subtracts them from the layers of their stages, down to none
    (megatron/core/transformer/transformer_block.py: get_num_layers_to_build). With `ends_fill_stages`, if layers do
    not divide, the head counts if they then divide, else both ends do; if they still do not divide, every stage is
    stated (`needs_layout`).
    """
    if spec.ends_fill_stages and model_layers % stages:
        return (0.0, 1.0) if (model_layers + 1) % stages == 0 else (1.0, 1.0)
    return spec.embedding_weight, spec.head_weight


def needs_layout(model_layers: int, stages: int, spec: PipelineSpec) -> bool:
    """Return whether counting the ends does not make the layers divide, so that every stage must be stated to
    Megatron-LM (--pipeline-model-parallel-layout, megatron/core/transformer/pipeline_parallel_layer_layout.py of
    0.19.2).
    """
    return spec.ends_fill_stages and all((model_layers + ends) % stages for ends in (0, 1, 2))


_V_SHAPED = frozenset(schedules_that(lambda kind: kind.v_shaped))


def rank_of_stage(stage: int, pp: int, schedule: str) -> int:
    """Return the pipeline rank that holds a stage: round robin, or a V for the schedules that fold back."""
    return stage_rank(stage, pp, v_shaped=schedule in _V_SHAPED)


def stage_layout(model: Model, table: PlanTable, spec: PipelineSpec, *, merged: bool = False) -> StageLayout:
    """Return the number of dense and MoE layers on pipeline ranks under every plan.

    `merged`: one column for each kind of rank instead of one for each rank. Where a schedule keeps different numbers of
    micro batches on the ranks of a kind, the column stands for the first of them.
    """
    folded = where(table.schedule, lambda kind: kind.v_shaped)
    own = np.arange(len(table)) if any(p.layers_per_stage for p in table.plans) else np.zeros(len(table))
    rows, which = distinct(table["pp"], table["virtual_stages"], folded, own)
    kinds = [
        _layers_of_ranks(
            model.dense_before,
            table.plans[row].layers_per_stage if table.plans else (),
            int(table["pp"][row]),
            int(table["virtual_stages"][row]),
            spec,
            folded=bool(folded[row]),
            merged=merged,
        )
        for row in rows
    ]
    # In memory one column of plans lies after the other: what has a value for each plan is combined with it in one run.
    padded = np.full((*kinds[0].shape[:1], max(kind.shape[1] for kind in kinds), len(kinds)), -1)
    for number, kind in enumerate(kinds):
        padded[:, : kind.shape[1], number] = kind
    dense, moe, rank, rank_count, first, last, largest = (held.T for held in padded.take(which, axis=-1))
    modes = table.recompute_modes
    whole = np.where(dense >= 0, dense, 0).astype(np.float64), np.where(moe >= 0, moe, 0).astype(np.float64)
    by_mode = {
        mode: (whole[0] * (table.recompute == mode)[:, None], whole[1] * (table.recompute == mode)[:, None])
        for mode in modes
    }
    for row, plan in enumerate(table.plans):
        if plan.recompute_per_stage:
            for counts in by_mode.values():
                counts[0][row], counts[1][row] = 0.0, 0.0
            counted = {mode: (counts[0][row], counts[1][row]) for mode, counts in by_mode.items()}
            _count_modes(model, plan, spec, str(table.schedule[row]), counted)
    return StageLayout(
        dense=dense,
        moe=moe,
        rank=rank,
        rank_count=np.maximum(rank_count, 0),
        first=first > 0,
        last=last > 0,
        largest=np.maximum(largest, 0),
        by_mode=by_mode,
    )


@lru_cache(maxsize=4096)
def _layers_of_ranks(
    dense_before: tuple[int, ...],
    listed: tuple[int, ...],
    pp: int,
    virtual_stages: int,
    spec: PipelineSpec,
    *,
    folded: bool,
    merged: bool,
) -> NDArray[np.int64]:
    """Return rows (dense, MoE, rank, rank_count, first, last, largest) with a column for every pipeline rank of a plan,
    or, `merged`, one for consecutive ranks with the same layers. `dense_before` is the model's; `listed` are the plan's
    layers by stage if it states them.
    """
    held = np.zeros((7, pp), dtype=np.int64)
    start, layers = 0, len(dense_before) - 1
    plan = Plan(pp=pp, virtual_stages=virtual_stages, layers_per_stage=listed)
    for stage, count in enumerate(stage_layers(layers, plan, spec)):
        rank = stage_rank(stage, pp, v_shaped=folded)
        dense = dense_before[min(start + count, layers)] - dense_before[min(start, layers)]
        held[0, rank] += dense
        held[1, rank] += count - dense
        held[6, rank] = max(held[6, rank], count)
        start += count
    held[2], held[3] = np.arange(pp), 1
    held[4, 0], held[5, 0 if folded else pp - 1] = 1, 1
    return _merged(held) if merged else held


def _merged(held: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return one column for consecutive ranks with the same layers: the first of them, and their number."""
    kinds = held[[0, 1, 4, 5]]
    first = np.nonzero(np.any(kinds[:, 1:] != kinds[:, :-1], axis=0))[0] + 1
    first = np.concatenate([[0], first])
    result = held[:, first].copy()
    result[3] = np.diff([*first, held.shape[1]])
    result[6] = np.maximum.reduceat(held[6], first)
    return result


def _count_modes(
    model: Model,
    plan: Plan,
    spec: PipelineSpec,
    schedule: str,
    counts: dict[str, tuple[Floats, Floats]],
) -> None:
    """Add the layers of one plan to the counts of each stage's recompute mode."""
    start = 0
    for stage, count in enumerate(stage_layers(model.layers, plan, spec)):
        rank = rank_of_stage(stage, plan.pp, schedule)
        among = model.dense_among(start, start + count)
        dense, moe = counts[plan.recompute_per_stage[stage]]
        dense[rank] += among
        moe[rank] += count - among
        start += count


def in_flight(table: PlanTable, rank: NDArray[np.int64] | None = None) -> Floats:
    """Return the most micro batches in flight on a pipeline rank when a backward pass begins: a lower bound, exact for
    most schedules. Shape (plans, columns of `rank`), in units of one micro batch through all of the rank's layers.

    `rank` has pipeline ranks, -1 for none; by default every rank. Raises BadPlan for a schedule that is not known.
    """
    held = _by_schedule(table, rank, np.ones(len(table)), lambda kind: kind.in_flight)
    return np.maximum(held, 1.0)


def beside_gradients(table: PlanTable, rank: NDArray[np.int64] | None = None) -> Floats:
    """Return the same once all of the rank's parameters have gradients; 0 where this never happens."""
    return _by_schedule(table, rank, (table.micro_batches > 1).astype(np.float64), lambda kind: kind.beside_gradients)


def _by_schedule(
    table: PlanTable,
    rank: NDArray[np.int64] | None,
    alone: Floats,
    held_by: Callable[[ScheduleKind], Callable[[PipelineRanks], Floats]],
) -> Floats:
    if rank is None:
        rank = np.broadcast_to(np.arange(int(table["pp"].max())), (len(table), int(table["pp"].max())))
    of = PipelineRanks(
        pp=table["pp"][:, None],
        virtual_stages=np.maximum(table["virtual_stages"], 1.0)[:, None],
        micro_batches=table.micro_batches[:, None],
        rank=np.maximum(rank, 0).astype(np.float64),
    )
    held = np.zeros_like(rank, dtype=np.float64)
    held[:] = alone[:, None]
    for name in words(table.schedule):
        if name:
            rows = np.nonzero(table.schedule == name)[0]
            held[rows] = held_by(schedule_kind(name))(of.take(rows))
    return held
