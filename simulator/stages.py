"""How layers spread over pipeline ranks, and what a schedule loses: both as columns, one row per plan.

Bubbles are the schedules' closed forms: GPipe (arXiv 1811.06965), 1F1B and interleaving (arXiv 2104.04473, section
2.2), zero bubble (arXiv 2401.10241, section 2 and table 1), ZB-V (arXiv 2405.15362, section 3), DualPipeV
(deepseek-ai/DualPipe README, bubble comparison). They assume equal stages; the slowest stage stands for all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simulator.model import Model
from simulator.pipeline import peak_activations
from simulator.plan import Plan
from simulator.plan_table import Floats, PlanTable
from simulator.runtime_library import PipelineSpec
from simulator.schedule_tables import build_schedule
from topology.errors import BadPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """Layers held by each pipeline rank, shape (plans, ranks); ranks a plan does not have hold -1.

    `by_mode[mode]` counts the (dense, MoE) layers that run under each recompute mode, zero where there are none.
    """

    dense: NDArray[np.int64]
    moe: NDArray[np.int64]
    by_mode: dict[str, tuple[Floats, Floats]] = field(default_factory=dict)

    @property
    def exists(self) -> NDArray[np.bool_]:
        return self.dense >= 0


def stage_layers(model_layers: int, plan: Plan, spec: PipelineSpec) -> tuple[int, ...]:
    """Return the layers of each of the pp * virtual_stages stages, first stage first.

    The embedding and the head count as `embedding_weight` and `head_weight` layers; what does not divide goes to the
    first stages, as torchtitan's splitter does.
    """
    if plan.layers_per_stage:
        return plan.layers_per_stage
    stages = plan.pp * plan.virtual_stages
    if stages == 1:
        return (model_layers,)
    weights = [0.0] * stages
    weights[0] += spec.embedding_weight
    weights[-1] += spec.head_weight
    total = model_layers + int(sum(weights))
    counts = [total // stages + (1 if i < total % stages else 0) for i in range(stages)]
    return tuple(max(0, count - int(weight)) for count, weight in zip(counts, weights, strict=True))


def rank_of_stage(stage: int, pp: int, schedule: str) -> int:
    """Return the pipeline rank that holds a stage: round robin, or a V for the schedules that fold back."""
    if schedule in {"ZBVZeroBubble", "DualPipeV"}:
        return stage if stage < pp else 2 * pp - 1 - stage
    return stage % pp


def stage_layout(model: Model, table: PlanTable, spec: PipelineSpec) -> StageLayout:
    """Return how many dense and MoE layers every pipeline rank holds under every plan."""
    ranks = int(table["pp"].max())
    dense = np.full((len(table), ranks), -1, dtype=np.int64)
    moe = np.full((len(table), ranks), -1, dtype=np.int64)
    leading = model.moe.dense_layers if model.moe else model.layers
    known: dict[tuple[object, ...], tuple[list[int], list[int]]] = {}
    modes = {mode: (np.zeros(dense.shape), np.zeros(dense.shape)) for mode in table.recompute_modes}
    for row, plan in enumerate(table.plans):
        schedule = str(table.schedule[row])
        key = (plan.pp, plan.virtual_stages, plan.layers_per_stage, schedule in {"ZBVZeroBubble", "DualPipeV"})
        if key not in known:
            held_dense, held_moe, start = [0] * plan.pp, [0] * plan.pp, 0
            for stage, count in enumerate(stage_layers(model.layers, plan, spec)):
                rank = rank_of_stage(stage, plan.pp, schedule)
                first = max(0, min(leading, start + count) - start)
                held_dense[rank] += first
                held_moe[rank] += count - first
                start += count
            known[key] = (held_dense, held_moe)
        dense[row, : plan.pp], moe[row, : plan.pp] = known[key]
        if plan.recompute_per_stage:
            _count_modes(model, plan, spec, schedule, leading, {k: (v[0][row], v[1][row]) for k, v in modes.items()})
        else:
            mine = modes[str(table.recompute[row])]
            mine[0][row, : plan.pp], mine[1][row, : plan.pp] = known[key]
    return StageLayout(dense=dense, moe=moe, by_mode=modes)


def _count_modes(
    model: Model,
    plan: Plan,
    spec: PipelineSpec,
    schedule: str,
    leading: int,
    counts: dict[str, tuple[Floats, Floats]],
) -> None:
    """Add the layers of one plan to the counts of the mode that each of its stages runs under."""
    start = 0
    for stage, count in enumerate(stage_layers(model.layers, plan, spec)):
        rank = rank_of_stage(stage, plan.pp, schedule)
        first = max(0, min(leading, start + count) - start)
        dense, moe = counts[plan.recompute_per_stage[stage]]
        dense[rank] += first
        moe[rank] += count - first
        start += count


def last_rank(table: PlanTable) -> NDArray[np.int64]:
    """Return the pipeline rank that holds the head: the first one where the schedule folds back."""
    folded = np.isin(table.schedule, ["ZBVZeroBubble", "DualPipeV"])
    return np.where(folded, 0, table["pp"] - 1).astype(np.int64)


def bubble_s(table: PlanTable, forward: Floats, input_gradient: Floats, weight_gradient: Floats) -> Floats:
    """Return idle seconds of a rank over a step, given one micro batch's seconds on the slowest rank."""
    p, v = table["pp"], np.maximum(table["virtual_stages"], 1.0)
    backward = input_gradient + weight_gradient
    whole = (p - 1) * (forward + backward)
    result = whole.copy()
    for name in np.unique(table.schedule):
        mask = table.schedule == name
        match str(name):
            case "Interleaved1F1B" | "LoopedBFS":
                value = whole / v
            case "ZBH1":
                value = (p - 1) * np.maximum(forward + input_gradient - weight_gradient, 0.0)
            case "InterleavedZeroBubble":
                value = (p - 1) * np.maximum(forward + input_gradient - weight_gradient, 0.0) / v
            case "ZBVZeroBubble":
                # Bubble-free when the three passes take equally long; what differs between them remains.
                longest = np.maximum(np.maximum(forward, input_gradient), weight_gradient)
                value = (p - 1) * (3 * longest - forward - backward) / v
            case "DualPipeV":
                # Where a pair takes as long as its two parts; what overlaps inside a pair comes off elsewhere.
                value = (p - 1) * np.maximum(forward + 2 * input_gradient - weight_gradient, 0.0) / v
            case _:
                value = whole
        result = np.where(mask, value, result)
    return np.where(p > 1, result, 0.0)


