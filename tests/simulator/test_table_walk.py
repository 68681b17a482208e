"""Schedules walked wave by wave, against passes timed one after the other; and the paths that such walks hang on."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from simulator.analytical.table_walk import TableWalk, walk_tables
from simulator.analytical.wave_walk import LONG_AGO, Course, Hops, PassClocks
from simulator.bounds.schedule_bound import DEVICE, longest_paths
from simulator.pipeline.schedule_program import needs
from simulator.pipeline.schedule_walk import table_of
from simulator.pipeline.schedules.registry import SCHEDULES
from simulator.pipeline.schedules.table import Kind

# (ranks, micro batches, stages a rank): as many micro batches as ranks, more, and not a multiple of them.
SHAPES = ((2, 4, 1), (4, 8, 1), (3, 7, 1), (2, 8, 2), (4, 8, 2), (3, 9, 3), (4, 16, 2))
CASES = [
    (name, *shape, paired)
    for name, kind in SCHEDULES.items()
    for shape in SHAPES
    for paired in (False, True)
    if kind.has_stages(shape[2])
    and (not paired or name in {"1F1B", "Interleaved1F1B"})
    and (not kind.rounds or shape[1] % max(1, shape[1] // shape[0]) == 0)
    and (not kind.every_stage or shape[1] >= shape[0] * shape[2])
]


@cache
def table(name, ranks, micro_batches, stages, paired):
    return table_of(name, ranks, micro_batches, stages, lets_go=False, paired=paired)


def passes_of(one):
    """Return (rank, leaf, its action) of every pass, rank after rank."""
    return [
        (rank, leaf, action) for rank, row in enumerate(one.schedule.table) for action in row for leaf in action.leaves
    ]


def timed(one, device_s, hop_s):
    """Return when every pass ends: an action begins when its rank is free and all that it needs has arrived, hop by
    hop; of two passes in one action the second follows the first, and what both make is sent when both have ended.
    """
    schedule, passes = one.schedule, passes_of(one)
    number = {id(leaf): n for n, (_, leaf, _) in enumerate(passes)}
    free, ends, made = [0.0] * schedule.ranks, [0.0] * len(passes), {}
    at = [0] * schedule.ranks
    while any(at[rank] < len(row) for rank, row in enumerate(schedule.table)):
        for rank, row in enumerate(schedule.table):
            while at[rank] < len(row):
                leaves = row[at[rank]].leaves
                coming = [need for leaf in leaves for need in needs(leaf, schedule.stages)]
                coming = [need for need in coming if schedule.rank_of(need[0]) != rank]
                if any(need not in made for need in coming):
                    break
                now = free[rank]
                for need in coming:
                    now = max(now, made[need]) + hop_s[schedule.rank_of(need[0]), rank]
                for leaf in leaves:
                    now += device_s[one.turn_kinds[number[id(leaf)]]]
                    ends[number[id(leaf)]] = now
                for leaf in leaves:
                    kind = Kind.INPUT_GRAD if leaf.kind is Kind.BACKWARD else leaf.kind
                    made[leaf.stage, kind, leaf.micro_batch] = now
                free[rank], at[rank] = now, at[rank] + 1
    return ends


def drawn(one, seed, plans=1):
    """Return the times of each kind of pass and of each hop, and the course of plans that take them."""
    rng = np.random.default_rng(seed)
    ranks = one.schedule.ranks
    device_s, hops = rng.uniform(0.5, 3.0, (len(one.kinds), plans)), rng.uniform(0.0, 0.4, (2, ranks, plans))
    nothing, long_ago = np.zeros(plans), np.full(plans, LONG_AGO)
    passes = [
        PassClocks(
            device_s=seconds,
            kernels_s=seconds,
            host_s=nothing,
            waits_s=long_ago,
            slack_s=nothing,
            lead_s=long_ago,
            drain_s=long_ago,
            sent_s=nothing,
            summed_drain_s=long_ago,
            summed_s=nothing,
            waits_for_traffic=False,
        )
        for seconds in device_s
    ]
    course = Course(table=one, passes=passes, hops=Hops(hops, np.full(hops.shape, 0.1), nothing), begins_s=nothing)
    return device_s, hops, course


def of_pairs(hops, ranks, plan):
    onward = {(rank, (rank + 1) % ranks): hops[0, rank, plan] for rank in range(ranks)}
    return {(rank, (rank - 1) % ranks): hops[1, rank, plan] for rank in range(ranks)} | onward


@pytest.mark.parametrize("case", CASES, ids=str)
def test_waves_take_what_passes_one_after_the_other_take(case):
    one = table(*case)
    device_s, hops, course = drawn(one, seed=len(CASES))
    walk = TableWalk([course])
    walk.run(None)
    ends = timed(one, device_s[:, 0], of_pairs(hops, one.schedule.ranks, 0))
    last = [
        max(end for (rank, _, _), end in zip(passes_of(one), ends, strict=True) if rank == r) for r in range(case[1])
    ]

    assert walk.clocks()[0].compute[:, 0] == pytest.approx(last)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_the_longest_path_takes_as_long_as_the_walk_and_bounds_other_plans(case):
    one = table(*case)
    device_s, hops, course = drawn(one, seed=1, plans=5)
    alone = [drawn_alone(course, plan) for plan in range(5)]
    walk = TableWalk(alone)
    walk.run(None)
    clocks = walk.clocks()
    last = []
    for number, ends in enumerate(clocks):
        last.append(walk.last_pass(int(walk.states_of[number]) + int(ends.compute[:, 0].argmax())))
    paths = longest_paths(walk, last, [DEVICE] * len(last))
    done = [float(ends.compute.max()) for ends in clocks]

    for plan, path in enumerate(paths):
        takes = path.passes[0] @ device_s + np.tensordot(path.hops, hops, axes=2)
        assert takes[plan] == pytest.approx(done[plan])
        assert (takes <= np.array(done) * (1 + 1e-12)).all()


def drawn_alone(course, plan):
    some = slice(plan, plan + 1)
    passes = [
        PassClocks(
            **{
                name: value if isinstance(value := getattr(did, name), bool) else value[some]
                for name in PassClocks.__slots__
            }
        )
        for did in course.passes
    ]
    return Course(table=course.table, passes=passes, hops=course.hops.take(some), begins_s=course.begins_s[some])


def test_tables_walked_together_end_as_each_does_alone(monkeypatch):
    courses = [drawn(table(*case), seed, plans=1 + seed % 4)[2] for seed, case in enumerate(CASES[::5])]
    alone = [walk_tables([course])[0] for course in courses]
    monkeypatch.setattr("simulator.analytical.table_walk.MOST_PASSES", 100)  # long courses are cut, plan by plan
    for one, other in zip(alone, walk_tables(courses), strict=True):
        assert other.compute == pytest.approx(one.compute)
        assert other.waits["contention"] == pytest.approx(one.waits["contention"])
        assert other.waits["bubble"] == pytest.approx(one.waits["bubble"])
