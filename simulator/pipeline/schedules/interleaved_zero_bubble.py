"""Interleaved 1F1B whose weight gradients fill the bubble (arXiv 2401.10241), as torch.distributed.pipelining has
it.
"""

from __future__ import annotations

import numpy as np

from simulator.pipeline.schedules.kind import Place, Row, ScheduleKind, interleave, per_round


def lay_out(row: Row, place: Place) -> None:
    in_round = per_round(place.ranks, place.micro_batches)
    warm_up = (len(place.stages) - 1) * in_round + place.after
    interleave(row, place, in_round, warm_up=warm_up, weights_lag=place.rank)


INTERLEAVED_ZERO_BUBBLE = ScheduleKind(
    name="InterleavedZeroBubble",
    lay_out=lay_out,
    in_flight=lambda of: np.minimum(of.pp, of.micro_batches),
    most_in_flight=lambda pp: 2 * pp - 1,
    least_stages=2,
    most_stages=0,
    splits_backward=True,
    lags=True,
    rounds=True,
)
