"""What searches share: the leaves of a space that fit its memory, and their variants with lower bounds of the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.search.plan_space.candidates import Nodes
from planner.search.plan_space.collected import Collected, tie_groups
from simulator.analytical.account import walked_together
from simulator.bounds.screening import Screening, SharedBlocks
from simulator.columns.plan_columns import PlanColumns, concatenate, distinct, words
from simulator.columns.plan_table import Floats
from simulator.config.estimate import SURE
from simulator.memory.plan_memory import PlanMemory

NODES_AT_ONCE = 4096  # nodes whose leaves are screened at once: limits memory, and lets a deadline take effect
PLANS_AT_ONCE = 1 << 15  # plans bounded or costed at once
MAX_NEAR_MISSES = 2048  # pipelines that nearly fit, at most

Progress = Callable[[str], None]
Rows = NDArray[np.intp]


class Screened:
    """The leaves of a space that fit its memory, and their variants with lower bounds of the step: what searches for
    plans that need no more than a part of the memory share.
    """

    def __init__(
        self,
        screening: Screening,
        nodes: Nodes,
        recomputes: tuple[str, ...],
        *,
        nearly: float = 1.0,
        deadline: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Screen memory; with `nearly` above one, pipelines that need up to that many times as much are kept, too."""
        self.screening, self.nodes, self.recomputes = screening, nodes, recomputes
        self.expired, self.report = expiry(deadline), progress or ignore
        self.shared = screening.blocks(nodes.columns, recomputes)
        fitting, near, seen = _screen_memory(screening, nodes, self.shared, nearly, self.expired, self.report)
        self.all_nodes_seen = seen == len(nodes)
        nothing = nodes.columns.take(slice(0)), np.empty(0, dtype=np.intp), np.empty((0, 2))
        self.leaves = fitting.concatenated() if len(fitting) else nothing
        self.near = near.concatenated() if len(near) else nothing

    @cached_property
    def bounds(self) -> StepBounds:
        """The variants of the leaves that fit."""
        return StepBounds(self, *_fitting_variants(self.screening, self.nodes, self.shared, self.leaves))

    def near_misses(self, screening: Screening, nearly: float) -> tuple[PlanColumns, Floats]:
        """Return the pipelines that miss a limit by least, and lower bounds of their steps in seconds."""
        parts, limit = [], screening.limit_bytes
        for columns, of_node, held in (self.leaves, self.near):
            need = least_bytes(screening, held)
            rows = np.nonzero((columns.pp > 1) & (need > limit) & (need <= limit * nearly))[0]
            parts.append((columns.take(rows), of_node[rows], need[rows]))
        columns = concatenate([part[0] for part in parts])
        of_node, needed = (np.concatenate([part[n] for part in parts]) for n in (1, 2))
        if not len(columns):
            return columns, np.empty(0)
        rows = np.sort(np.argsort(needed, kind="stable")[:MAX_NEAR_MISSES])
        columns = columns.take(rows)
        return columns, self.screening.plans(columns, self.shared, of_node[rows]).at_least_s()


