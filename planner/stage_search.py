"""Layers to stages and recomputation stage by stage, exactly, for one pipeline.

Given which rank is the slowest and what it holds, the closed form's step is monotone in two numbers of the others: the
sum of their seconds (the bubble) and the most parameters that any owns (the optimizer). Least sums over chains of stages
are a shortest path over (stage, layers so far), so dynamic programming finds them exactly and faster than a solver for
integer programs would state them; memory only takes edges out. Every slowest rank, and every cap on parameters that
changes anything, gives one candidate; the closed form itself picks the best of them.

Covered are schedules with one stage a rank (1F1B, GPipe), layers and recomputation; and those that loop (interleaved 1F1B,
breadth first), recomputation only, one mode a rank, layers as the runtime splits them. Zero-bubble schedules are left as
they are: there a longer pass can make the formula's bubble smaller, and sums decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.costs import cost_table
from planner.frameworks import Framework
from simulator.data_parallel import rank_update_bytes
from simulator.memory import memory_columns
from simulator.plan import Plan
from simulator.plan_columns import plan_columns
from simulator.plan_table import Floats
from simulator.runtime_library import canonical_recompute
from simulator.screening import Screening
from simulator.stages import StageLayout, stage_layout
from simulator.step_cost import RankSum, rank_seconds

SINGLE = ("1F1B", "GPipe")
LOOPED = ("Interleaved1F1B", "LoopedBFS")


def best_stages(
    screening: Screening, framework: Framework, plan: Plan, step_s: float, recomputes: Sequence[str]
) -> tuple[Plan, float]:
    """Return `plan` with the layers and recomputation of its stages that make the step shortest, and that step.

    `step_s` is what it takes as it is; where nothing is shorter it comes back unchanged. `recomputes` are the modes to
    choose from where the framework can tell stages apart; else the plan's own is kept.
    """
    single, looped = plan.schedule in SINGLE, plan.schedule in LOOPED
    modes = tuple(recomputes) if framework.lists_recompute else (plan.recompute,)
    free = single and framework.lists_layers
    if plan.pp == 1 or not (single or looped) or (not free and len(modes) == 1):
        return plan, step_s
    problem = _problem(screening, plan, modes, free=free)
    found = [problem.plan(chain) for chain in dict.fromkeys(problem.candidates(step_s))]
    if not found:
        return plan, step_s
    s = screening
    table = cost_table(s.model, s.cluster, s.workload, found, s.runtime, s.profile)
    steps = np.where(table.fits, table.step_s, np.inf)
    best = int(np.argmin(steps))
    return (found[best], float(steps[best])) if steps[best] < step_s else (plan, step_s)


Chain = tuple[tuple[int, int], ...]  # (layers, mode) of every rank, first to last


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """What every rank could hold. Arrays have the axes (rank, layers, dense layers among them, mode).

    `seconds` of one micro batch, infinite where it does not fit or is not to be tried; `device` without the host;
    `owned` parameters of the optimizer. `leading` layers of the network are dense where others are not.
    """

    given: Plan
    modes: tuple[str, ...]
    layers: int
    leading: int
    micro_batches: float
    seconds: Floats
    device: Floats
    owned: Floats
    fixed: tuple[tuple[int, int], ...]  # (layers, dense) of each rank where layers are not free
    second_per_owned: float

    def dense(self, start: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of `count` layers from `start` on are dense ones of the beginning; 0 where all are of one kind."""
        return np.clip(self.leading - start, 0, count)

    def plan(self, chain: Chain) -> Plan:
        """Return the plan in which ranks hold what `chain` says."""
        words = [self.modes[mode] for _, mode in chain]
        plan = self.given
        if not self.fixed:
            plan = replace(plan, layers_per_stage=tuple(count for count, _ in chain))
        if len(set(words)) == 1:
            return replace(plan, recompute=words[0])
        return replace(plan, recompute_per_stage=tuple(words) * plan.virtual_stages)

    def candidates(self, step_s: float) -> Iterator[Chain]:
        """Yield, for every slowest rank and cap on parameters, the chain with the shortest bubble."""
        everything = np.min(self.seconds, axis=3)
        free = self._chain(everything, np.argmin(self.seconds, axis=3))
        if free is None:
            return
        least = free[1]
        for index in np.argwhere(np.isfinite(self.seconds)):
            rank, count, dense, mode = map(int, index)
            mine = self.seconds[rank, count, dense, mode]
            # True whatever the others hold: this rank's device, and the bubble of the least that they can take.
            if self.micro_batches * self.device[rank, count, dense, mode] + least - mine >= step_s:
                continue
            # The first of equals is the slowest: ranks before it must be quicker.
            ranks = np.arange(self.seconds.shape[0])[:, None, None, None]
            allowed = np.where(ranks < rank, self.seconds < mine, self.seconds <= mine)
            own = np.zeros_like(allowed)
            own[rank, count, dense, mode] = True
            allowed = np.where(ranks == rank, own, allowed)
            cap = np.inf
            while True:
                usable = np.where(allowed & (self.owned[..., None] < cap), self.seconds, np.inf)
                found = self._chain(np.min(usable, axis=3), np.argmin(usable, axis=3))
                if found is None:
                    break
                chain, _, most = found
                yield chain
                if self.second_per_owned * (most - self.owned[rank, count, dense]) <= 0:
                    break  # this rank owns most itself: no cap makes the optimizer quicker
                cap = most

    def _chain(self, seconds: Floats, mode: NDArray[np.intp]) -> tuple[Chain, float, float] | None:
        """Return (the chain with the least sum of seconds, the sum, most parameters owned); None without any.

        `seconds` and `mode` have the axes (rank, layers, dense).
        """
        ranks, width = seconds.shape[0], seconds.shape[1]
        if self.fixed:
            picked = [(count, dense, int(mode[r, count, dense])) for r, (count, dense) in enumerate(self.fixed)]
            total = sum(float(seconds[r, count, dense]) for r, (count, dense, _) in enumerate(picked))
            if not np.isfinite(total):
                return None
            most = max(float(self.owned[r, count, dense]) for r, (count, dense, _) in enumerate(picked))
            return tuple((count, which) for count, _, which in picked), total, most
        totals = np.arange(self.layers + 1)[:, None]
        counts = np.arange(width)[None, :]
        starts = totals - counts  # layers before a rank that holds `counts` and ends at `totals`
        dense = self.dense(np.maximum(starts, 0), np.broadcast_to(counts, starts.shape))
        least = np.full(self.layers + 1, np.inf)
        least[0] = 0.0
        taken = np.zeros((ranks, self.layers + 1), dtype=np.int64)
        for rank in range(ranks):
            before = np.where(starts >= 0, least[np.maximum(starts, 0)], np.inf)
            paths = before + seconds[rank][np.broadcast_to(counts, starts.shape), dense]
            taken[rank] = np.argmin(paths, axis=1)
            least = np.min(paths, axis=1)
        if not np.isfinite(least[self.layers]):
            return None
        end, chain, most = self.layers, [], 0.0
        for rank in reversed(range(ranks)):
            count = int(taken[rank, end])
            among = int(self.dense(np.array(end - count), np.array(count)))
            chain.append((count, int(mode[rank, count, among])))
            most = max(most, float(self.owned[rank, count, among]))
            end -= count
        return tuple(reversed(chain)), float(least[self.layers]), most


