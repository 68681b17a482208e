"""DualPipe (DeepSeek-V3, arXiv 2412.19437 section 3.2.1) with its two directions folded to a V
(github.com/deepseek-ai/DualPipe).
"""

from __future__ import annotations

import numpy as np

from simulator.pipeline.schedules.kind import Place, Row, ScheduleKind


def lay_out(row: Row, place: Place) -> None:
    """Write a row; in its steady state every forward pass runs together with a backward pass."""
    (down, up), rank, ranks, micro_batches = place.stages, place.rank, place.ranks, place.micro_batches
    above = ranks - 1 - rank
    for _ in range(2 * above):
        row.forward(down)
    for _ in range(rank + 1):
        row.forward(down)
        row.forward(up)
    for _ in range(above):
        row.input_grad(up)
        row.weight_grad()
        row.forward(up)
    for turn in range(micro_batches - 2 * ranks + rank + 1):
        if turn == 0 and above == 0:
            # On the last rank both are of the same micro batch, so they cannot overlap yet.
            row.forward(down)
            row.backward(up)
        else:
            row.pair(down, up)
        row.pair(up, down)
    for _ in range(above):
        row.backward(up)
        row.pair(up, down)
    # The end of the step: from its middle on, weight gradients are delayed to fill waits.
    half = rank + 1
    for turn in range(2 * (rank + 1)):
        stage = down if turn % 2 else up
        (row.input_grad if turn >= half else row.backward)(stage)
    for _ in range(above):
        row.weight_grad()
        row.input_grad(down)
    while row.delayed_weights:
        row.weight_grad()


DUAL_PIPE_V = ScheduleKind(
    name="DualPipeV",
    lay_out=lay_out,
    in_flight=lambda of: of.pp + 0.5 + 0 * of.rank,
    beside_gradients=lambda of: np.where(of.rank > 0, of.pp + 0.5, np.minimum(of.pp + 0.5, of.micro_batches / 2)),
    least_stages=2,
    most_stages=2,
    v_shaped=True,
    splits_backward=True,
    pairs=True,
    every_stage=True,
)
