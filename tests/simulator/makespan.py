"""The exact makespan of a schedule without a simulation: what the simulated machine is checked against.

It keeps the rules that `simulator.pipeline.schedule_program` lowers by, so the two agree to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from simulator.pipeline.schedule_program import Result, makes, needs, sent_to
from simulator.pipeline.schedules.table import Action, Kind, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTiming:
    """Times of one step by pipeline rank, in seconds.

    `bubble_s` is the idle time from the step's begin to its end. The zero-bubble papers count from a rank's own first
    action to its own last, as the optimizer need not wait for others: that is `end_s - start_s - busy_s`.
    """

    step_s: float
    busy_s: tuple[float, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    in_flight: tuple[int, ...]  # most micro batches, over local stages, whose activations a rank keeps at once

    @property
    def bubble_s(self) -> tuple[float, ...]:
        return tuple(self.step_s - busy for busy in self.busy_s)


@dataclass(frozen=True, slots=True)
class _Step:
    """A node of the graph. Messages are numbered; `sends` are (message, channel, boundary)."""

    rank: int
    action: Action
    receives: tuple[int, ...]
    sends: tuple[tuple[int, int, int], ...]


@lru_cache(maxsize=256)
def _steps(schedule: Schedule) -> tuple[_Step, ...]:
    """Return the schedule's actions in an order in which each comes after all it needs. O(actions)."""
    made: set[Result] = set()
    message: dict[Result, int] = {}
    channels: dict[tuple[int, Kind], int] = {}
    waiting: dict[Result, int] = {}  # result -> the rank that is stuck for lack of it
    steps: list[_Step] = []
    at = [0] * schedule.ranks
    ready = list(reversed(range(schedule.ranks)))
    while ready:
        rank = ready.pop()
        row = schedule.table[rank]
        while at[rank] < len(row):
            action = row[at[rank]]
            wanted = [result for leaf in action.leaves for result in needs(leaf, schedule.stages)]
            lacking = next((result for result in wanted if result not in made), None)
            if lacking is not None:
                waiting[lacking] = rank
                break
            sends = []
            for leaf in action.leaves:
                result = makes(leaf)
                made.add(result)
                if sent_to(leaf, schedule) is not None:
                    message[result] = len(message)
                    channel = channels.setdefault(result[:2], len(channels))
                    sends.append((message[result], channel, leaf.stage - (result[1] is not Kind.FORWARD)))
                if result in waiting:
                    ready.append(waiting.pop(result))
            receives = tuple(message[result] for result in wanted if result in message)
            steps.append(_Step(rank, action, receives, tuple(sends)))
            at[rank] += 1
    if len(steps) < sum(map(len, schedule.table)):
        raise ValueError(f"schedule {schedule.name} can never finish; check_schedule says why")
    return tuple(steps)


def pipeline_makespan(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float] | None = None,
    *,
    input_grad_s: Sequence[float] | None = None,
    weight_grad_s: Sequence[float] | None = None,
    transfer_s: float | Sequence[float] = 0.0,
    pair_s: Callable[[int, int], float] | None = None,
) -> PipelineTiming:
    """Return the exact timing of `schedule`, by the longest path through its graph in O(actions).

    Times are per stage. `backward_s` defaults to input plus weight gradient, which schedules that split the backward
    need. `transfer_s` is the time of one message, or one number per boundary (entry s: between stages s and s+1).
    `pair_s(forward stage, backward stage)` is the time of an overlapped pair, by default the sum of its parts. A pair
    starts when both parts can and ends as one. Raises ValueError when times are missing or of the wrong length.
    """
    times = _durations(schedule, forward_s, backward_s, input_grad_s, weight_grad_s)
    wires = [transfer_s] * (schedule.stages - 1) if isinstance(transfer_s, (int, float)) else list(transfer_s)
    steps = _steps(schedule)
    clock = [0.0] * schedule.ranks
    busy = [0.0] * schedule.ranks
    start: list[float | None] = [None] * schedule.ranks
    arrived: dict[int, float] = {}
    free_at: dict[int, float] = {}  # when a channel has carried its last message
    for step in steps:
        action, rank = step.action, step.rank
        begin = clock[rank]
        for message in step.receives:
            begin = max(begin, arrived[message])
        if not action.parts:
            duration = times[action.kind][action.stage]
        elif pair_s is None:
            duration = sum(times[leaf.kind][leaf.stage] for leaf in action.parts)
        else:
            duration = pair_s(action.parts[0].stage, action.parts[1].stage)
        end = clock[rank] = begin + duration
        busy[rank] += duration
        if start[rank] is None:
            start[rank] = begin
        for message, channel, boundary in step.sends:
            free_at[channel] = arrived[message] = max(end, free_at.get(channel, 0.0)) + wires[boundary]
    return PipelineTiming(
        step_s=max(clock),
        busy_s=tuple(busy),
        start_s=tuple(begin or 0.0 for begin in start),
        end_s=tuple(clock),
        in_flight=peak_in_flight(schedule),
    )


def _durations(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float] | None,
    input_grad_s: Sequence[float] | None,
    weight_grad_s: Sequence[float] | None,
) -> dict[Kind, Sequence[float]]:
    times: dict[Kind, Sequence[float]] = {Kind.FORWARD: forward_s}
    if input_grad_s is not None and weight_grad_s is not None:
        times[Kind.INPUT_GRAD], times[Kind.WEIGHT_GRAD] = input_grad_s, weight_grad_s
        backward_s = backward_s or [i + w for i, w in zip(input_grad_s, weight_grad_s, strict=True)]
    if backward_s is not None:
        times[Kind.BACKWARD] = backward_s
    for kind, values in times.items():
        if len(values) != schedule.stages:
            raise ValueError(f"{len(values)} times of {kind.name.lower()} for {schedule.stages} stages")
    missing = {leaf.kind for row in schedule.table for a in row for leaf in a.leaves} - set(times)
    if missing:
        raise ValueError(f"schedule {schedule.name} needs times of {', '.join(sorted(k.name for k in missing))}")
    return times


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return for each rank the most (stage, micro batch) pairs in flight."""
    return tuple(_peak(row) for row in schedule.table)


def peak_on_stage(schedule: Schedule, stage: int) -> int:
    """Return the most micro batches in flight on one stage."""
    return _peak(schedule.table[schedule.rank_of(stage)], stage)


# By how many micro batches an action changes the activations that a rank keeps; of a split backward pass, the second
# half frees them.
_KEEPS = {Kind.FORWARD: 1, Kind.INPUT_GRAD: 0, Kind.WEIGHT_GRAD: -1, Kind.BACKWARD: -1}


def _peak(row: Sequence[Action], stage: int | None = None) -> int:
    leaves = (leaf for action in row for leaf in action.leaves)
    return max(accumulate((_KEEPS[leaf.kind] for leaf in leaves if stage in (None, leaf.stage)), initial=0))
