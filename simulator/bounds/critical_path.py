"""The critical path through a schedule's table: the passes, messages and collectives that decide its length.

They happen one after the other on a path, so the sum of their times is a lower bound of the step for every plan with
that table. The longest path of one plan is nearly the longest for similar plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.analytical.table_walk import TableWalk
from simulator.columns.plan_table import Floats
from simulator.pipeline.waves import Ints

# What of a pass can be on a path: its time on the device, that by which it follows its first gather, the rest of its
# collectives after it, or all of them, on the stream of shards and on that of sums over replicas.
TIMES = ("device_s", "lead_s", "drain_s", "sent_s", "summed_drain_s", "summed_s")
# What is reached first, going back from the end: the end of a pass on the device, or the end of a stream's collectives.
DEVICE, SHARDS, REPLICAS = range(3)


@dataclass(frozen=True, slots=True)
class Path:
    """How often a path contains each time of each kind of pass of its table, shape (TIMES, kinds), and each hop; the
    latter has shape (2, ranks), as in `Hops`.
    """

    passes: Floats
    hops: Floats


def longest_paths(walk: TableWalk, last: Sequence[int], ends: Sequence[int]) -> list[Path]:
    """Return, for each course, the critical path to the end of its `last` pass (an index into all passes) on the device
    or, as `ends` says, of the collectives up to that pass on a stream.

    Every course must have been walked with one plan whose hosts take no time.
    """
    count, waited_for_gather = len(walk.state), _led(walk)
    before, time, hops = _waited_for(walk)
    visited, now = [], np.array(last) + count * np.array(ends)
    while (now >= 0).any():
        visited.append(now)
        now = np.where(now >= 0, before[now], -1)
    paths = []
    for course, first_hop, every in zip(walk.courses, walk.hops_of.tolist(), np.array(visited).T, strict=True):
        visits = every[every >= 0]
        places, kinds = visits % count, len(course.table.kinds)
        passes = np.zeros((len(TIMES), kinds))
        on_device = visits < count
        led = places[on_device & waited_for_gather[places]]
        for row, some in ((0, places[on_device]), (1, led)):
            passes[row] = np.bincount(walk.kind[some], minlength=kinds)
        sent = visits[~on_device]
        np.add.at(passes, (time[sent], walk.kind[sent % count]), 1.0)
        shape = course.hops.seconds.shape[:2]
        mine = np.concatenate([some[places[on_device]] for some in hops])
        times = np.bincount(mine[mine >= 0] - first_hop, minlength=shape[0] * shape[1])
        paths.append(Path(passes, times.reshape(shape).astype(np.float64)))
    return paths


def _led(walk: TableWalk) -> NDArray[np.bool_]:
    """Return which passes began when their first gather allowed."""
    return walk.waited["dp"] > 0.0


def _waited_for(walk: TableWalk) -> tuple[Ints, Ints, list[Ints]]:
    """Return what each pass and the streams after it waited for: a pass or, counted from as many further on for each,
    the streams after a pass (-1: nothing); which of TIMES the streams took; and the hops of messages that passes waited
    for.
    """
    count, led = len(walk.state), _led(walk)
    previous = np.full(count, -1, dtype=np.intp)
    order = np.argsort(walk.state, kind="stable")
    same = walk.state[order[1:]] == walk.state[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    sender = np.full(walk.messages + 2, -1, dtype=np.intp)
    for sends in walk.sends:
        sender[sends.message] = np.arange(count)
    on_device = previous.copy()
    hops: list[Ints] = []
    for needs in walk.needs:
        came = (needs.waited > 0.0) & ~led
        on_device[came] = sender[needs.message[came]]
        for earlier in hops:
            earlier[came] = -1
        hops.append(np.where(led, -1, needs.hop))

    def after_others(stream: int) -> Ints:
        return np.where(previous >= 0, previous + stream * count, -1)

    on_device = np.where(led, after_others(SHARDS), on_device)
    streams = [
        np.where(drained, np.arange(count), after_others(stream))
        for stream, drained in zip((SHARDS, REPLICAS), walk.drained, strict=True)
    ]
    time = np.concatenate([np.zeros(count), *(np.where(d, 2, 3) + 2 * n for n, d in enumerate(walk.drained))])
    return np.concatenate([on_device, *streams]), time.astype(np.intp), hops
