"""Zero bubble V: two stages a rank, down the ranks and back up (arXiv 2401.10241 section 6)."""

from __future__ import annotations

import numpy as np

from simulator.pipeline.schedules.kind import Place, Row, ScheduleKind


def lay_out(row: Row, place: Place) -> None:
    """Lay out for at least 2p-1 micro batches; with fewer, the surplus is left out."""
    (down, up), rank, ranks = place.stages, place.rank, place.ranks

    def both_grads(stage: int) -> None:
        row.input_grad(stage)
        row.weight_grad(stage)

    micro_batches = max(2 * ranks - 1, place.micro_batches)
    for _ in range(2 * (ranks - rank) - 1):
        row.forward(down)
    for _ in range(rank):
        row.forward(up)
        row.forward(down)
    for _ in range(ranks - rank):
        row.forward(up)
        both_grads(up)
    done_down, done_up = 2 * ranks - 1 - rank, ranks  # forwards so far
    while done_up < micro_batches:
        if done_down < micro_batches:
            row.forward(down)
            done_down += 1
        both_grads(down)
        row.forward(up)
        done_up += 1
        both_grads(up)
    for _ in range(rank):
        row.input_grad(down)
        row.input_grad(up)
    for _ in range(ranks - rank):
        row.input_grad(down)
        row.weight_grad(down)
    for stage in (up, down):
        while any(delayed == stage for delayed, _ in row.delayed_weights):
            row.weight_grad(stage)
    row.actions = [action for action in row.actions if action.micro_batch < place.micro_batches]


ZERO_BUBBLE_V = ScheduleKind(
    name="ZBVZeroBubble",
    lay_out=lay_out,
    in_flight=lambda of: (np.minimum(of.pp, of.micro_batches) + 1) / 2,
    least_stages=2,
    most_stages=2,
    v_shaped=True,
    splits_backward=True,
    also_called=("zbv",),
)
