"""All schedules by name, and their tables.

The order of actions equals that of torch.distributed.pipelining, except that torch's printed 1F1B table has a fault in
its last rank; there it equals what torch's 1F1B runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simulator.config.plan import Plan, default_schedule
from simulator.pipeline.schedules.dual_pipe_v import DUAL_PIPE_V
from simulator.pipeline.schedules.gpipe import GPIPE
from simulator.pipeline.schedules.interleaved import INTERLEAVED
from simulator.pipeline.schedules.interleaved_zero_bubble import INTERLEAVED_ZERO_BUBBLE
from simulator.pipeline.schedules.kind import Place, Row, ScheduleKind, per_round
from simulator.pipeline.schedules.looped_bfs import LOOPED_BFS
from simulator.pipeline.schedules.one_f_one_b import ONE_F_ONE_B
from simulator.pipeline.schedules.table import Schedule, stages_on
from simulator.pipeline.schedules.zero_bubble_h1 import ZERO_BUBBLE_H1
from simulator.pipeline.schedules.zero_bubble_v import ZERO_BUBBLE_V
from topology.errors import BadPlan

SCHEDULES: dict[str, ScheduleKind] = {
    kind.name: kind
    for kind in (
        ONE_F_ONE_B,
        GPIPE,
        INTERLEAVED,
        LOOPED_BFS,
        INTERLEAVED_ZERO_BUBBLE,
        ZERO_BUBBLE_V,
        DUAL_PIPE_V,
        ZERO_BUBBLE_H1,
    )
}


def schedule_kind(name: str) -> ScheduleKind:
    """Return a schedule by its name. Raises BadPlan."""
    if name not in SCHEDULES:
        raise BadPlan(f"unknown pipeline schedule {name[:60]!r}", remedy=f"one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def schedules_that(fact: Callable[[ScheduleKind], bool]) -> tuple[str, ...]:
    """Return the names of the schedules for which `fact` is true."""
    return tuple(kind.name for kind in SCHEDULES.values() if fact(kind))


def where(names: NDArray[np.str_], fact: Callable[[ScheduleKind], bool]) -> NDArray[np.bool_]:
    """Return for each plan, by its schedule's name, whether `fact` is true; false without a pipeline."""
    return np.isin(names, schedules_that(fact))


@lru_cache(maxsize=256)
def build_schedule(
    name: str, *, ranks: int, micro_batches: int, stages_per_rank: int = 1, paired: bool = False
) -> Schedule:
    """Return the table of schedule `name`. Raises BadPlan for a combination that the schedule does not have.

    `paired`: a forward pass and the backward pass after it run together, with one more forward pass ahead, so that they
    belong to two micro batches (1F1B and its interleaved form: Megatron-LM, core/pipeline_parallel/combined_1f1b.py and
    schedules.py). The backward pass of such a pair is named first, since layer by layer it frees memory for the forward
    pass.
    """
    kind = schedule_kind(name)
    _refuse_impossible(kind, ranks, micro_batches, stages_per_rank)
    rows = []
    for rank in range(ranks):
        stages = [*stages_on(rank, ranks, stages_per_rank, v_shaped=kind.v_shaped)]
        row = Row(backward_first=paired)
        kind.lay_out(row, Place(rank=rank, ranks=ranks, stages=stages, micro_batches=micro_batches, paired=paired))
        rows.append(tuple(row.actions))
    return Schedule(
        name=name,
        ranks=ranks,
        stages_per_rank=stages_per_rank,
        micro_batches=micro_batches,
        table=tuple(rows),
        v_shaped=kind.v_shaped,
    )


def schedule_of_plan(plan: Plan, micro_batches: int) -> Schedule:
    """Return the table of a plan's schedule for `micro_batches`; a plan without a pipeline has one stage.

    Raises BadPlan as `build_schedule` does.
    """
    return build_schedule(
        plan.schedule_name if plan.pp > 1 else default_schedule(plan.virtual_stages),
        ranks=plan.pp,
        micro_batches=micro_batches,
        stages_per_rank=plan.virtual_stages,
        paired=plan.ep_overlap != "none",
    )


def _refuse_impossible(kind: ScheduleKind, ranks: int, micro_batches: int, stages_per_rank: int) -> None:
    if ranks < 1 or micro_batches < 1 or stages_per_rank < 1:
        raise BadPlan("a pipeline needs at least one rank, one micro batch and one stage per rank")
    if kind.most_stages == 1 and stages_per_rank != 1:
        raise BadPlan(
            f"{kind.name} has one stage per rank, not {stages_per_rank}", remedy="an interleaved schedule has more"
        )
    if kind.v_shaped and stages_per_rank != 2:
        raise BadPlan(f"{kind.name} has two stages per rank, not {stages_per_rank}")
    if kind.rounds:
        per_round(ranks, micro_batches)
    if kind.every_stage and micro_batches < (stages := stages_per_rank * ranks):
        raise BadPlan(f"{kind.name} needs at least as many micro batches as stages: {micro_batches} < {stages}")
