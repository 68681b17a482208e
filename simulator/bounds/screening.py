"""The analytical model for searches: many plans as columns, in rounds of rising cost, each for fewer plans.

    screening = Screening(scenario)
    shared = screening.blocks(columns, modes)            # operators, once for all plans that run the same
    some = screening.plans(columns.take(rows), shared, rows)
    some.allocated_and_reserved_bytes()                  # a lower bound of what ranks allocate and reserve
    some.under("full")                                   # the same with another recompute mode
    some.computes_at_least_s()                           # a lower bound of the step
    some.at_least_s()                                    # a closer one
    some.step_s()                                        # its account, but for flushes of a full allocator: flush_s

The numbers are those of `estimate_plans`, by the same functions; bounds have one column for each kind of pipeline rank,
not one for each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simulator.analytical.account import Account, AccountInputs, account_plans
from simulator.analytical.estimates import (
    calibrated_operators,
    collectives_of,
    cost_context,
    known_costs,
    table_of,
)
from simulator.analytical.layer_cost import BlockCost, BlockMemory, network_blocks
from simulator.analytical.memory import (
    CONTEXT_BYTES,
    MemoryColumns,
    SharedParts,
    least_bytes,
    memory_of_ranks,
)
from simulator.analytical.rank_memory import RankMemory
from simulator.analytical.scenario import Scenario
from simulator.bounds.lower_bound import LowerBound
from simulator.bounds.schedule_bound import scheduled_at_least_s
from simulator.calibration.calibration import RuntimeCosts
from simulator.calibration.intervals import replayed_memory_factors
from simulator.collectives.cost import CollectiveModel
from simulator.columns.plan_columns import PlanColumns, distinct, words
from simulator.columns.plan_table import Floats, PlanTable
from simulator.config.estimate import sure_bytes
from simulator.config.runtime import TF32
from simulator.kernels.low_precision import recipe_of
from simulator.kernels.roofline import Roofline
from simulator.pipeline.stages import StageLayout, stage_layout
from simulator.runtimes.library import canonical_recompute
from simulator.runtimes.model_operators import ModelOperators
from simulator.runtimes.parts import RecomputeSpec
from simulator.step.context import CostContext
from simulator.step.frozen import local_parameters
from simulator.step.held import Parameters
from simulator.step.walk import message_bytes
from topology.time_limit import check_time

# A bound may equal the step, summed in another order: it is lowered by the rounding error.
ROUNDED = 1.0 - 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlocks:
    """Costs of the blocks of each distinct (degrees, micro batch, overlap) among plans; `which` is the index of each
    plan's.
    """

    costs: dict[str, BlockCost]
    which: NDArray[np.intp]

    def keeping_least(self, modes: Mapping[str, RecomputeSpec]) -> SharedBlocks:
        """Return blocks that save no more than under any recompute mode and recompute nothing: a bound, not a mode."""

        def of_wrapped(cost: BlockCost) -> Iterator[Floats]:  # a mode may wrap a share of the layers
            for name, saved in cost.saved_bytes.items():
                yield cost.everything_bytes - (cost.everything_bytes - saved) / modes[name].layers

        least = {
            name: replace(cost, recompute={}, saved_bytes={"none": np.minimum.reduce([*of_wrapped(cost)])}, bounds=True)
            for name, cost in self.costs.items()
        }
        return SharedBlocks(costs=least, which=self.which)

    def take(self, rows: NDArray[np.intp]) -> dict[str, BlockCost]:
        """Return the blocks of the plans `rows`."""
        mine = self.which[rows]
        return {name: cost.take(mine) for name, cost in self.costs.items()}

    def kept(self, rows: NDArray[np.intp]) -> dict[str, BlockMemory]:
        """Return the memory of the blocks of the plans `rows`."""
        mine = self.which[rows]
        return {name: cost.kept(mine) for name, cost in self.costs.items()}


@dataclass(frozen=True)  # no slots, for cached properties: a search computes them once
class Screening:
    """One scenario, for many plans. With `sure`, plans must fit with at least this probability, given the errors of
    predicted memory; with `sure` 0, they may need `share` of the capacity.
    """

    scenario: Scenario
    sure: float = 0.0
    share: float = 1.0

    @property
    def capacity_bytes(self) -> float:
        """Bytes of a GPU that a rank can use."""
        return self.scenario.cluster.gpu_memory_bytes - CONTEXT_BYTES

    @property
    def limit_bytes(self) -> float:
        """The most bytes that a plan's predicted memory may have."""
        if self.sure:
            return sure_bytes(self.capacity_bytes, replayed_memory_factors(), self.sure)
        return self.capacity_bytes * self.share

    def least_bytes(self, memory: MemoryColumns) -> Floats:
        """Return the bytes of every rank that are compared with the limit: reserved bytes or, where the allocator may
        free its cache and retry, allocated bytes.
        """
        return memory.reserved_bytes if self.sure else memory.peak_bytes

    @property
    def peak_flops(self) -> float:
        """Dense datasheet rate of the compute type on one GPU."""
        gpu, runtime = self.scenario.cluster.slowest_kind, self.scenario.runtime
        low = recipe_of(runtime)
        tf32 = runtime.compute_dtype == TF32
        return Roofline(gpu=gpu, dtype=runtime.activation_dtype, low=low, tf32=tf32).products_peak_flops

    @cached_property
    def operators(self) -> ModelOperators:
        return calibrated_operators(self.scenario)

    def table(self, columns: PlanColumns) -> PlanTable:
        """Return the columns as the analytical model reads them. Raises BadPlan for words that the runtime does not
        know.
        """
        return table_of(self.scenario, columns, self.operators)

    def blocks(self, plans: PlanColumns | PlanTable, recompute: Sequence[str]) -> SharedBlocks:
        """Return the costs of the blocks of every plan, with every mode in `recompute` for layers."""
        table = plans if isinstance(plans, PlanTable) else self.table(plans)
        conditions = np.stack([*table.conditions.values()]).T @ (1 << np.arange(len(table.conditions)))
        overlap = np.searchsorted(np.array(words(table.tp_overlap), dtype=np.str_), table.tp_overlap)
        degrees = [table[name] for name in ("tp", "cp", "ep", "etp", "micro_batch_size", "gpus", "placing")]
        rows, which = distinct(*degrees, conditions, overlap, table.capacity_factor)
        context = self._context(table.take(rows))
        modes = [canonical_recompute(word, self.scenario.runtime) for word in recompute]
        # A collective that cannot run here takes infinitely long, and inf - inf is nan.
        with np.errstate(invalid="ignore"):
            costs = network_blocks(self.operators, context, modes)
        return SharedBlocks(costs=costs, which=which)

    def plans(self, plans: PlanColumns | PlanTable, shared: SharedBlocks, rows: NDArray[np.intp]) -> ScreenedPlans:
        """Return `plans`, ready to be costed; their blocks are `rows` of `shared`."""
        table = plans if isinstance(plans, PlanTable) else self.table(plans)
        return ScreenedPlans(self, table, shared, rows)

    def _context(self, table: PlanTable) -> CostContext:
        return cost_context(self.scenario, table, self.operators, collectives=self._collectives)

    @cached_property
    def _collectives(self) -> CollectiveModel:
        return collectives_of(self.scenario, self.scenario.cluster)


