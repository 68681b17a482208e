"""Interleaved 1F1B whose weight gradients fill the bubble (arXiv 2401.10241), as torch.distributed.pipelining has
it.
"""

from __future__ import annotations

from simulator.pipeline.schedules.kind import (
    Floats,
    PipelineRanks,
    Place,
    Row,
    ScheduleKind,
    interleave,
    interleaved_beside,
    interleaved_in_flight,
    interleaved_warm_up,
    per_round,
)


def lay_out(row: Row, place: Place) -> None:
    in_round = per_round(place.ranks, place.micro_batches)
    warm_up = (len(place.stages) - 1) * in_round + place.after
    interleave(row, place, in_round, warm_up=warm_up, weights_lag=place.rank)


def _warm_up(of: PipelineRanks) -> Floats:
    return interleaved_warm_up(of, of.pp - 1 - of.rank)


INTERLEAVED_ZERO_BUBBLE = ScheduleKind(
    name="InterleavedZeroBubble",
    lay_out=lay_out,
    in_flight=lambda of: interleaved_in_flight(of, _warm_up(of), of.rank),
    beside_gradients=lambda of: interleaved_beside(of, _warm_up(of), of.rank),
    least_stages=2,
    most_stages=0,
    splits_backward=True,
    lags=True,
    rounds=True,
)
