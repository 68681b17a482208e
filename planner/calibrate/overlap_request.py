"""Which tensor-parallel matrix products to measure in every overlap mode: those of given plans.

The forward sites of a dense layer are an all-gather before the QKV projection, one before the feed-forward, and a
reduce-scatter after each block. Backward times are modelled from forward ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.calibrate.planned_step import PlannedStep
from simulator.calibration.items import OverlapItem

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"


def plan_sites(questions: Sequence[PlannedStep], gpus: int) -> tuple[OverlapItem, ...]:
    """Return the distinct sites of the plans of `questions` whose tensor parallelism fits on `gpus`."""
    return tuple(dict.fromkeys(one for question in questions for one in _plan_sites(question, gpus)))


def _plan_sites(question: PlannedStep, gpus: int) -> Iterator[OverlapItem]:
    plan, model = question.plan, question.model
    rows = plan.micro_batch_size * question.workload.seq_len // plan.cp
    divided = not (model.heads % plan.tp or model.kv_heads % plan.tp or model.ffn % plan.tp or rows % plan.tp)
    if not 1 < plan.tp <= gpus or not plan.sequence_parallel or model.latent is not None or not divided:
        return
    widths = (model.heads * model.head_dim, model.kv_heads * model.head_dim, model.kv_heads * model.head_dim)
    dtype, dense = question.runtime.compute_dtype, model.dense_layers > 0
    for one in _sites(rows, model.hidden, widths, model.ffn, gated=model.gated_mlp, ranks=plan.tp, dtype=dtype):
        if dense or model.ffn // plan.tp not in (*one.columns, one.depth):
            yield one


def _sites(
    rows: int, hidden: int, widths: Sequence[int], ffn: int, *, gated: bool, ranks: int, dtype: str = "bfloat16"
) -> Iterator[OverlapItem]:
    projected = [width // ranks for width in widths]
    inner = [ffn // ranks] * (2 if gated else 1)
    for operation, columns, depth in (
        (GATHER, inner, hidden),
        (SCATTER, [hidden], inner[0]),
        (GATHER, projected, hidden),
        (SCATTER, [hidden], projected[0]),
    ):
        yield OverlapItem(operation=operation, ranks=ranks, rows=rows, columns=tuple(columns), depth=depth, dtype=dtype)
