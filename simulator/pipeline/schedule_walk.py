"""A schedule's table ready to be walked once: the actions of all ranks in an order in which each comes after what it
needs.

A long step repeats itself, so its table is walked with fewer micro batches (`walked`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.pipeline.schedule_program import TURNS, last_backwards
from simulator.pipeline.schedules.registry import SCHEDULES, build_schedule
from simulator.pipeline.schedules.table import Action, Kind, Schedule


def rounds_of(name: str, ranks: int, micro_batches: int) -> tuple[int, int]:
    """Return (micro batches after which a schedule repeats itself, the most of them that are worth walking)."""
    if SCHEDULES[name].rounds:
        period = micro_batches // max(1, micro_batches // ranks)
        return period, 3 * period
    return 1, 2 * ranks + 2


def walked(name: str, ranks: int, micro_batches: int) -> int:
    """Return with how many micro batches a schedule's table is walked."""
    period, most = rounds_of(name, ranks, micro_batches)
    return min(micro_batches, most - (most - micro_batches) % period) if micro_batches > most else micro_batches


Message = tuple[int, str, int]  # the stage that made it, what it carries, and the micro batch


class Turn(NamedTuple):
    """One pass of a table in an order in which all that it needs has come before.

    `kind` is an index into `Table.kinds`; `needs` are messages from other ranks, `sends` are those to others, each with
    the rank that it goes to. Of two passes that are one action the first needs, and the second sends, what both do.
    """

    rank: int
    kind: int
    needs: tuple[Message, ...]
    sends: tuple[tuple[Message, int], ...]


class Gathered(IntEnum):
    """Which units of a stage have their parameters gathered between two passes."""

    AS_LEFT = 0  # whichever a plan that keeps them has left
    NONE = 1
    LAST = 2
    ALL = 3


# What messages carry: outputs of stages one way, gradients of their inputs the other.
FORWARD, BACK = str(Kind.FORWARD), str(Kind.INPUT_GRAD)

# What a pass leaves where parameters are freed after use. Between the halves of a backward all are kept.
LEAVES = {
    Kind.FORWARD: Gathered.LAST,
    Kind.BACKWARD: Gathered.NONE,
    Kind.INPUT_GRAD: Gathered.ALL,
    Kind.WEIGHT_GRAD: Gathered.NONE,
}


@dataclass(frozen=True, slots=True)
class PassKind:
    """A pass of a stage. `gathered`: before it; `paired`: it runs together with one of another micro batch."""

    stage: int
    action: Kind
    first: bool
    last: bool
    gathered: Gathered
    paired: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A schedule ready to be walked: its turns, the kinds of passes among them, and each rank's kinds in order."""

    schedule: Schedule
    turns: tuple[Turn, ...]
    kinds: tuple[PassKind, ...]
    rows: tuple[NDArray[np.intp], ...]


@lru_cache(maxsize=512)
def table_of(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int, *, lets_go: bool, paired: bool = False
) -> Table:
    """Return the table of a schedule. `lets_go`: of gathered parameters after use; `paired`: see `build_schedule`, and
    pairs that the schedule has by itself run as one. Raises BadPlan where it has none.
    """
    schedule = build_schedule(
        name, ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages_per_rank, paired=paired
    )
    kinds: dict[tuple[int, Kind, bool, bool, Gathered, bool], int] = {}
    rows: list[NDArray[np.intp]] = []
    ends = last_backwards(schedule)
    for row in schedule.table:
        seen: set[tuple[int, bool]] = set()
        gathered: dict[int, Gathered] = {}
        here: list[int] = []
        for leaf, together in _leaves(row):
            stage, action = leaf.stage, leaf.kind
            turns, first = action in TURNS, False
            if action is not Kind.INPUT_GRAD:
                first = (stage, turns) not in seen
                seen.add((stage, turns))
            held = gathered.get(stage, Gathered.NONE) if lets_go else Gathered.AS_LEFT
            gathered[stage] = LEAVES[action]
            last = turns and leaf.micro_batch == ends[stage]
            key = (stage, action, first, last, held, paired and together)
            here.append(kinds.setdefault(key, len(kinds)))
        rows.append(np.array(here, dtype=np.intp))
    passes = tuple(PassKind(*kind) for kind in kinds)
    return Table(schedule, _in_order(schedule, rows), passes, tuple(rows))


def _leaves(row: Sequence[Action]) -> list[tuple[Action, bool]]:
    """Return the single actions of a row, and whether each is half of a pair."""
    return [(leaf, bool(action.parts)) for action in row for leaf in action.leaves]


def _in_order(schedule: Schedule, rows: Sequence[NDArray[np.intp]]) -> tuple[Turn, ...]:
    """Return the passes of all ranks in an order in which each comes after what it needs."""
    kinds = [iter(row.tolist()) for row in rows]
    home = [schedule.rank_of(stage) for stage in range(schedule.stages)]
    at = [0] * schedule.ranks
    done: set[Message] = set()
    waiting: dict[Message, int] = {}  # what ranks cannot go on without
    able = list(range(schedule.ranks))
    turns: list[Turn] = []
    while able:
        rank = able.pop()
        row = schedule.table[rank]
        for number in range(at[rank], len(row)):
            leaves = row[number].leaves
            messages = [_messages(leaf, rank, home) for leaf in leaves]
            needs = [comes for comes, _, _ in messages if comes is not None]
            missing = next((message for message in needs if message not in done), None)
            at[rank] = number
            if missing is not None:
                waiting[missing] = rank
                break
            at[rank] = number + 1
            sends = tuple((made, target) for _, made, target in messages if target >= 0)
            for made in (made for _, made, _ in messages):
                done.add(made)
                if made in waiting:
                    able.append(waiting.pop(made))
            for place in range(len(leaves)):
                first, last = place == 0, place == len(leaves) - 1
                turns.append(Turn(rank, next(kinds[rank]), tuple(needs) if first else (), sends if last else ()))
    return tuple(turns)


def _messages(leaf: Action, rank: int, home: Sequence[int]) -> tuple[Message | None, Message, int]:
    """Return the message that a pass needs from another rank, what it makes, and the rank that this is sent to or
    -1.
    """
    word, onward = (FORWARD, 1) if leaf.kind is Kind.FORWARD else (BACK, -1)
    made = (leaf.stage, word, leaf.micro_batch)
    if leaf.kind is Kind.WEIGHT_GRAD:
        return None, (leaf.stage, str(leaf.kind), leaf.micro_batch), -1
    source, target = leaf.stage - onward, leaf.stage + onward
    comes = (source, word, leaf.micro_batch) if 0 <= source < len(home) and home[source] != rank else None
    return comes, made, home[target] if 0 <= target < len(home) and home[target] != rank else -1