def in_flight(table: PlanTable) -> Floats:
    """Return micro batches whose activations a pipeline rank holds at once, shape (plans, ranks).

    In units of one micro batch through all of the rank's layers. 1F1B: p - i on rank i; GPipe: all; interleaved:
    (p v + p - 2 i - 1) / v model chunks (arXiv 2104.04473, section 2.2; 2205.05198, section 4.2.3: 1 + (p-1)/(p v)
    of the model on the first rank).
    """
    ranks = np.arange(int(table["pp"].max()), dtype=np.float64)[None, :]
    p, m, v = table["pp"][:, None], table.micro_batches[:, None], np.maximum(table["virtual_stages"], 1.0)[:, None]
    held = np.minimum(p - ranks, m)
    for name in np.unique(table.schedule):
        mask = (table.schedule == name)[:, None]
        match str(name):
            case "GPipe" | "LoopedBFS":
                value = m + 0 * ranks
            case "Interleaved1F1B" | "InterleavedZeroBubble":
                value = np.minimum(p + (p - 2 * ranks - 1) / v, m)
            case _:
                value = held
        held = np.where(mask, value, held)
    return _replayed(table, np.maximum(held, 1.0), of_last_stage=False)


def head_in_flight(table: PlanTable) -> Floats:
    """Return micro batches whose saved logits the rank with the head holds at once, per plan: one, unless weight
    gradients are put off, or all forwards go first.
    """
    one = np.ones((len(table), 1))
    first = np.isin(table.schedule, ["GPipe", "LoopedBFS"])[:, None]
    return _replayed(table, np.where(first, table.micro_batches[:, None], one), of_last_stage=True)[:, 0]


def _replayed(table: PlanTable, otherwise: Floats, *, of_last_stage: bool) -> Floats:
    """Return `otherwise`, except for schedules that put weight gradients off or turn back: those are counted out."""
    result = otherwise.copy()
    for row in np.nonzero(np.isin(table.schedule, COUNTED_OUT))[0]:
        p, m, v = int(table["pp"][row]), int(table.micro_batches[row]), int(table["virtual_stages"][row])
        if p > 1 and m >= 1:
            held, last = _held(str(table.schedule[row]), p, m, v)
            if of_last_stage:
                result[row] = last
            else:
                result[row, :p] = held
    return result


COUNTED_OUT = ("ZBH1", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@lru_cache(maxsize=1024)
def _held(name: str, p: int, m: int, v: int) -> tuple[tuple[float, ...], float]:
    """Return (micro batches in flight on each rank, on the last stage) of a schedule, in whole passes of a rank.

    Beyond a few rounds of the pipeline the steady state repeats, so that a long step is counted on a shorter one.
    """
    rounds = 2 * p * max(v, 2)
    if m > 2 * rounds:
        m = rounds + m % rounds if name in {"ZBH1", "ZBVZeroBubble", "DualPipeV"} else rounds
    try:
        schedule = build_schedule(name, ranks=p, micro_batches=m, stages_per_rank=v)
    except BadPlan:
        return (float(min(p, m)),) * p, 1.0
    stages = p * v
    held = tuple(peak / v for peak in peak_activations(schedule, [1.0] * stages))
    last = max(peak_activations(schedule, [0.0] * (stages - 1) + [1.0]))
    return held, last
