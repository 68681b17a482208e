"""Branch and bound over legal plans: every one is bounded, few are costed whole, and the best is proved best.

The tree is `planner.candidates`: grid, batch and schedule make a node, policies its leaves. Three true bounds cut it, in
the order of their price:

    memory      what the worst rank reserves is no function of time: a leaf that does not fit is gone with all its variants
    at least    micro batches on the slowest rank, bubble, host and optimizer: the step without data-parallel traffic
    best so far leaves are costed whole in the order of that bound, until it passes the last plan that is to be listed

Everything is vectorised over leaves (`simulator.screening`), so the order of the work depends on no clock and no number
of workers. How many plans are costed at once decides how much is costed in vain and nothing else: what is returned
follows from each plan's own values and those of the last plan to list. With a deadline, what is left unexplored is
bounded from below by the model's FLOPs at the GPUs' peak, which no plan can beat; the gap says how far the answer may be
from the best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.candidates import Nodes
from simulator.plan_columns import PlanColumns, distinct, joined
from simulator.plan_table import Floats
from simulator.screening import Screening
from simulator.stages import COUNTED_OUT

NODES = 4096  # nodes whose leaves are screened at once: bounds memory, and gives a deadline something to cut
LEAVES = 1 << 15  # plans bounded or costed at once
FIRST = 256  # plans costed whole at first; the best of them bounds the rest
MISSED = 2048  # pipelines that nearly fit, at most
COUNTED = 64  # plans whose schedule is counted out at once
# How much slower than the last plan to list a pipeline may be as the runtime splits it, to be worth filling: layers that
# suit its stages took 7 % off at most in the searches of tests/bench/search_cost.py, mostly less than 2.
REACH = 0.05

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """Plans costed whole, and the account of the others.

    Rows are the plans that had to be costed whole and fit. `fitting` leaves were not shown to need too much memory; those
    of them without a row cannot be among the plans to list. `bound` is a lower bound of the objective (seconds, or bytes
    for memory) over all legal plans that fit; without a deadline it is that of the best plan. `floor_s` bounds the step
    of them all, whatever the objective. `near` are pipelines that other stages than the runtime's may bring into the list,
    with their steps: a little too slow for it, or short of fitting by little; only where they were asked for.
    """

    columns: PlanColumns
    step_s: Floats
    reserved_bytes: Floats
    legal: int
    fitting: int
    bound: float
    floor_s: float
    complete: bool
    near: PlanColumns
    near_s: Floats

    def __len__(self) -> int:
        return len(self.step_s)


def explore(
    screening: Screening,
    nodes: Nodes,
    recomputes: tuple[str, ...],
    *,
    objective: str = "time",
    keep: int = 1,
    one_per_grid: bool = True,
    deadline: float | None = None,
    progress: Progress | None = None,
    nearly: float = 1.0,
) -> Explored:
    """Return every plan that could be among the `keep` best, costed whole.

    `objective` is time, memory or pareto (the plans that no other beats in both). `one_per_grid`: the `keep` best are
    of different degrees. `deadline` is a reading of `time.monotonic`. With `nearly` above one, pipelines that come near the
    list are returned as well, among them those that need up to that many times the memory there is.
    """
    say = progress or _silent
    expired = _clock(deadline)
    fitting, missed = _Rows(), _Rows()
    capacity = screening.capacity_bytes
    seen = 0
    legal = int(nodes.policies.sum())
    shared = screening.blocks(nodes.columns, recomputes)
    lean, kept_least = nodes.with_recompute("none"), shared.keeping_least()
    # Every so many nodes make a chunk, so that a search cut short has seen some of everything.
    chunks = -(-len(nodes) // NODES)
    for number in range(chunks):
        rows = np.arange(number, len(nodes), chunks)
        # A node on which not even the leanest of its recomputations would fit, at the price of none, has no leaf to see.
        trial, of_node = lean.leaves(rows)
        lowest = screening.plans(trial, kept_least, of_node).reserved_bytes(at_least=True)
        reach = capacity * np.where(nodes.columns.pp[of_node] > 1, nearly, 1.0)
        leaves, of_node = nodes.leaves(np.unique(of_node[lowest <= reach]))
        for part in _parts(len(leaves)):
            some, mine = leaves.take(part), of_node[part]
            reserved = screening.plans(some, shared, mine).reserved_bytes(at_least=True)
            fit = np.nonzero(reserved <= capacity)[0]
            if len(fit):
                fitting.add(some.take(fit), mine[fit], reserved[fit])
            miss = np.nonzero((reserved > capacity) & (reserved <= capacity * nearly) & (some.pp > 1))[0]
            if len(miss):
                missed.add(some.take(miss), mine[miss], reserved[miss])
        seen += len(rows)
        say(f"memory of {seen:,} of {len(nodes):,} nodes")
        if expired() and len(fitting):
            break
    near, near_s = nodes.columns.take(slice(0)), np.empty(0)
    if len(missed):
        near, of_node, reserved = missed.joined()
        least = np.sort(np.argsort(reserved, kind="stable")[:MISSED])
        near = near.take(least)
        short = screening.plans(near, shared, of_node[least])
        near_s = short.step_s() + short.flush_s(reserved[least])
    if not len(fitting):
        return Explored(
            columns=nodes.columns.take(slice(0)),
            step_s=np.empty(0),
            reserved_bytes=np.empty(0),
            legal=legal,
            fitting=0,
            bound=np.inf,
            floor_s=floor_s(screening, nodes.columns),
            complete=True,
            near=near,
            near_s=near_s,
        )
    leaves, of_node, reserved = fitting.joined()
    variants, of_leaf = nodes.variants(leaves, of_node)
    reserved, of_node = reserved[of_leaf], of_node[of_leaf]
    # A leaf overlaps nothing yet: variants that do hold symmetric memory besides, and may not fit for it.
    overlapping = np.nonzero(variants.tp_overlap != "none")[0]
    for part in _parts(len(overlapping)):
        rows = overlapping[part]
        reserved[rows] = screening.plans(variants.take(rows), shared, of_node[rows]).reserved_bytes(at_least=True)
    fit = np.nonzero(reserved <= capacity)[0]
    variants, reserved, of_node = variants.take(fit), reserved[fit], of_node[fit]
    return _best_first(
        screening,
        variants,
        reserved,
        grids_of(nodes.columns)[of_node],
        recomputes,
        objective=objective,
        keep=keep,
        one_per_grid=one_per_grid,
        legal=legal,
        short=(near, near_s) if nearly > 1.0 else None,
        whole=seen == len(nodes),
        expired=expired,
        say=say,
    )


def grids_of(columns: PlanColumns) -> NDArray[np.intp]:
    """Return a number for each plan, the same for plans of the same degrees."""
    return distinct(columns.dp_replicate, columns.dp_shard, columns.tp, columns.cp, columns.pp, columns.ep)[1]


def _best_first(
    screening: Screening,
    variants: PlanColumns,
    reserved: Floats,
    grid: NDArray[np.intp],
    recomputes: tuple[str, ...],
    *,
    objective: str,
    keep: int,
    one_per_grid: bool,
    legal: int,
    short: tuple[PlanColumns, Floats] | None,
    whole: bool,
    expired: Callable[[], bool],
    say: Progress,
) -> Explored:
    """Bound all `variants`, then cost them whole in the order of the bound until it passes what is found.

    `short` are pipelines that fall short of fitting by little, and their steps; None where none are to be filled.
    """
    table = screening.table(variants)
    shared = screening.blocks(table, recomputes)
    at_least = np.full(len(variants), floor_s(screening, variants))
    for done, part in enumerate(_parts(len(variants))):
        some = screening.plans(table.take(part), shared, part)
        at_least[part] = np.maximum(some.at_least_s(), at_least[part])
        say(f"bounded {part[-1] + 1:,} of {len(variants):,} plans that fit")
        if expired() and done:
            break
    bound = reserved if objective == "memory" else at_least
    left = np.argsort(bound, kind="stable")
    seconds, step, exact = np.zeros(len(variants)), np.full(len(variants), np.inf), reserved.copy()
    counted = np.isin(variants.schedule, COUNTED_OUT)  # whose memory is only bounded so far
    costed = np.zeros(len(variants), dtype=np.bool_)
    best = _Threshold(keep, one_per_grid=one_per_grid, grids=int(grid.max()) + 1)
    size = FIRST
    while len(left):
        rows = left[:size]
        if objective == "pareto":
            left = _undominated(left, at_least, reserved, step, exact)
            rows = left[:size]
        elif bound[rows[-1]] > best.value:
            rows = rows[bound[rows] <= best.value]
        if not len(rows):
            break
        some = screening.plans(table.take(rows), shared, rows)
        seconds[rows] = some.step_s() + some.flush_s(reserved[rows])
        sure = rows[~counted[rows]]
        step[sure] = seconds[sure]
        best.add(grid[sure], exact[sure] if objective == "memory" else step[sure])
        # Counting a schedule out is dear: quickest first, and not at all for plans that have lost by then.
        unsure = rows[counted[rows]]
        unsure = unsure[np.argsort((reserved if objective == "memory" else seconds)[unsure], kind="stable")]
        for few in np.array_split(unsure, -(-len(unsure) // COUNTED)) if len(unsure) else ():
            if objective == "time" and seconds[few[0]] > best.value:
                break
            some = screening.plans(table.take(few), shared, few)
            exact[few] = some.reserved_bytes()
            more = some.flush_s(exact[few]) - some.flush_s(reserved[few])
            step[few] = np.where(exact[few] <= screening.capacity_bytes, seconds[few] + more, np.inf)
            values = exact[few] if objective == "memory" else step[few]
            best.add(grid[few], np.where(np.isfinite(step[few]), values, np.inf))
        costed[rows] = True
        left = left[len(rows) :]
        size = min(2 * size, LEAVES // 8)
        say(f"costed {costed.sum():,} of {len(variants):,} plans that fit")
        if expired() and np.isfinite(step).any():
            break
    # Plans costed in vain are left out: which those are depends on how many were costed at once.
    needed = bound <= best.value
    if objective == "pareto":
        left = _undominated(left, at_least, reserved, step, exact)
        needed = np.isin(
            np.arange(len(variants)), _undominated(np.arange(len(variants)), at_least, reserved, step, exact)
        )
    elif objective == "time":
        needed &= ~costed | (seconds <= best.value)
    found = np.nonzero(needed & np.isfinite(step))[0]
    finished = whole and (not len(left) or (objective != "pareto" and bound[left[0]] > best.value))
    unexplored = float(bound[left[0]]) if len(left) else np.inf
    if not whole:
        unexplored = 0.0 if objective == "memory" else floor_s(screening, variants)
    least = (exact if objective == "memory" else step)[found].min() if len(found) else np.inf
    near, near_s = variants.take(slice(0)), np.empty(0)
    if short is not None and (objective == "time" or not len(found)):
        reach_s = best.value * (1 + REACH) if objective == "time" else np.inf
        left = left[(variants.pp[left] > 1) & (bound[left] <= reach_s)]
        for part in _parts(len(left)):
            if expired():
                break
            rows = left[part]
            some = screening.plans(table.take(rows), shared, rows)
            seconds[rows] = some.step_s() + some.flush_s(reserved[rows])
            costed[rows] = True
        within = np.nonzero(costed & (variants.pp > 1) & (seconds <= reach_s))[0]
        almost = np.nonzero(short[1] <= reach_s)[0]
        near = joined([variants.take(within), short[0].take(almost)])
        near_s = np.concatenate([seconds[within], short[1][almost]])
    return Explored(
        columns=variants.take(found),
        step_s=step[found],
        reserved_bytes=exact[found],
        legal=legal,
        fitting=len(variants) - int((needed & (exact > screening.capacity_bytes)).sum()),
        bound=float(min(least, unexplored)),
        floor_s=float(at_least.min()) if whole else floor_s(screening, variants),
        complete=bool(finished),
        near=near,
        near_s=near_s,
    )


def floor_s(screening: Screening, plans: PlanColumns) -> float:
    """Return seconds that no plan can beat: the model's FLOPs at the dense peak of all the GPUs."""
    workload = screening.workload
    flops = 3.0 * screening.model.forward_flops_per_token(workload.seq_len) * workload.tokens_per_step
    return flops / (screening.peak_flops * float(plans.gpus.max()))


