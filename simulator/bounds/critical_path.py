"""The critical path through a schedule's table: the passes and messages that decide its length.

Passes and messages on a path happen one after the other, so the sum of their times is a lower bound of the step for
every plan with that table. The longest path of one plan is nearly the longest for similar plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.analytical.table_walk import TableWalk
from simulator.columns.plan_table import Floats
from simulator.pipeline.waves import Ints


@dataclass(frozen=True, slots=True)
class Path:
    """How often a path contains each kind of pass of its table, and each hop; the latter has shape (2, ranks), as in
    `Hops`.
    """

    passes: Floats
    hops: Floats


def longest_paths(walk: TableWalk, last: Sequence[int]) -> list[Path]:
    """Return, for each course, the critical path that ends with its `last` pass (an index into all passes).

    Every course must have been walked with one plan whose hosts take no time.
    """
    before, hops = _waited_for(walk)
    visited, now = [], np.array(last)
    while (now >= 0).any():
        visited.append(now)
        now = np.where(now >= 0, before[now], -1)
    paths = []
    for course, first_hop, visits in zip(walk.courses, walk.hops_of.tolist(), np.array(visited).T, strict=True):
        places = visits[visits >= 0]
        passes = np.bincount(walk.kind[places], minlength=len(course.table.kinds))
        shape = course.hops.seconds.shape[:2]
        mine = np.concatenate([some[places] for some in hops])
        times = np.bincount(mine[mine >= 0] - first_hop, minlength=shape[0] * shape[1])
        paths.append(Path(passes.astype(np.float64), times.reshape(shape).astype(np.float64)))
    return paths


def _waited_for(walk: TableWalk) -> tuple[Ints, list[Ints]]:
    """Return the pass that each pass waited for (-1 for the first), and the hops of the messages in between."""
    count = len(walk.state)
    before = np.full(count, -1, dtype=np.intp)
    order = np.argsort(walk.state, kind="stable")
    same = walk.state[order[1:]] == walk.state[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    sender = np.full(walk.messages + 2, -1, dtype=np.intp)
    for sends in walk.sends:
        sender[sends.message] = np.arange(count)
    hops: list[Ints] = []
    for needs in walk.needs:
        came = needs.waited > 0.0
        before[came] = sender[needs.message[came]]
        for earlier in hops:
            earlier[came] = -1
        hops.append(needs.hop)
    return before, hops
