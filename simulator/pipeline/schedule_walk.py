"""A schedule's table in a form that can be walked once: the passes of all ranks, each after those that it needs, and
their kinds.

A long step repeats itself, so its table is walked with fewer micro batches (`walked`, `shown`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np

from simulator.pipeline.schedule_program import TURNS
from simulator.pipeline.schedules.registry import SCHEDULES, build_schedule
from simulator.pipeline.schedules.table import Kind, Schedule
from simulator.pipeline.waves import KINDS, Ints, Waves, waves_of


def period_of(name: str, ranks: int, micro_batches: int) -> int:
    """Return the period of a schedule in micro batches."""
    return micro_batches // max(1, micro_batches // ranks) if SCHEDULES[name].rounds else 1


def shown(name: str, ranks: int, micro_batches: int) -> int:
    """Return the fewest micro batches with which a schedule's table shows how it goes on."""
    return _whole_rounds(name, ranks, micro_batches, 2 * ranks + 2)


def walked(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> int:
    """Return the number of micro batches with which a schedule's table is walked, after which every further round takes
    about as long as the last one. Where all forward passes come first, that takes as long for each stage.
    """
    settled = (4 * stages_per_rank + 4 if SCHEDULES[name].forwards_first else 3) * ranks + 2
    return _whole_rounds(name, ranks, micro_batches, settled)


def _whole_rounds(name: str, ranks: int, micro_batches: int, most: int) -> int:
    """Return all micro batches, or as many as `most` where there are more; three rounds of a schedule in rounds."""
    period = period_of(name, ranks, micro_batches)
    most = 3 * period if SCHEDULES[name].rounds else most
    return min(micro_batches, most - (most - micro_batches) % period) if micro_batches > most else micro_batches


class Gathered(IntEnum):
    """The units of a stage whose parameters are gathered between two passes."""

    AS_LEFT = 0  # as the previous pass left them, for plans that keep parameters gathered
    NONE = 1
    LAST = 2
    ALL = 3


GATHERED = tuple(Gathered)
# What a pass leaves gathered where parameters are freed after use. Between the halves of a backward pass all stay
# gathered.
LEAVES = {
    Kind.FORWARD: Gathered.LAST,
    Kind.BACKWARD: Gathered.NONE,
    Kind.INPUT_GRAD: Gathered.ALL,
    Kind.WEIGHT_GRAD: Gathered.NONE,
}


@dataclass(frozen=True, slots=True)
class PassKind:
    """A kind of pass of a stage. `gathered`: the units gathered before it; `paired`: it runs at the same time as a pass
    of another micro batch.
    """

    stage: int
    action: Kind
    first: bool
    last: bool
    gathered: Gathered
    paired: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A schedule in walkable form: the waves of its passes, the distinct kinds of pass, and the kind of each."""

    schedule: Schedule
    waves: Waves
    kinds: tuple[PassKind, ...]
    turn_kinds: Ints


@lru_cache(maxsize=512)
def table_of(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int, *, lets_go: bool, paired: bool = False
) -> Table:
    """Return the table of a schedule. `lets_go`: gathered parameters are freed after use. `paired`: see
    `build_schedule`; pairs of the schedule itself run as one action. Raises BadPlan for a combination that the schedule
    does not have.
    """
    schedule, waves = _in_waves(name, ranks, micro_batches, stages_per_rank, paired=paired)
    passes = waves.passes
    stage, kind = passes.stage, passes.kind
    turns = np.isin(kind, [KINDS.index(each) for each in TURNS])
    first = np.zeros(len(stage), dtype=np.bool_)
    whole = np.nonzero(kind != KINDS.index(Kind.INPUT_GRAD))[0]
    first[whole[np.unique((2 * stage + turns)[whole], return_index=True)[1]]] = True
    ends = np.zeros(schedule.stages, dtype=np.intp)
    ends[stage[turns]] = passes.micro_batch[turns]
    last = turns & (passes.micro_batch == ends[stage])
    gathered = np.full(len(stage), Gathered.AS_LEFT, dtype=np.intp)
    if lets_go:
        order = np.argsort(stage, kind="stable")
        leaves = np.array([LEAVES[each] for each in KINDS])[kind[order]]
        follows = stage[order[1:]] == stage[order[:-1]]
        gathered[order] = np.append(Gathered.NONE, np.where(follows, leaves[:-1], Gathered.NONE))
    together = passes.together & paired
    key = ((((stage * len(KINDS) + kind) * 2 + first) * 2 + last) * len(Gathered) + gathered) * 2 + together
    _, some, which = np.unique(key, return_index=True, return_inverse=True)
    columns = (each[some].tolist() for each in (stage, kind, first, last, gathered, together))
    kinds = tuple(PassKind(of, KINDS[k], a, z, GATHERED[g], t) for of, k, a, z, g, t in zip(*columns, strict=True))
    return Table(schedule, waves, kinds, which)


@lru_cache(maxsize=128)
def _in_waves(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int, *, paired: bool
) -> tuple[Schedule, Waves]:
    schedule = build_schedule(
        name, ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages_per_rank, paired=paired
    )
    return schedule, waves_of(schedule)