class _Threshold:
    """The value of the last plan to list so far: infinite until there are enough."""

    def __init__(self, keep: int, *, one_per_grid: bool, grids: int) -> None:
        self._keep, self._one_per_grid = keep, one_per_grid
        self._best = np.full(grids if one_per_grid else 0, np.inf)

    def add(self, grid: NDArray[np.intp], values: Floats) -> None:
        if self._one_per_grid:
            np.minimum.at(self._best, grid, values)
        else:
            self._best = np.sort(np.concatenate([self._best, values]))[: self._keep]

    @property
    def value(self) -> float:
        if len(self._best) < self._keep:
            return float("inf")
        return float(np.partition(self._best, self._keep - 1)[self._keep - 1])


def _undominated(
    rows: NDArray[np.intp], at_least: Floats, reserved: Floats, step: Floats, exact: Floats
) -> NDArray[np.intp]:
    """Return those of `rows` that no costed plan beats in both time and memory, whatever they turn out to take."""
    known = np.nonzero(np.isfinite(step))[0]
    if not len(known):
        return rows
    known = known[np.argsort(exact[known], kind="stable")]
    quickest = np.minimum.accumulate(step[known])
    # The quickest costed plan that needs no more memory than this one at least does. One as good in both beats nothing:
    # of equals the first is listed, whichever was costed first.
    position = np.searchsorted(exact[known], reserved[rows], side="right") - 1
    beaten = (position >= 0) & (quickest[np.maximum(position, 0)] < at_least[rows])
    position = np.searchsorted(exact[known], reserved[rows], side="left") - 1
    beaten |= (position >= 0) & (quickest[np.maximum(position, 0)] <= at_least[rows])
    return rows[~beaten]


