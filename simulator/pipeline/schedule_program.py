"""A pipeline schedule as a Program: the messages between its ranks.

Actions of a rank run in order; the result of an action is sent to the neighbouring stage, on a channel of its own
(stage boundary and direction) that carries one message at a time; nothing is sent between two stages of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType

from simulator.pipeline.schedules.table import Action, Kind, Schedule
from simulator.program.program import COMPUTE, CodeWriter, Groups, Program, RankCode

Result = tuple[int, Kind, int]  # (stage, F or I, micro batch): the result of a forward pass or of an input gradient


def needs(action: Action, stages: int) -> list[Result]:
    """Return the results of other stages that an action needs; those of its own stage come earlier in its row."""
    if action.kind is Kind.FORWARD and action.stage > 0:
        return [(action.stage - 1, Kind.FORWARD, action.micro_batch)]
    if action.kind in {Kind.BACKWARD, Kind.INPUT_GRAD} and action.stage < stages - 1:
        return [(action.stage + 1, Kind.INPUT_GRAD, action.micro_batch)]
    return []


def makes(action: Action) -> Result:
    """Return the result of an action; that of a full backward pass is an input gradient."""
    kind = Kind.INPUT_GRAD if action.kind is Kind.BACKWARD else action.kind
    return action.stage, kind, action.micro_batch


def sent_to(action: Action, schedule: Schedule) -> int | None:
    """Return the rank that gets an action's result; None if it is not sent."""
    stage, kind, _ = makes(action)
    target = stage + 1 if kind is Kind.FORWARD else stage - 1
    if kind is Kind.WEIGHT_GRAD or not 0 <= target < schedule.stages:
        return None
    rank = schedule.rank_of(target)
    return None if rank == schedule.rank_of(stage) else rank


# Passes after which a stage's parameters have a micro batch's gradients.
TURNS = (Kind.BACKWARD, Kind.WEIGHT_GRAD)


@lru_cache(maxsize=256)
def last_backwards(schedule: Schedule) -> Mapping[int, int]:
    """Return for each stage the micro batch whose parameter gradients are computed last."""
    leaves = (leaf for row in schedule.table for action in row for leaf in action.leaves)
    return MappingProxyType({leaf.stage: leaf.micro_batch for leaf in leaves if leaf.kind in TURNS})


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
    writer: Callable[[], CodeWriter] = CodeWriter,
) -> Program:
    """Return a program that runs `schedule`, in which `body(code, action, rank)` writes an action.

    `finish(code, rank)` writes what follows a rank's last action and its message: the optimizer must not delay the
    gradient that the previous rank waits for.

    `groups["pp"]` are the pipelines; position s in each is pipeline rank s, and `ranks_of(s)` lists the ranks there.
    An overlapped pair is passed to `body` as one action. The body works on the `compute` stream, or joins it before it
    returns. With `early_receives` a message can arrive while the rank still computes. Without, a receive is launched
    after the compute before it, as in torch.distributed.pipelining and Megatron, since a waiting receive would hold
    SMs. `writer` makes what writes the code of each rank.
    """
    codes = (
        _rank_code(schedule, rank, body, message_bytes, ranks_of(rank), writer(), early=early_receives, finish=finish)
        for rank in range(schedule.ranks)
    )
    return Program(codes=tuple(codes), groups=groups)


def _rank_code(
    schedule: Schedule,
    rank: int,
    body: Callable[[CodeWriter, Action, int], None],
    nbytes: int,
    members: Iterable[int],
    code: CodeWriter,
    *,
    early: bool,
    finish: Callable[[CodeWriter, int], None] | None,
) -> RankCode:
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
