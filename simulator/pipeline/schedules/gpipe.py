"""GPipe: the forward passes of all micro batches, then all backward passes (arXiv 1811.06965)."""

from __future__ import annotations

from simulator.pipeline.schedules.kind import Place, Row, ScheduleKind


def lay_out(row: Row, place: Place) -> None:
    for _ in range(place.micro_batches):
        row.forward(place.stages[0])
    for _ in range(place.micro_batches):
        row.backward(place.stages[0])


GPIPE = ScheduleKind(
    name="GPipe",
    lay_out=lay_out,
    in_flight=lambda of: of.micro_batches,
    beside_gradients=lambda of: of.micro_batches - 1,
    forwards_first=True,
)