def pareto_rows(step_s: Floats, reserved_bytes: Floats) -> list[int]:
    """Return the plans that no other beats in both, quickest first; of equals the first."""
    order = np.lexsort((np.arange(len(step_s)), reserved_bytes, step_s))
    rows, least = [], np.inf
    for row in order:
        if np.isfinite(step_s[row]) and reserved_bytes[row] < least:
            rows.append(int(row))
            least = float(reserved_bytes[row])
    return rows


class _Rows:
    """Columns collected chunk by chunk, in the order of the nodes once joined."""

    def __init__(self) -> None:
        self._columns: list[PlanColumns] = []
        self._nodes: list[NDArray[np.intp]] = []
        self._values: list[Floats] = []

    def __len__(self) -> int:
        return len(self._columns)

    def add(self, columns: PlanColumns, nodes: NDArray[np.intp], values: Floats) -> None:
        self._columns.append(columns)
        self._nodes.append(nodes)
        self._values.append(values)

    def joined(self) -> tuple[PlanColumns, NDArray[np.intp], Floats]:
        nodes = np.concatenate(self._nodes)
        order = np.argsort(nodes, kind="stable")
        return joined(self._columns).take(order), nodes[order], np.concatenate(self._values)[order]


def _parts(count: int) -> Iterator[NDArray[np.intp]]:
    for start in range(0, count, LEAVES):
        yield np.arange(start, min(start + LEAVES, count))


def _clock(deadline: float | None) -> Callable[[], bool]:
    return lambda: deadline is not None and time.monotonic() > deadline


def _silent(_text: str) -> None:
    """Say nothing."""
