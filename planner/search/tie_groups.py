"""Rows of a table, and plans, that represent the others of their grid or of their tie group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.search.finalists import TIE, mechanisms
from simulator.columns.plan_columns import PlanColumns
from simulator.config.plan import MESH_AXES, Plan

# Splits of data parallelism into replicas and shards that are costed for each listed plan, and how much slower,
# relatively, the simplest of them may be to represent all.
PER_TIE_GROUP, TIE_GROUP_MARGIN = 3, 0.02


def one_of_tie_group(found: Sequence[tuple[float, Plan]]) -> list[Plan]:
    """Return the plans of (step, plan), fastest first, without those that tie with another plan of their tie group.

    Plans of a tie group differ only in how data parallelism is split into replicas and shards, and in settings. Of such
    a tie the simplest is kept, at the position of the fastest.
    """
    kept: list[tuple[float, Plan]] = []
    for step, plan in found:
        place = next(
            (
                i
                for i, (best, one) in enumerate(kept)
                if _tie_group(one) == _tie_group(plan) and step <= best * (1 + TIE)
            ),
            None,
        )
        if place is None:
            kept.append((step, plan))
        elif len(mechanisms(plan)) < len(mechanisms(kept[place][1])) and step <= kept[place][0] * (
            1 + TIE_GROUP_MARGIN
        ):
            kept[place] = (kept[place][0], plan)
    return [plan for _, plan in kept]


def _tie_group(plan: Plan) -> tuple[int, ...]:
    return (plan.data_parallel, plan.cp, plan.tp, plan.pp, plan.ep)


def rank_rows(table: PlanColumns, values: NDArray[np.float64], *, top: int, all_variants: bool) -> list[int]:
    """Return up to `top` rows, best value first; one per grid unless `all_variants`.

    Equal values go to the plan with fewer pipeline stages, then context, tensor and expert ranks, then shards, then
    smaller micro batches: the simpler plan. Remaining ties are in enumeration order.
    """
    keys = (
        table.reshard_after_forward,
        table.sequence_parallel,
        table.zero_stage,
        table.virtual_stages,
        table.micro_batch_size,
        table.dp_shard,
        table.ep,
        table.tp,
        table.cp,
        table.pp,
        values,
    )
    rows: list[int] = []
    seen: set[tuple[int, ...]] = set()
    for candidate in np.lexsort(keys):
        row = int(candidate)
        if len(rows) >= top:
            break
        grid = tuple(int(getattr(table, axis)[row]) for axis in (*MESH_AXES, "ep", "etp"))
        if all_variants or grid not in seen:
            rows.append(row)
            seen.add(grid)
    return rows
