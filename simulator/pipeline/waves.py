"""The passes of a schedule in waves: those of a wave need nothing of each other, only of waves before it.

So the passes of a wave, one a rank at most, can be walked at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from simulator.pipeline.schedules.table import Action, Kind, Schedule

Ints = NDArray[np.intp]
Way = tuple[int, bool]  # the stage that makes what is sent, and whether it goes forward
Message = tuple[int, bool, int]  # the same, and the micro batch


@dataclass(frozen=True, slots=True)
class Ends:
    """One end of every message, where it is needed or where it is sent.

    `turn` is the pass there and `number` which of its messages it is; `source` and `target` are ranks. A rank sends the
    messages of one stage that go one way one behind the other; `slot` numbers what it sends so.
    """

    turn: Ints
    number: Ints
    message: Ints
    slot: Ints
    source: Ints
    target: Ints

    def take(self, some: NDArray[np.bool_]) -> Ends:
        """Return some of the ends."""
        return Ends(*(getattr(self, each.name)[some] for each in fields(Ends)))


@dataclass(frozen=True, slots=True)
class Waves:
    """The passes of a schedule, each with its wave, its rank and its place among the passes of that, and the ends of
    all messages. Of two passes that are one action the first needs, and the second sends, what both do.
    """

    wave: Ints
    rank: Ints
    place: Ints
    needs: Ends
    sends: Ends
    messages: int
    slots: int  # that a rank has at most


def waves_of(schedule: Schedule) -> Waves:
    """Return the passes of all ranks, each in as early a wave as what it needs allows."""
    builder = _Builder(schedule)
    builder.build()
    turns = np.array(builder.turns, dtype=np.intp).reshape(-1, 3).T
    return Waves(
        *turns,
        needs=_ends(builder.needs),
        sends=_ends(builder.sends),
        messages=len(builder.sent),
        slots=max(builder.slots),
    )


def _ends(found: Sequence[tuple[int, ...]]) -> Ends:
    return Ends(*np.array(found, dtype=np.intp).reshape(-1, 6).T)


class _Builder:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.home = [schedule.rank_of(stage) for stage in range(schedule.stages)]
        self.turns: list[tuple[int, int, int]] = []  # wave, rank, place
        self.needs: list[tuple[int, ...]] = []
        self.sends: list[tuple[int, ...]] = []
        self.sent: dict[Message, tuple[int, tuple[int, ...]]] = {}  # from which wave on it is there, and its end
        self._slot_of: dict[Way, int] = {}
        self.slots, self._wave, self._place = ([0] * schedule.ranks for _ in range(3))  # the next of each rank

    def build(self) -> None:
        """Run every rank as far as the messages that are there allow, until all have run."""
        at = [0] * self.schedule.ranks
        waiting: dict[Message, int] = {}  # what ranks cannot go on without
        able = list(range(self.schedule.ranks))
        while able:
            rank = able.pop()
            row = self.schedule.table[rank]
            while at[rank] < len(row):
                leaves = row[at[rank]].leaves
                needed = [message for leaf in leaves if (message := self._needed(leaf, rank)) is not None]
                missing = next((message for message in needed if message not in self.sent), None)
                if missing is not None:
                    waiting[missing] = rank
                    break
                at[rank] += 1
                for message in self._run(rank, leaves, needed):
                    if message in waiting:
                        able.append(waiting.pop(message))

    def _needed(self, leaf: Action, rank: int) -> Message | None:
        """Return the message that a pass needs from another rank."""
        if leaf.kind is Kind.WEIGHT_GRAD:
            return None
        forward = leaf.kind is Kind.FORWARD
        source = leaf.stage - 1 if forward else leaf.stage + 1
        there = 0 <= source < len(self.home) and self.home[source] != rank
        return (source, forward, leaf.micro_batch) if there else None

    def _run(self, rank: int, leaves: Sequence[Action], needed: Sequence[Message]) -> list[Message]:
        """Add the passes of an action, and return what they send to other ranks."""
        wave, turn = self._wave[rank], len(self.turns)
        for number, message in enumerate(needed):
            arrives, end = self.sent[message]
            wave = max(wave, arrives)
            self.needs.append((turn, number, *end))
        for further in range(len(leaves)):
            self.turns.append((wave + further, rank, self._place[rank] + further))
        self._wave[rank] = wave + len(leaves)
        self._place[rank] += len(leaves)
        made: list[Message] = []
        for leaf in leaves:
            forward = leaf.kind is Kind.FORWARD
            stage = leaf.stage + 1 if forward else leaf.stage - 1
            if leaf.kind is Kind.WEIGHT_GRAD or not 0 <= stage < len(self.home) or self.home[stage] == rank:
                continue
            way = leaf.stage, forward
            if way not in self._slot_of:
                self._slot_of[way] = self.slots[rank]
                self.slots[rank] += 1
            end = len(self.sent), self._slot_of[way], rank, self.home[stage]
            self.sends.append((len(self.turns) - 1, len(made), *end))
            made.append((*way, leaf.micro_batch))
            self.sent[made[-1]] = self._wave[rank], end
        return made
