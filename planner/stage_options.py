"""Everything that a rank of one pipeline could hold, costed by the closed form: the alternatives of `planner.inner_solve`.

An alternative is a number of layers, how many of them are dense ones of the network's beginning, and a recompute mode for
each of the rank's stages. The closed form's step is a sum of what only the slowest rank decides, a bubble made of sums over
the others, and the optimizer of whoever owns most; so costing every alternative once, alone in the place of the slowest, is
all that a solver needs. The numbers are the closed form's own (`simulator.step_cost` on a table with an alternative a row).

On schedules with several stages a rank, its layers lie on them as evenly as whole layers do, the first stages first: uneven
ones would stall each other in every round, which sums do not see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.frameworks import Framework
from simulator.data_parallel import FSDP_OPS, sm_share
from simulator.memory import memory_columns
from simulator.model import Model
from simulator.plan import Plan
from simulator.plan_columns import PlanColumns
from simulator.plan_table import Floats
from simulator.runtime_library import canonical_recompute
from simulator.screening import ScreenedPlans, Screening, SharedBlocks
from simulator.stages import StageLayout, rank_of_stage, stage_layers
from simulator.step_cost import RankSum, micro_batches, rank_seconds, step_cost

Ints = NDArray[np.int64]
MOST_MIXES = 10  # ways to spread modes over the stages of a rank; beyond, a rank has one mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Freedom:
    """What may differ from stage to stage: layers, and the recompute modes to choose from (one: the plan's own)."""

    layers: bool
    modes: tuple[str, ...]

    @property
    def any(self) -> bool:
        return self.layers or len(self.modes) > 1


def freedom(framework: Framework, plan: Plan, recomputes: Sequence[str]) -> Freedom:
    """Return what `framework` lets the stages of `plan` differ in."""
    if plan.pp == 1:
        return Freedom(layers=False, modes=(plan.recompute,))
    return Freedom(
        layers=framework.lists_layers, modes=tuple(recomputes) if framework.lists_recompute else (plan.recompute,)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Alternatives of the ranks of one pipeline that fit into memory, one entry each, ordered by rank.

    `count` layers, `early` of them on the rank's first stage, `dense` of them dense ones of the beginning (0 where all
    layers are of one kind); `mix` numbers the modes of its stages. `forward`, `input_s` and `weight_s` are seconds of one
    micro batch. `alone` is the step without bubble, host and optimizer if this rank is the slowest, `alone_least` at the
    highest clocks that idle moments could give; `update` its optimizer. The host is `late` without a bubble,
    behind by `first` at least, and takes `before`.
    """

    rank: Ints
    count: Ints
    early: Ints
    dense: Ints
    mix: Ints
    forward: Floats
    input_s: Floats
    weight_s: Floats
    alone: Floats
    alone_least: Floats
    update: Floats
    late: Floats
    first: Floats
    before: Floats

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def seconds(self) -> Floats:
        """One micro batch, forward and backward."""
        return self.forward + self.input_s + self.weight_s

    def take(self, which: Any) -> Options:
        """Return the alternatives that `which` (a mask or indices) selects."""
        return Options(**{f.name: getattr(self, f.name)[which] for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One pipeline whose stages are to be filled, and the alternatives of its ranks.

    `fixed` are the layers of each stage where they are not free. `synchronizes`: the host never runs ahead, so that a
    bubble hides none of its lateness.
    """

    plan: Plan  # without layers or modes of stages
    layers: int
    leading: int  # dense layers at the beginning that are told apart
    mixes: tuple[tuple[str, ...], ...]  # modes of a rank's stages, first stage first
    options: Options
    fixed: tuple[int, ...]
    synchronizes: bool

    def filled(self, o: Options) -> Plan:
        """Return the plan in which every rank holds its one alternative among `o`."""
        plan = self.plan
        stages = plan.pp * plan.virtual_stages
        layers, words = [0] * stages, [""] * stages
        for row in range(len(o)):
            rank = int(o.rank[row])
            spread = _spread(int(o.count[row]), plan.virtual_stages)
            for number, stage in enumerate(stages_of(plan, rank)):
                layers[stage], words[stage] = spread[number], self.mixes[int(o.mix[row])][number]
        if not self.fixed:
            plan = replace(plan, layers_per_stage=tuple(layers))
        if len(set(words)) == 1:
            return replace(plan, recompute=words[0])
        return replace(plan, recompute_per_stage=tuple(words))


def stages_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return the stages that a pipeline rank holds, in the order of the network."""
    every = range(plan.pp * plan.virtual_stages)
    return tuple(stage for stage in every if rank_of_stage(stage, plan.pp, plan.schedule or "") == rank)


def _spread(count: int, stages: int) -> tuple[int, ...]:
    return tuple(count // stages + (number < count % stages) for number in range(stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Plans with the costs of their blocks, all at once: as many cost little more than one."""

    plans: tuple[Plan, ...]  # without layers or modes of stages
    columns: PlanColumns
    shared: SharedBlocks


def priced(screening: Screening, plans: Sequence[Plan], columns: PlanColumns, modes: Sequence[str]) -> Priced:
    """Return `plans`, which are the rows of `columns` too, with the costs of their blocks under every mode of `modes`."""
    bare = tuple(replace(plan, layers_per_stage=(), recompute_per_stage=()) for plan in plans)
    return Priced(plans=bare, columns=columns, shared=screening.blocks(columns, modes))


def pipeline(screening: Screening, costs: Priced, number: int, free: Freedom, cutoff_s: float) -> Pipeline | None:
    """Return what the ranks of a plan could hold; alternatives that alone take `cutoff_s` and more are left out.

    None where the ranks together have no room for the network's layers.
    """
    model, plan = screening.model, costs.plans[number]
    mixes = _mixes(free.modes, plan.virtual_stages)
    row = np.array([number])
    one = screening.plans(costs.columns.take(row), costs.shared, row)
    own = stage_layers(model.layers, plan, one.operators.spec.pipeline)
    held = _free(model, plan, _most_layers(one, cutoff_s)) if free.layers else _fixed(model, plan, own)
    held = held.under(len(mixes))
    words = [canonical_recompute(word, screening.runtime) for word in free.modes]
    modes = np.array([[free.modes.index(word) for word in mix] for mix in mixes])[held.mix]
    memory = memory_columns(
        model, one.operators, one.context, held.side_by_side(plan, modes, words), one.blocks, one.parameters
    )
    fits = np.nonzero(memory.reserved_bytes[0] <= screening.capacity_bytes)[0]
    most = np.zeros(plan.pp, dtype=np.int64)
    np.maximum.at(most, held.rank[fits], held.sizes[fits].sum(axis=1))
    if (most == 0).any() or most.sum() < model.layers:
        return None
    held, modes = held.take(fits), modes[fits]
    rows = np.full(len(fits), number)
    several = screening.plans(costs.columns.take(rows), costs.shared, rows)
    options, synchronizes = _costed(model, several, held, held.one_a_row(plan, modes, words))
    quick = np.isfinite(options.alone_least) & np.isfinite(options.seconds) & (options.alone_least < cutoff_s)
    return Pipeline(
        plan=plan,
        layers=model.layers,
        leading=_leading(model) if free.layers else 0,
        mixes=mixes,
        options=options.take(quick),
        fixed=() if free.layers else own,
        synchronizes=synchronizes,
    )


def _mixes(modes: Sequence[str], stages: int) -> tuple[tuple[str, ...], ...]:
    """Return the ways in which a rank's stages can run: earlier modes on its first stages."""
    every = tuple(combinations_with_replacement(modes, stages))
    return every if len(every) <= MOST_MIXES else tuple((mode,) * stages for mode in modes)


def _most_layers(one: ScreenedPlans, cutoff_s: float) -> int:
    """Return how many layers a rank can have before their kernels alone take `cutoff_s`."""
    blocks = [one.blocks[name] for name in ("dense", "moe") if name in one.blocks]
    quickest = min(float((b.forward.device_s + b.backward.device_s)[0]) for b in blocks)
    calibration = one.context.roofline.calibration
    burst = calibration.burst if calibration is not None else 1.0
    layer_s = float(one.table.micro_batches[0]) * min(1.0, burst) * quickest
    return (
        one.screening.model.layers if not layer_s * one.screening.model.layers > cutoff_s else int(cutoff_s / layer_s)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Layers that ranks could hold, one entry each: of every stage of the rank all, and the dense ones among them."""

    rank: Ints
    sizes: Ints  # (entries, stages of a rank)
    dense: Ints  # the same shape; where all layers are dense, all
    mix: Ints
    told: bool  # whether dense layers are told from others

    def take(self, which: NDArray[np.intp]) -> _Held:
        return _Held(
            rank=self.rank[which],
            sizes=self.sizes[which],
            dense=self.dense[which],
            mix=self.mix[which],
            told=self.told,
        )

    def under(self, mixes: int) -> _Held:
        """Return every entry under each of so many mixes of modes."""
        rows = np.repeat(np.arange(len(self.rank)), mixes)
        return replace(self.take(rows), mix=np.tile(np.arange(mixes), len(self.rank)))

    def side_by_side(self, plan: Plan, modes: Ints, words: Sequence[str]) -> StageLayout:
        """Return a layout of one plan whose columns are not its ranks but all entries: what memory needs."""
        return self._layout(plan, modes, words, lambda values: values[None, :])

    def one_a_row(self, plan: Plan, modes: Ints, words: Sequence[str]) -> StageLayout:
        """Return a layout of one plan an entry, in which its rank stands alone: the first in column 0, others in 1."""

        def apart(values: NDArray[Any]) -> NDArray[Any]:
            empty = np.zeros_like(values)
            return np.stack([np.where(self.rank == 0, values, empty), np.where(self.rank == 0, empty, values)], axis=1)

        return self._layout(plan, modes, words, apart)

    def _layout(
        self, plan: Plan, modes: Ints, words: Sequence[str], shaped: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> StageLayout:
        dense, rest = self.dense, self.sizes - self.dense
        last = rank_of_stage(plan.pp * plan.virtual_stages - 1, plan.pp, plan.schedule or "")
        there = shaped(np.ones(len(self.rank), dtype=np.int64)) > 0
        return StageLayout(
            dense=np.where(there, shaped(dense.sum(axis=1)), -1),
            moe=np.where(there, shaped(rest.sum(axis=1)), -1),
            rank=np.where(there, shaped(self.rank), -1),
            alike=there.astype(np.int64),
            first=shaped(self.rank == 0) & there,
            last=shaped(self.rank == last) & there,
            by_mode={
                word: (
                    shaped((dense * (modes == number)).sum(axis=1)) * 1.0,
                    shaped((rest * (modes == number)).sum(axis=1)) * 1.0,
                )
                for number, word in enumerate(words)
            },
        )


def _leading(model: Model) -> int:
    """Return how many dense layers come before those with experts."""
    return min(model.moe.dense_layers, model.layers) if model.moe else 0


def _free(model: Model, plan: Plan, most: int) -> _Held:
    """Return every number of layers, and of dense ones on the first stage, that each rank could hold.

    Dense layers of the beginning are on first stages only: a split so thin that they reach into the second round of a
    looped schedule is left out.
    """
    stages = plan.virtual_stages
    most = min(most, model.layers - (plan.pp - 1) * stages)
    leading = _leading(model)
    shape = (plan.pp, max(0, most - stages + 1), leading + 1)
    rank, count, dense = (index.ravel() for index in np.indices(shape))
    count = count + stages
    number = np.arange(stages)[None, :]
    sizes = count[:, None] // stages + (number < count[:, None] % stages)
    possible = dense <= sizes[:, 0]
    rank, sizes, dense = rank[possible], sizes[possible], dense[possible]
    among = np.zeros_like(sizes)
    among[:, 0] = dense
    return _Held(
        rank=rank,
        sizes=sizes,
        dense=among if model.moe else sizes,
        mix=np.zeros(len(rank), dtype=np.int64),
        told=model.moe is not None,
    )


def _fixed(model: Model, plan: Plan, own: Sequence[int]) -> _Held:
    """Return the layers that each rank holds where the runtime splits them."""
    leading = model.moe.dense_layers if model.moe else model.layers
    before = np.concatenate([[0], np.cumsum(own)[:-1]])
    dense = np.clip(leading - before, 0, own)
    held = np.array([stages_of(plan, rank) for rank in range(plan.pp)])
    return _Held(
        rank=np.arange(plan.pp),
        sizes=np.array(own)[held],
        dense=dense[held],
        mix=np.zeros(plan.pp, dtype=np.int64),
        told=False,
    )


def _costed(model: Model, several: ScreenedPlans, held: _Held, layout: StageLayout) -> tuple[Options, bool]:
    """Return the entries with their costs, and whether the host of this runtime synchronizes."""
    operators, context, parameters, blocks = several.operators, several.context, several.parameters, several.blocks
    with np.errstate(invalid="ignore"):
        micro = micro_batches(model, operators, context, layout, blocks, parameters)
        step = step_cost(operators, context, layout, parameters, micro)
        rank_sum = RankSum(layout=layout, table=several.table, blocks=blocks, has_moe="moe" in blocks)
        seconds, weight = rank_seconds(rank_sum, operators.spec), rank_sum.of("backward.weight_s").sum(axis=1)
    parts, host = step.breakdown_s, micro.host
    arithmetic = parts["compute"] + parts["recompute"]
    alone = step.total_s - parts["host"] - parts["optimizer"] - micro.bubble
    # What keeps the device busy while it would wait for the host; see `HostTime.seconds`.
    beside = parts["copies"] + parts["contention"] - micro.hidden * sm_share(context, *FSDP_OPS)
    beside = beside - (1 / step.clocks - 1) * arithmetic
    late = host.late if host.synchronizes else host.late + micro.bubble - beside
    early = held.sizes[:, 0] if held.told else np.zeros_like(held.rank)
    options = Options(
        rank=held.rank,
        count=held.sizes.sum(axis=1),
        early=early,
        dense=held.dense.sum(axis=1) if held.told else np.zeros_like(held.rank),
        mix=held.mix,
        forward=seconds.forward.sum(axis=1),
        input_s=seconds.backward.sum(axis=1) - weight,
        weight_s=weight,
        alone=alone,
        alone_least=alone - arithmetic * (1 - micro.clocks_at_least / step.clocks),
        update=micro.optimizer,
        late=late,
        first=np.zeros_like(late) + host.first,
        before=np.zeros_like(late) + host.before,
    )
    return options, host.synchronizes
