"""1F1B: as many forwards ahead as ranks follow, then a backward after every forward (arXiv 2104.04473 section 2.2)."""

from __future__ import annotations

import numpy as np

from simulator.config.plan import PLAIN_SCHEDULE
from simulator.pipeline.schedules.kind import Place, Row, ScheduleKind, interleave


def lay_out(row: Row, place: Place) -> None:
    warm_up = place.after + place.paired
    interleave(row, place, place.micro_batches, warm_up=warm_up)


ONE_F_ONE_B = ScheduleKind(
    name=PLAIN_SCHEDULE,
    lay_out=lay_out,
    in_flight=lambda of: np.minimum(of.pp - of.rank, of.micro_batches),
    beside_gradients=lambda of: np.minimum(of.pp - of.rank, of.micro_batches - 1),
    every_stage_in_torch=True,
)
