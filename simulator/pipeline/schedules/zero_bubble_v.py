"""Zero bubble V: two stages a rank, down the ranks and back up (arXiv 2401.10241 section 6)."""

from __future__ import annotations

import numpy as np

from simulator.pipeline.schedules.kind import Floats, PipelineRanks, Place, Row, ScheduleKind


def lay_out(row: Row, place: Place) -> None:
    """Write a row for at least 2p-1 micro batches; for fewer, the surplus is left out."""
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


def _in_flight(of: PipelineRanks, micro_batches: Floats) -> Floats:
    """Return the micro batches in flight, over both stages, when the first backward pass begins."""
    return np.minimum(2 * of.pp - 1 - of.rank, micro_batches) + np.minimum(of.rank + 1, micro_batches)


def _beside_gradients(of: PipelineRanks) -> Floats:
    """Return the micro batches in flight, over both stages, when the stage further from the loss has its first
    gradients.
    """
    m, before = of.micro_batches, of.pp - of.rank  # backward passes of the nearer stage before that
    few = np.minimum(2 * of.pp - 1 - of.rank, m) - 1 + np.minimum(m, of.pp) - np.minimum(m, before)
    return np.where(m > of.pp, _in_flight(of, m - 1), np.where(m > before, few, 0.0))


ZERO_BUBBLE_V = ScheduleKind(
    name="ZBVZeroBubble",
    lay_out=lay_out,
    in_flight=lambda of: _in_flight(of, of.micro_batches) / 2,
    beside_gradients=lambda of: _beside_gradients(of) / 2,
    least_stages=2,
    most_stages=2,
    v_shaped=True,
    splits_backward=True,
    also_called=("zbv",),
)
