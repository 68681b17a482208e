"""The passes of a schedule in waves: a pass needs only passes of earlier waves.

So the passes of a wave, at most one for each rank, can be walked at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.pipeline.schedules.table import Kind, Schedule

Ints = NDArray[np.intp]
Flags = NDArray[np.bool_]
KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
FORWARD, WEIGHT_GRAD = KINDS.index(Kind.FORWARD), KINDS.index(Kind.WEIGHT_GRAD)
_NUMBER = {kind: number for number, kind in enumerate(KINDS)}
NOT_YET = np.iinfo(np.intp).max


@dataclass(frozen=True, slots=True)
class Ends:
    """The first, second, ... message that each pass receives or sends, shape (most messages of a pass, passes).

    `message` is -1 where there is none. `hop` is the rank that sends it, plus the number of ranks where it goes to the
    one before. A rank sends the messages of one stage in one direction one after the other; `slot` numbers such
    sequences.
    """

    message: Ints
    hop: Ints
    slot: Ints


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of all ranks in order, rank after rank: the kind of each (an index into KINDS), its stage, micro batch
    and action; the passes of an action with two are `together`.
    """

    rank: Ints
    action: Ints
    stage: Ints
    kind: Ints
    micro_batch: Ints
    together: Flags


@dataclass(frozen=True, slots=True)
class Waves:
    """The passes of a schedule, each with its wave, and the messages that they need and send. Of the two passes of one
    action, the first receives and the second sends the messages of both.
    """

    passes: Passes
    wave: Ints
    needs: Ends
    sends: Ends
    messages: int
    slots: int  # most slots of a rank

    @property
    def rank(self) -> Ints:
        """The rank of every pass."""
        return self.passes.rank


def passes_of(schedule: Schedule) -> Passes:
    """Return the passes of a schedule."""
    actions = [action for row in schedule.table for action in row]
    stage, kind, micro_batch, parts = zip(*actions, strict=True)
    count = np.ones(len(actions), dtype=np.intp)
    if any(parts):
        count = np.array([len(each) or 1 for each in parts], dtype=np.intp)
        stage, kind, micro_batch, _ = zip(*(leaf for action in actions for leaf in action.leaves), strict=True)
    rank = np.repeat(np.arange(schedule.ranks), [len(row) for row in schedule.table])
    return Passes(
        rank=np.repeat(rank, count),
        action=np.repeat(np.arange(len(actions)), count),
        stage=np.array(stage, dtype=np.intp),
        kind=np.array([*map(_NUMBER.__getitem__, kind)], dtype=np.intp),
        micro_batch=np.array(micro_batch, dtype=np.intp),
        together=np.repeat(count > 1, count),
    )


def waves_of(schedule: Schedule) -> Waves:
    """Return the passes of all ranks, each in the earliest wave that its needs allow."""
    passes, stages = passes_of(schedule), schedule.stages
    turn, place = np.divmod(np.arange(stages), schedule.ranks)  # a rank has one stage of each turn
    home = np.where((turn % 2 == 1) & schedule.v_shaped, schedule.ranks - 1 - place, place)
    forward, onward = passes.kind == FORWARD, np.where(passes.kind == FORWARD, 1, -1)
    passed_on = passes.kind != WEIGHT_GRAD
    source, target = passes.stage - onward, passes.stage + onward

    def elsewhere(stage: Ints) -> Flags:
        there = (stage >= 0) & (stage < stages)
        return np.asarray(passed_on & there & (home[np.clip(stage, 0, stages - 1)] != passes.rank))

    def made_by(stage: Ints) -> Ints:
        return np.asarray((stage * 2 + forward) * schedule.micro_batches + passes.micro_batch)

    needed, sent = np.nonzero(elsewhere(source))[0], np.nonzero(elsewhere(target))[0]
    message = np.full(2 * stages * schedule.micro_batches, -1, dtype=np.intp)
    message[made_by(passes.stage)[sent]] = np.arange(len(sent))
    first = np.searchsorted(passes.action, passes.action, side="left")
    last = np.searchsorted(passes.action, passes.action, side="right") - 1
    slot = 2 * turn[passes.stage] + forward
    coming = message[made_by(source)[needed]]

    def hop(of: Ints, to: Ints) -> Ints:
        return of + np.where(to == (of + 1) % schedule.ranks, 0, schedule.ranks)

    into = hop(home[source[needed]], passes.rank[needed])
    onto = hop(passes.rank[sent], home[target[sent]])
    needs = _ends(passes, needed, first[needed], coming, into, slot[sent][coming])
    sends = _ends(passes, sent, last[sent], np.arange(len(sent)), onto, slot[sent])
    wave = _waves(schedule, passes, needs, sends, len(sent))
    return Waves(passes, wave, needs, sends, messages=len(sent), slots=2 * schedule.stages_per_rank)


def _ends(passes: Passes, made: Ints, at: Ints, message: Ints, hop: Ints, slot: Ints) -> Ends:
    """Return messages that the passes `made` receive or send, by the passes `at` which do so."""
    action = passes.action[made]  # ascending
    number = np.arange(len(action)) - np.searchsorted(action, action, side="left")
    found = np.zeros((3, 1 + int(number.max(initial=0)), len(passes.rank)), dtype=np.intp)
    found[0] = -1
    found[:, number, at] = message, hop, slot
    return Ends(*found)


def _waves(schedule: Schedule, passes: Passes, needs: Ends, sends: Ends, messages: int) -> Ints:
    """Return the wave of every pass: each rank runs its next action as soon as everything it needs has arrived."""
    starts = np.unique(passes.action, return_index=True)[1]
    length = np.diff(np.append(starts, len(passes.action)))
    at = np.searchsorted(passes.rank[starts], np.arange(schedule.ranks), side="left")
    ends = np.searchsorted(passes.rank[starts], np.arange(schedule.ranks), side="right")
    # First wave in which a message has arrived; the last entry stands for no message.
    there = np.full(messages + 1, NOT_YET)
    there[-1] = 0
    need, send = needs.message[:, starts], sends.message[:, starts + length - 1]
    wave, free, now = np.zeros(len(starts), dtype=np.intp), np.zeros(schedule.ranks, dtype=np.intp), 0
    while True:
        ranks = np.nonzero(at < ends)[0]
        if not len(ranks):
            break
        able = np.maximum(there[need[:, at[ranks]]].max(axis=0), free[ranks]) <= now
        ranks = ranks[able]
        if not len(ranks) and (free <= now).all():
            break
        action = at[ranks]
        wave[action], free[ranks] = now, now + length[action]
        there[send[:, action]] = free[ranks]
        there[-1] = 0
        at[ranks] += 1
        now += 1
    return wave[passes.action] + np.arange(len(passes.action)) - starts[passes.action]
