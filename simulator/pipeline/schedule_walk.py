"""A schedule's table ready to be walked once: the actions of all ranks in an order in which each comes after what it needs.

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

from simulator.pipeline.schedule_program import TURNS, last_backwards, peak_in_flight
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


class Turn(NamedTuple):
    """One action of a table in an order in which all that it needs has come before.

    `kind` is an index into `Table.kinds`; `needs` is (stage, is it a forward) of a result of another rank, whose message
    is the `number`th on its channel; `sends` likewise.
    """

    rank: int
    kind: int
    needs: tuple[int, str, int] | None
    sends: tuple[int, str, int] | None
    target: int  # the rank it sends to


class Gathered(IntEnum):
    """Which units of a stage have their parameters gathered between two passes."""

    AS_LEFT = 0  # whichever a plan that keeps them has left
    NONE = 1
    LAST = 2
    ALL = 3


# What messages carry: outputs of stages one way, gradients of their inputs the other.
FORWARD, BACK = str(Kind.FORWARD), str(Kind.INPUT_GRAD)

# What a pass leaves where parameters are let go after use. Between the halves of a backward all are kept.
LEAVES = {
    Kind.FORWARD: Gathered.LAST,
    Kind.BACKWARD: Gathered.NONE,
    Kind.INPUT_GRAD: Gathered.ALL,
    Kind.WEIGHT_GRAD: Gathered.NONE,
}


@dataclass(frozen=True, slots=True)
class PassKind:
    """A pass of a stage. `gathered`: before it; `follows`: another stage of its rank has sent its gradients off; `paired`: it
    runs together with one of another micro batch.
    """

    stage: int
    action: Kind
    first: bool
    last: bool
    gathered: Gathered
    follows: bool
    paired: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A schedule ready to be walked: its turns, the kinds of passes among them, and each rank's kinds in order."""

    schedule: Schedule
    turns: tuple[Turn, ...]
    kinds: tuple[PassKind, ...]
    rows: tuple[NDArray[np.intp], ...]
    in_flight: tuple[int, ...]


@lru_cache(maxsize=512)
def table_of(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int, *, lets_go: bool, paired: bool = False
) -> Table:
    """Return the table of a schedule. `lets_go`: of gathered parameters after use; `paired`: see `build_schedule`, and pairs
    that the schedule has by itself run as one. Raises BadPlan where it has none.
    """
    schedule = build_schedule(
        name, ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages_per_rank, paired=paired
    )
    kinds: dict[tuple[int, Kind, bool, bool, Gathered, bool, bool], int] = {}
    rows: list[NDArray[np.intp]] = []
    ends = last_backwards(schedule)
    for row in schedule.table:
        seen: set[tuple[int, bool]] = set()
        gathered: dict[int, Gathered] = {}
        here: list[int] = []
        sent = False
        for leaf, together in _leaves(row):
            stage, action = leaf.stage, leaf.kind
            turns, first = action in TURNS, False
            if action is not Kind.INPUT_GRAD:
                first = (stage, turns) not in seen
                seen.add((stage, turns))
            held = gathered.get(stage, Gathered.NONE) if lets_go else Gathered.AS_LEFT
            gathered[stage] = LEAVES[action]
            last = turns and leaf.micro_batch == ends[stage]
            key = (stage, action, first, last, held, last and sent, paired and together)
            here.append(kinds.setdefault(key, len(kinds)))
            sent = sent or last
        rows.append(np.array(here, dtype=np.intp))
    passes = tuple(PassKind(*kind) for kind in kinds)
    return Table(schedule, _in_order(schedule, rows), passes, tuple(rows), peak_in_flight(schedule))


def _leaves(row: Sequence[Action]) -> list[tuple[Action, bool]]:
    """Return the single actions of a row, and whether each is half of a pair."""
    return [(leaf, bool(action.parts)) for action in row for leaf in action.leaves]


def _in_order(schedule: Schedule, rows: Sequence[NDArray[np.intp]]) -> tuple[Turn, ...]:
    """Return the actions of all ranks in an order in which each comes after what it needs."""
    leaves = [[leaf for leaf, _ in _leaves(row)] for row in schedule.table]
    kinds = [row.tolist() for row in rows]
    home = [schedule.rank_of(stage) for stage in range(schedule.stages)]
    at = [0] * schedule.ranks
    done: set[tuple[int, str, int]] = set()
    waiting: dict[tuple[int, str, int], int] = {}  # what ranks cannot go on without
    able = list(range(schedule.ranks))
    turns: list[Turn] = []
    while able:
        rank = able.pop()
        row = leaves[rank]
        for number in range(at[rank], len(row)):
            stage, action, micro_batch = row[number].stage, row[number].kind, row[number].micro_batch
            word, onward = (FORWARD, 1) if action is Kind.FORWARD else (BACK, -1)
            made, comes, goes = (stage, word, micro_batch), None, None
            if action is not Kind.WEIGHT_GRAD:
                source, target = stage - onward, stage + onward
                if 0 <= source < len(home) and home[source] != rank:
                    comes = (source, word, micro_batch)
                    if comes not in done:
                        waiting[comes] = rank
                        at[rank] = number
                        break
                if 0 <= target < len(home) and home[target] != rank:
                    goes = made
                done.add(made)
                if made in waiting:
                    able.append(waiting.pop(made))
            turns.append(Turn(rank, kinds[rank][number], comes, goes, -1 if goes is None else home[stage + onward]))
    return tuple(turns)
