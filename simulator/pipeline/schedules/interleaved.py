"""Interleaved 1F1B: several stages a rank, passed in rounds (arXiv 2104.04473 section 2.2)."""

from __future__ import annotations

from simulator.config.plan import INTERLEAVED_SCHEDULE
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
    warm_up = (len(place.stages) - 1) * in_round + 2 * place.after + place.paired
    interleave(row, place, in_round, warm_up=warm_up)


def _warm_up(of: PipelineRanks) -> Floats:
    return interleaved_warm_up(of, 2 * (of.pp - 1 - of.rank))


# (p v + p - 2 i - 1) / v chunks of the model on rank i: arXiv 2104.04473 section 2.2; arXiv 2205.05198 section 4.2.3
# has 1 + (p - 1) / (p v) of the model on the first.
INTERLEAVED = ScheduleKind(
    name=INTERLEAVED_SCHEDULE,
    lay_out=lay_out,
    in_flight=lambda of: interleaved_in_flight(of, _warm_up(of)),
    beside_gradients=lambda of: interleaved_beside(of, _warm_up(of)),
    least_stages=2,
    most_stages=0,
    rounds=True,
    also_called=("interleaved",),
)
