"""What a pipeline schedule costs: its makespan without a simulation, and its lowering to a Program.

Both read the same table and keep the same rules, so they agree to rounding: actions of a rank run in order; a message
goes to the neighbouring stage when an action has made it, on a channel of its own (stage boundary and direction) that
carries one message at a time; nothing is sent between two stages of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from simulator.program import COMPUTE, CodeWriter, Groups, Program, RankCode
from simulator.schedules import Action, Kind, Schedule


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


# --- makespan ---------------------------------------------------------------------------------------------------------

Result = tuple[int, Kind, int]  # (stage, F or I, micro batch): what a forward or an input gradient makes


@dataclass(frozen=True, slots=True)
class _Step:
    """A node of the graph. Messages are numbered; `sends` are (message, channel, boundary)."""

    rank: int
    action: Action
    receives: tuple[int, ...]
    sends: tuple[tuple[int, int, int], ...]


def needs(action: Action, stages: int) -> list[Result]:
    """Return the results of other stages that a single action consumes; its own stage's come earlier in its row."""
    if action.kind is Kind.FORWARD and action.stage > 0:
        return [(action.stage - 1, Kind.FORWARD, action.micro_batch)]
    if action.kind in {Kind.BACKWARD, Kind.INPUT_GRAD} and action.stage < stages - 1:
        return [(action.stage + 1, Kind.INPUT_GRAD, action.micro_batch)]
    return []


def makes(action: Action) -> Result:
    """Return what a single action makes; a full backward makes an input gradient."""
    kind = Kind.INPUT_GRAD if action.kind is Kind.BACKWARD else action.kind
    return action.stage, kind, action.micro_batch


def sent_to(action: Action, schedule: Schedule) -> int | None:
    """Return the rank to which a single action's result goes; None if it stays or there is none."""
    stage, kind, _ = makes(action)
    target = stage + 1 if kind is Kind.FORWARD else stage - 1
    if kind is Kind.WEIGHT_GRAD or not 0 <= target < schedule.stages:
        return None
    rank = schedule.rank_of(target)
    return None if rank == schedule.rank_of(stage) else rank


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
        raise ValueError(f"schedule {schedule.name} can never finish; schedules.check_schedule says why")
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
    """Return per rank the most (stage, micro batch) pairs between their forward and the end of their backward."""
    return tuple(round(peak) for peak in peak_activations(schedule, [1.0] * schedule.stages))


def peak_activations(
    schedule: Schedule, per_stage: Sequence[float], after_input_grad: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Return per rank the peak of the activations it keeps, from the order of its actions alone.

    A forward adds `per_stage[stage]` (say, bytes), a full backward takes it away. An input gradient leaves
    `after_input_grad[stage]` of it (default: all) for the weight gradient to free.
    """
    kept = per_stage if after_input_grad is None else after_input_grad
    changes = {
        Kind.FORWARD: per_stage,
        Kind.BACKWARD: [-whole for whole in per_stage],
        Kind.INPUT_GRAD: [left - whole for whole, left in zip(per_stage, kept, strict=True)],
        Kind.WEIGHT_GRAD: [-left for left in kept],
    }
    return tuple(_peak(row, changes) for row in schedule.table)


def peak_on_stage(schedule: Schedule, stage: int) -> int:
    """Return the most micro batches whose activations one stage keeps at once."""
    alone = [0.0] * schedule.stages
    alone[stage] = 1.0
    released = [-whole for whole in alone]
    changes = {Kind.FORWARD: alone, Kind.BACKWARD: released, Kind.INPUT_GRAD: [0.0] * len(alone)}
    return round(_peak(schedule.table[schedule.rank_of(stage)], {**changes, Kind.WEIGHT_GRAD: released}))


def _peak(row: Sequence[Action], changes: dict[Kind, Sequence[float]]) -> float:
    """Return the most that is kept on a rank, as each kind of action on a stage adds to it or takes from it."""
    steps = [changes[leaf.kind][leaf.stage] for action in row for leaf in action.leaves]
    return max(accumulate(steps, initial=0.0))


# --- lowering ---------------------------------------------------------------------------------------------------------


def pipeline_program(
    schedule: Schedule,
    body: Callable[[CodeWriter, Action, int], None],
    *,
    message_bytes: int,
    groups: dict[str, Groups],
    ranks_of: Callable[[int], Iterable[int]],
    early_receives: bool = True,
    finish: Callable[[CodeWriter, int], None] | None = None,
) -> Program:
    """Return a program that runs `schedule`, with `body(code, action, rank)` writing what an action does.

    `finish(code, rank)` writes what follows a rank's last action and its message: the optimizer must not hold up the
    gradient that the rank before still waits for.

    `groups["pp"]` are the pipelines, position s of each being pipeline rank s; `ranks_of(s)` lists the ranks there.
    An overlapped pair reaches `body` whole. The body works on the `compute` stream, or joins it before it returns.
    With `early_receives` a message can arrive while the rank still computes; without, a receive is launched behind
    the compute before it, as torch.distributed.pipelining and Megatron do: a waiting receive would hold SMs.
    """
    codes = (
        _rank_code(schedule, rank, body, message_bytes, ranks_of(rank), early=early_receives, finish=finish)
        for rank in range(schedule.ranks)
    )
    return Program(codes=tuple(codes), groups=groups)


def _rank_code(
    schedule: Schedule,
    rank: int,
    body: Callable[[CodeWriter, Action, int], None],
    nbytes: int,
    members: Iterable[int],
    *,
    early: bool,
    finish: Callable[[CodeWriter, int], None] | None,
) -> RankCode:
    code = CodeWriter()
    for action in schedule.table[rank]:
        for leaf in action.leaves:
            for stage, kind, _ in needs(leaf, schedule.stages):
                if schedule.rank_of(stage) != rank:
                    channel = f"{stage}{kind}"
                    if not early:
                        code.after(f"recv {channel}", COMPUTE)
                    code.recv("pp", schedule.rank_of(stage), nbytes, tag=channel, stream=f"recv {channel}")
                    code.after(COMPUTE, f"recv {channel}")
        body(code, action, rank)
        for leaf in action.leaves:
            target = sent_to(leaf, schedule)
            if target is not None:
                stage, kind, _ = makes(leaf)
                channel = f"{stage}{kind}"
                code.after(f"send {channel}", COMPUTE)
                code.send("pp", target, nbytes, tag=channel, stream=f"send {channel}")
    if finish is not None:
        finish(code, rank)
    return code.code(f"pipeline rank {rank}", members)
