"""Which operators of a wrapped block run again in the backward pass.

Those that the mode names. But torch's checkpoint without re-entrance may stop as soon as the last tensor that backward
needs is there again (torch.utils.checkpoint, `early_stop`, the default since torch 2.1), and a compiler drops what nobody reads:
the last product of the feed-forward, whose input is saved and whose result nobody needs, and what follows it do not run
again. That is a third of a plain feed-forward's products. Re-entrant checkpoints, Megatron-LM's among them, run everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.operators import OperatorSpec, active_rows
from simulator.plan_table import Floats, PlanTable
from simulator.runtime import Runtime
from simulator.runtime_library import RecomputeSpec, stops_early


def run_again(
    operators: Sequence[OperatorSpec], mode: RecomputeSpec, runtime: Runtime, table: PlanTable
) -> list[Floats]:
    """Return for every operator of a layer, and every plan, 1 where it runs again in `mode` and 0 where not."""
    named = [active_rows(operator, table) * mode.runs_again(operator.name) for operator in operators]
    if not stops_early(runtime):
        return named
    needed = np.zeros(len(table))  # 1 where a later operator saves something
    again: list[Floats] = []
    for operator, rows in zip(reversed(operators), reversed(named), strict=True):
        saves = active_rows(operator, table) * bool(operator.saves)
        # A product saves what it reads, before it runs; others may save what they give.
        again.append(rows * (needed if operator.matmul else np.maximum(needed, saves)))
        needed = np.maximum(needed, saves)
    return again[::-1]
