"""Which operators of a wrapped block run again in the backward pass.

These are the operators that the mode names, with one exception. torch's non-reentrant checkpoint may stop as soon as it
has recomputed the last tensor that the backward pass needs (torch.utils.checkpoint, `early_stop`, the default since
torch 2.1), and a compiler drops unused results. Then the last product of the feed-forward, whose result is not needed,
and what follows it do not run again; that is a third of a plain feed-forward's products. Reentrant checkpoints, such as
those of transformers before 5.0 and of Megatron-LM, run everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.columns.plan_table import Floats, PlanTable
from simulator.config.adapter import LORA
from simulator.config.runtime import Runtime
from simulator.kernels.operators import OperatorSpec, active_rows
from simulator.runtimes.library import recompute_stops_early
from simulator.runtimes.parts import RecomputeSpec


def wraps(index: int, mode: RecomputeSpec) -> bool:
    """Return whether a mode for a share of the layers wraps layer `index`: the last of each run of 1 / share, as in
    torchtitan, which counts from one and wraps the multiples (`_apply_ac_to_transformer_block`).
    """
    every = round(1 / mode.layers)
    return bool(mode.recomputes) and index % every == every - 1


def run_again(
    operators: Sequence[OperatorSpec], mode: RecomputeSpec, runtime: Runtime, table: PlanTable
) -> list[Floats]:
    """Return for every operator of a layer, and every plan, 1 where it runs again in `mode` and 0 where not."""
    named = [active_rows(operator, table) * mode.runs_again(operator.name) for operator in operators]
    if not recompute_stops_early(runtime):
        return named
    needed = np.zeros(len(table))  # 1 where a later operator saves a tensor
    without = needed  # the same, without the adapters of the product at hand
    adapter = runtime.adapter
    compiled_lora = runtime.compile and adapter is not None and adapter.kind == LORA
    again: list[Floats] = []
    for operator, rows in zip(reversed(operators), reversed(named), strict=True):
        saves = active_rows(operator, table) * bool(operator.saves)
        # A product saves its inputs, before it runs; others may save their results. What LoRA saves next to a product
        # depends on the product's input alone: a compiler sees that, early stopping goes by the order of operators.
        later = without if compiled_lora and not operator.adapter else needed
        again.append(rows * (later if operator.matmul else np.maximum(needed, saves)))
        needed = np.maximum(needed, saves)
        without = without if operator.adapter else needed
    return again[::-1]