class StepBounds:
    """Variants, their grids, and lower bounds of their memory and their steps as far as there was time.

    `held` are the bytes that are allocated at least and reserved at least, shape (variants, 2). Of those that were
    `accounted`, `step_s` is the step without what a nearly full allocator costs. Of those that were `judged` by the
    replay of their allocations, `held` is exact, `flush_s` is that cost, and they may or may not fit; `flush_s` of
    others is what it is at least.
    """

    def __init__(self, screened: Screened, variants: PlanColumns, held: Floats, of_node: Rows) -> None:
        self.screening, self.variants, self.held = screened.screening, variants, held
        self.judged = np.zeros(len(variants), dtype=np.bool_)
        self.flush_s = np.zeros(len(variants))
        self.fit_probability = np.ones(len(variants))  # below 0 where it does not fit
        self.grid = grids_of(screened.nodes.columns)[of_node]
        self.table = self.screening.table(variants)
        self.shared = self.screening.blocks(self.table, screened.recomputes)
        self.step_bound = np.full(len(variants), floor_s(self.screening, screened.nodes.columns))
        self._parts, self._any_found = list(batches_of(len(variants))), False
        self.bounded = np.zeros(len(variants), dtype=np.bool_)  # by more than what a device computes
        self.accounted = np.zeros(len(variants), dtype=np.bool_)
        self.walked = variants.pp == 1  # whose bound is that of their schedule's table
        self.step_s = np.zeros(len(variants))

    @cached_property
    def schedule_table(self) -> Rows:
        """A number for each variant, equal for those that go through the same schedule table."""
        table = self.table
        schedule = np.unique(table.schedule, return_inverse=True)[1]
        kept = table.fully_sharded & ~table.keeps_gathered
        piped = table["pp"] > 1
        return distinct(
            table["pp"], table["virtual_stages"], schedule, np.where(piped, table.micro_batches, 0), piped & kept
        )[1]

    @cached_property
    def tie_groups(self) -> Rows:
        """The tie group of each grid."""
        groups = np.zeros(int(self.grid.max(initial=-1)) + 1, dtype=np.intp)
        groups[self.grid] = tie_groups(self.variants)
        return groups

    def may_fit(self, screening: Screening) -> NDArray[np.bool_]:
        """Return which variants fit by all that is known of them."""
        return (least_bytes(screening, self.held) <= screening.limit_bytes) & (self.fit_probability >= screening.sure)

    def doubted(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which of some variants do not surely fit, by their bounds or by a replay cut short, and have not been
        judged since.
        """
        unsure = (self.fit_probability < 1.0) | (self.held[:, 1] > replace(self.screening, sure=SURE).limit_bytes)
        return np.asarray((unsure & ~self.judged)[rows])

    def judge(self, row: int, memory: PlanMemory, sure: float) -> None:
        """Take note of what a variant's replay shows; where that is less than `sure` to fit, of nothing else."""
        if sure and (likely := memory.at_most_likely(sure)) < sure:
            self.fit_probability[row] = likely
            return
        self.fit_probability[row] = memory.fit_probability if memory.fits else -1.0
        self.judged[row] = True
        if memory.fits:
            self.held[row] = memory.peak_bytes, memory.reserved_bytes
            self.flush_s[row] = memory.full_s

    def costs_more(self, row: int, memory: PlanMemory, sure: float) -> bool:
        """Take note of what flushes cost a variant at least that may be `sure` to fit, by the ranks that have been
        replayed; return whether that is more than was known.
        """
        if sure and not memory.may_be(sure):
            return False
        known, self.flush_s[row] = self.flush_s[row], max(self.flush_s[row], memory.least_full_s)
        return bool(self.flush_s[row] > known)

    def account(self, rows: Rows, alike: Rows) -> Rows:
        """Account for some variants and for those `alike` that are walked with them; return them all."""
        both = np.union1d(rows, alike[~self.accounted[alike]])
        some = self.screening.plans(self.table.take(both), self.shared, both)
        if len(both) > len(rows):
            asked, together = np.isin(both, rows), walked_together(some.table, some.context)
            both = both[np.sort(np.concatenate([group for group in together if asked[group].any()]))]
            some = self.screening.plans(self.table.take(both), self.shared, both)
        self.step_s[both] = some.step_s()
        self.accounted[both] = True
        return both

    def walk(self, rows: Rows, limit_s: float) -> None:
        """Raise the bounds of some variants to what their schedules' tables show; above a limit roughly."""
        rows = rows[~self.walked[rows]]
        if len(rows):
            some = self.screening.plans(self.table.take(rows), self.shared, rows)
            self.step_bound[rows] = np.maximum(some.at_least_by_schedule_s(limit_s), self.step_bound[rows])
            self.walked[rows] = True

    def bound(self, rows: Rows, expired: Callable[[], bool]) -> None:
        """Raise the bounds of some variants to what no step can beat, until the time is over."""
        rows = rows[~self.bounded[rows]]
        for part in batches_of(len(rows)):
            mine = rows[part]
            some = self.screening.plans(self.table.take(mine), self.shared, mine)
            self.step_bound[mine] = np.maximum(some.at_least_s(), self.step_bound[mine])
            self.bounded[mine] = True
            if expired():
                break

    def find(self, expired: Callable[[], bool], report: Progress) -> None:
        """Bound all variants by what a device computes, until the time is over; in any case the first part."""
        while self._parts and not (self._any_found and expired()):
            part = self._parts.pop(0)
            some = self.screening.plans(self.table.take(part), self.shared, part)
            self.step_bound[part] = np.maximum(some.computes_at_least_s(), self.step_bound[part])
            self._any_found = True
            report(f"bounded {part[-1] + 1:,} of {len(self.variants):,} plans that fit")


def _screen_memory(
    screening: Screening,
    nodes: Nodes,
    shared: SharedBlocks,
    nearly: float,
    expired: Callable[[], bool],
    report: Progress,
) -> tuple[Collected, Collected, int]:
    """Return the leaves that fit, the pipelines that need up to `nearly` times the memory, and the nodes looked at."""
    fitting, near_misses = Collected(), Collected()
    capacity = screening.limit_bytes
    least_saved = shared.keeping_least(screening.operators.spec.recompute)
    seen = 0
    # A batch takes every so many nodes, so that a search cut short has seen some of everything.
    batches = -(-len(nodes) // NODES_AT_ONCE)
    for number in range(batches):
        rows = np.arange(number, len(nodes), batches)
        # Skip nodes on which nothing fits, even with the leanest recomputation and resharding.
        trial = nodes.columns.take(rows)
        lowest = least_bytes(screening, screening.plans(trial, least_saved, rows).allocated_and_reserved_bytes())
        limit = capacity * np.where(trial.pp > 1, nearly, 1.0)
        leaves, of_node = nodes.leaves(rows[lowest <= limit])
        held = _held(screening, leaves, shared, of_node)
        need = least_bytes(screening, held)
        fit = np.nonzero(need <= capacity)[0]
        if len(fit):
            fitting.add(leaves.take(fit), of_node[fit], held[fit])
        miss = np.nonzero((need > capacity) & (need <= capacity * nearly) & (leaves.pp > 1))[0]
        if len(miss):
            near_misses.add(leaves.take(miss), of_node[miss], held[miss])
        seen += len(rows)
        report(f"memory of {seen:,} of {len(nodes):,} nodes")
        if expired() and len(fitting):
            break
    return fitting, near_misses, seen


def _held(screening: Screening, leaves: PlanColumns, shared: SharedBlocks, of_node: Rows) -> Floats:
    """Return the bytes that leaves allocate and reserve, shape (leaves, 2): one recompute mode after the other, as what
    is counted mode by mode has one of them then. Leaves that differ in nothing else share the rest.
    """
    held = np.zeros((len(leaves), 2))
    plans, known = None, np.empty((2, 0))
    for mode in words(leaves.recompute):
        rows = np.nonzero(leaves.recompute == mode)[0]
        for part in batches_of(len(rows)):
            mine = rows[part]
            but_mode = np.stack([of_node[mine], leaves.reshard_after_forward[mine]])
            if plans is None or not np.array_equal(known, but_mode):
                plans, known = screening.plans(leaves.take(mine), shared, of_node[mine]), but_mode
            held[mine] = plans.under(mode)
    return held


def _fitting_variants(
    screening: Screening, nodes: Nodes, shared: SharedBlocks, fitting: tuple[PlanColumns, Rows, Floats]
) -> tuple[PlanColumns, Floats, Rows]:
    """Return the variants of all leaves that fit, the bytes they allocate and reserve, and the node of each."""
    leaves, of_node, held = fitting
    variants, of_leaf = nodes.variants(leaves, of_node)
    held, of_node = held[of_leaf], of_node[of_leaf]
    # Leaves do not overlap communication yet: variants that do need symmetric memory as well.
    overlapping = np.nonzero(variants.tp_overlap != "none")[0]
    for part in batches_of(len(overlapping)):
        rows = overlapping[part]
        held[rows] = screening.plans(variants.take(rows), shared, of_node[rows]).allocated_and_reserved_bytes()
    fit = np.nonzero(least_bytes(screening, held) <= screening.limit_bytes)[0]
    return variants.take(fit), held[fit], of_node[fit]


def least_bytes(screening: Screening, held: Floats) -> Floats:
    """Return the column of `held` (allocated, reserved; shape (plans, 2)) to compare with the memory limit."""
    return np.asarray(held[:, int(screening.sure > 0)])


def grids_of(columns: PlanColumns) -> Rows:
    """Return a number for each plan, equal for plans of equal degrees."""
    return distinct(
        columns.dp_replicate, columns.dp_shard, columns.tp, columns.cp, columns.pp, columns.ep, columns.etp
    )[1]


def floor_s(screening: Screening, plans: PlanColumns) -> float:
    """Return seconds that no plan can beat: the model's FLOP at the dense peak rate of all GPUs (datasheet)."""
    workload = screening.scenario.workload
    flops = screening.scenario.model.training_flops_per_token(workload.seq_len, causal=True) * workload.tokens_per_step
    return flops / (screening.peak_flops * float(plans.gpus.max()))


def batches_of(count: int) -> Iterator[Rows]:
    for start in range(0, count, PLANS_AT_ONCE):
        yield np.arange(start, min(start + PLANS_AT_ONCE, count))


def expiry(deadline: float | None) -> Callable[[], bool]:
    return lambda: deadline is not None and time.monotonic() > deadline


def never() -> bool:
    """Return that the time is not over."""
    return False


def ignore(_text: str) -> None:
    """Report no progress."""
