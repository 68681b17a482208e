"""Zero bubble H1: 1F1B whose weight gradients fill the bubble (arXiv 2401.10241 section 3.1)."""

from __future__ import annotations

import numpy as np

from simulator.pipeline.schedules.kind import Place, Row, ScheduleKind, interleave


def lay_out(row: Row, place: Place) -> None:
    interleave(row, place, place.micro_batches, warm_up=place.after, weights_lag=place.rank)


ZERO_BUBBLE_H1 = ScheduleKind(
    name="ZBH1",
    lay_out=lay_out,
    in_flight=lambda of: np.minimum(of.pp - of.rank, of.micro_batches),
    splits_backward=True,
    lags=True,
    in_torch=False,
)
