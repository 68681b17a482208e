"""Interleaved 1F1B: several stages a rank, passed in rounds (arXiv 2104.04473 section 2.2)."""

from __future__ import annotations

import numpy as np

from simulator.config.plan import INTERLEAVED_SCHEDULE
from simulator.pipeline.schedules.kind import Place, Row, ScheduleKind, interleave, per_round


def lay_out(row: Row, place: Place) -> None:
    in_round = per_round(place.ranks, place.micro_batches)
    warm_up = (len(place.stages) - 1) * in_round + 2 * place.after + place.paired
    interleave(row, place, in_round, warm_up=warm_up)


# (p v + p - 2 i - 1) / v chunks of the model on rank i: arXiv 2104.04473 section 2.2; arXiv 2205.05198 section 4.2.3
# has 1 + (p - 1) / (p v) of the model on the first.
INTERLEAVED = ScheduleKind(
    name=INTERLEAVED_SCHEDULE,
    lay_out=lay_out,
    in_flight=lambda of: np.minimum(of.pp + (of.pp - 2 * of.rank - 1) / of.virtual_stages, of.micro_batches),
    least_stages=2,
    most_stages=0,
    rounds=True,
    also_called=("interleaved",),
)
