"""Looped breadth-first: all micro batches through one stage, then the next (arXiv 2211.05953)."""

from __future__ import annotations

from simulator.pipeline.schedules.kind import Place, Row, ScheduleKind
from simulator.pipeline.schedules.table import Action, Kind


def lay_out(row: Row, place: Place) -> None:
    """Write the forward passes stage by stage, and the backward passes in exactly the opposite order."""
    for stage in place.stages:
        for _ in range(place.micro_batches):
            row.forward(stage)
    for stage in reversed(place.stages):
        row.actions += [Action(stage, Kind.BACKWARD, m) for m in reversed(range(place.micro_batches))]


LOOPED_BFS = ScheduleKind(
    name="LoopedBFS",
    lay_out=lay_out,
    in_flight=lambda of: of.micro_batches,
    beside_gradients=lambda of: 0 * of.micro_batches,  # each stage in turn runs its last backward pass
    least_stages=2,
    most_stages=0,
    forwards_first=True,
)