class ScreenedPlans:
    """Plans of one screening; every figure has shape (plans,)."""

    def __init__(self, screening: Screening, table: PlanTable, shared: SharedBlocks, rows: NDArray[np.intp]) -> None:
        check_time()
        self.screening, self.table = screening, table
        self._shared, self._rows = shared, rows
        self.operators = screening.operators

    @cached_property
    def blocks(self) -> dict[str, BlockCost]:
        return self._shared.take(self._rows)

    @cached_property
    def context(self) -> CostContext:
        return self.screening._context(self.table)  # noqa: SLF001 - one module, two halves

    @cached_property
    def layout(self) -> StageLayout:
        return stage_layout(self.screening.scenario.model, self.table, self.operators.spec.pipeline, merged=True)

    @cached_property
    def parameters(self) -> Parameters:
        return local_parameters(self.screening.scenario.model, self.context)

    def allocated_and_reserved_bytes(self) -> Floats:
        """Return what is allocated at least on the fullest rank and what the pools of the allocator hold, shape (plans,
        2).
        """
        return self._least_bytes(self._ranks)

    def under(self, mode: str) -> Floats:
        """Return the same if all layers of these plans, which state none by stage, ran under a recompute mode."""
        shared = self._shared_parts  # made first: ranks under a mode take with them what these have found
        ranks = self._ranks.under(canonical_recompute(mode, self.screening.scenario.runtime))
        return self._least_bytes(ranks, shared)

    @cached_property
    def _shared_parts(self) -> SharedParts:
        return SharedParts(self._ranks)

    @cached_property
    def _ranks(self) -> RankMemory:
        held = self._shared.kept(self._rows)
        return RankMemory(
            self.screening.scenario.model, self.operators, self.context, self.layout, held, self.parameters
        )

    def _least_bytes(self, ranks: RankMemory, shared: SharedParts | None = None) -> Floats:
        if self.known.reserved == self.known.activations == 1.0:
            both = least_bytes(ranks, shared)
        else:
            memory = memory_of_ranks(ranks).scaled(self.known)
            both = memory.peak_bytes, memory.reserved_bytes
        return np.stack([nbytes.max(axis=1) for nbytes in both], axis=1)

    @cached_property
    def known(self) -> RuntimeCosts:
        """Costs of the runtime as runs showed them."""
        return known_costs(self.screening.scenario)

    def at_least_s(self) -> Floats:
        """Return a lower bound of the step in seconds; infinite where something cannot run."""
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(self.lower_bound(self.layout).step_s() * ROUNDED, nan=np.inf)

    def computes_at_least_s(self) -> Floats:
        """Return a looser bound that takes a fifth of the time: what a device computes."""
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(self.lower_bound(self.layout).computed_s() * ROUNDED, nan=np.inf)

    def lower_bound(self, layout: StageLayout) -> LowerBound:
        """Return the bound of these plans for ranks that hold the layers of `layout`."""
        sent = message_bytes(self.context, self.screening.scenario.model.hidden)
        return LowerBound(self.context, layout, self.blocks, self.parameters, sent, self.inputs.clocks)

    def at_least_by_schedule_s(self, limit_s: float = np.inf) -> Floats:
        """Return a closer, costlier lower bound in seconds, from a walk of the schedule's table; 0 without a pipeline.
        Bounds above `limit_s` are not made tighter.
        """
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(scheduled_at_least_s(self.inputs, limit_s) * ROUNDED, nan=np.inf)

    @cached_property
    def inputs(self) -> AccountInputs:
        """What an account of these plans is computed from."""
        return AccountInputs(
            scenario=self.screening.scenario,
            context=self.context,
            operators=self.operators,
            blocks=self.blocks,
            parameters=self.parameters,
        )

    @cached_property
    def account(self) -> Account:
        """The account of every step; takes some milliseconds for each kind of plan."""
        with np.errstate(invalid="ignore"):
            return account_plans(self.inputs)

    def step_s(self) -> Floats:
        """Return the seconds of the step without flushes of the allocator; infinite where something cannot run."""
        return np.nan_to_num(self.account.total_s, nan=np.inf)