def _problem(screening: Screening, plan: Plan, modes: tuple[str, ...], *, free: bool) -> _Problem:
    """Cost everything that any rank of a pipeline could hold: the closed form's own sums, with an option a column."""
    model = screening.model
    bare = replace(plan, layers_per_stage=(), recompute_per_stage=(), placement=())
    columns = plan_columns([bare])
    shared = screening.blocks(columns, modes)
    one = screening.plans(columns, shared, np.zeros(1, dtype=np.intp))
    operators, context, parameters = one.operators, one.context, one.parameters
    leading = model.moe.dense_layers if model.moe else 0
    fixed: tuple[tuple[int, int], ...] = ()
    if free:
        widest = model.layers - (plan.pp - 1)
    else:
        held = stage_layout(model, one.table, operators.spec.pipeline)
        dense, moe = held.dense[0], held.moe[0]
        fixed = tuple((int(d + e), int(d) if model.moe else 0) for d, e in zip(dense, moe, strict=True))
        widest = max(count for count, _ in fixed)
        leading = max((among for _, among in fixed), default=0)
    shape = (plan.pp, widest + 1, leading + 1, len(modes))
    rank, count, among, mode = (index.ravel() for index in np.indices(shape))
    possible = (count >= 1) & (among <= count)
    layout = _options(screening, plan, modes, rank, count, among, mode)
    ranks = rank_seconds(
        RankSum(layout=layout, table=one.table, blocks=one.blocks, has_moe=model.moe is not None), operators.spec
    )
    memory = memory_columns(model, operators, context, layout, one.blocks, parameters)
    fits = possible & (memory.reserved_bytes[0] <= screening.capacity_bytes)
    parts, experts = parameters.of_stage(layout)
    updated = rank_update_bytes(context, parts, experts)
    device = sum(ranks.device.values(), np.zeros(layout.dense.shape))[0]
    seconds = np.where(fits, (ranks.forward + ranks.backward)[0], np.inf)
    return _Problem(
        given=bare,
        modes=modes,
        layers=model.layers,
        leading=leading,
        micro_batches=float(one.table.micro_batches[0]),
        seconds=seconds.reshape(shape),
        device=device.reshape(shape),
        owned=updated[0].reshape(shape)[..., 0],
        fixed=fixed,
        second_per_owned=1.0 / context.roofline.update_bytes_per_s(context.runtime.param_dtype),
    )


def _options(
    screening: Screening,
    plan: Plan,
    modes: tuple[str, ...],
    rank: NDArray[np.intp],
    count: NDArray[np.intp],
    among: NDArray[np.intp],
    mode: NDArray[np.intp],
) -> StageLayout:
    """Return a layout of one plan whose columns are not its ranks but all that its ranks could hold."""
    moe = screening.model.moe is not None
    dense = (among if moe else count)[None, :].astype(np.int64)
    rest = (np.maximum(count - among, 0) if moe else np.zeros_like(count))[None, :].astype(np.int64)
    by_mode: dict[str, tuple[Floats, Floats]] = {}
    for number, word in enumerate(modes):
        mine = (mode == number)[None, :]
        by_mode[canonical_recompute(word, screening.runtime)] = (dense * mine * 1.0, rest * mine * 1.0)
    return StageLayout(
        dense=dense,
        moe=rest,
        rank=rank[None, :].astype(np.int64),
        alike=np.ones_like(dense),
        first=(rank == 0)[None, :],
        last=(rank == plan.pp - 1)[None, :],
        by_mode=by_mode,
    )
