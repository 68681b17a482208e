"""A schedule's table ready to be walked once: the passes of all ranks, each after what it needs, and their kinds.

A long step repeats itself, so its table is walked with fewer micro batches (`walked`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simulator.pipeline.schedule_program import TURNS, last_backwards
from simulator.pipeline.schedules.registry import SCHEDULES, build_schedule
from simulator.pipeline.schedules.table import Action, Kind, Schedule
from simulator.pipeline.waves import Waves, waves_of


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


class Gathered(IntEnum):
    """Which units of a stage have their parameters gathered between two passes."""

    AS_LEFT = 0  # whichever a plan that keeps them has left
    NONE = 1
    LAST = 2
    ALL = 3


# What a pass leaves where parameters are let go after use. Between the halves of a backward all are kept.
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
    """A schedule ready to be walked: the waves of its passes, the kinds of passes among them, and each rank's kinds in
    order.
    """

    schedule: Schedule
    waves: Waves
    kinds: tuple[PassKind, ...]
    rows: tuple[NDArray[np.intp], ...]

    @property
    def turn_kinds(self) -> NDArray[np.intp]:
        """The kind of every pass, in the order of `waves`."""
        starts = np.cumsum([0, *map(len, self.rows[:-1])])
        return np.asarray(np.concatenate(self.rows)[starts[self.waves.rank] + self.waves.place])


@lru_cache(maxsize=512)
def table_of(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int, *, lets_go: bool, paired: bool = False
) -> Table:
    """Return the table of a schedule. `lets_go`: of gathered parameters after use; `paired`: see `build_schedule`, and
    pairs that the schedule has by itself run as one. Raises BadPlan where it has none.
    """
    schedule, waves = _in_waves(name, ranks, micro_batches, stages_per_rank, paired=paired)
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
    return Table(schedule, waves, passes, tuple(rows))


@lru_cache(maxsize=128)
def _in_waves(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int, *, paired: bool
) -> tuple[Schedule, Waves]:
    schedule = build_schedule(
        name, ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages_per_rank, paired=paired
    )
    return schedule, waves_of(schedule)


def _leaves(row: Sequence[Action]) -> list[tuple[Action, bool]]:
    """Return the single actions of a row, and whether each is half of a pair."""
    return [(leaf, bool(action.parts)) for action in row for leaf in action.leaves]
