"""Zero bubble H1: 1F1B whose weight gradients fill the bubble (arXiv 2401.10241 section 3.1)."""

from __future__ import annotations

from simulator.pipeline.schedules.kind import (
    Place,
    Row,
    ScheduleKind,
    interleave,
    interleaved_beside,
    interleaved_in_flight,
)


def lay_out(row: Row, place: Place) -> None:
    interleave(row, place, place.micro_batches, warm_up=place.after, weights_lag=place.rank)


ZERO_BUBBLE_H1 = ScheduleKind(
    name="ZBH1",
    lay_out=lay_out,
    in_flight=lambda of: interleaved_in_flight(of, of.pp - 1 - of.rank, of.rank),
    beside_gradients=lambda of: interleaved_beside(of, of.pp - 1 - of.rank, of.rank),
    splits_backward=True,
    lags=True,
    in_torch=False,
)
