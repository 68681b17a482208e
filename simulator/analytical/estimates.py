"""Step time and memory of many plans at once, without simulating.

`simulator.analytical.account` gives step times, `simulator.analytical.memory` what the allocator reserves; this module
makes estimates of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.analytical.account import AXES, Account, AccountInputs, account_plans
from simulator.analytical.known_shares import known_shares
from simulator.analytical.layer_cost import network_blocks
from simulator.analytical.memory import CONTEXT_BYTES, MemoryColumns, memory_of_ranks
from simulator.analytical.rank_memory import RankMemory
from simulator.analytical.scenario import Scenario, require_gpus
from simulator.calibration.by_plan import host_by_plan, operators_by_plan, roofline_by_plan
from simulator.calibration.calibration import (
    Calibration,
    RuntimeCosts,
    calibrated_host,
    collectives_on,
    overlap_of,
    roofline_of,
)
from simulator.calibration.distance import distance
from simulator.calibration.intervals import basis_of, interval_table, memory_factors, step_factors
from simulator.calibration.provenance import Shares, main_source, shares
from simulator.collectives.cost import CollectiveModel
from simulator.collectives.group_times import GroupTimes
from simulator.columns.plan_columns import PlanColumns, words
from simulator.columns.plan_table import Floats, PlanTable, axis_sizes, plan_table, windowed_share
from simulator.config.estimate import Estimate, Interval, MemoryEstimate
from simulator.config.plan import Plan
from simulator.config.runtime import DTYPE_BYTES, Runtime
from simulator.overlap.site_costs import SiteRates
from simulator.pipeline.stages import StageLayout, stage_layout
from simulator.runtimes.library import RuntimeSpec, canonical_recompute, wraps_one
from simulator.runtimes.model_operators import ModelOperators, operators_for
from simulator.step.context import CostContext
from simulator.step.frozen import local_parameters, trained_flops_per_token
from simulator.step.host import compiled, costs_in, graphed, on_grace, slowed
from topology.cluster import Cluster, Source
from topology.errors import BadPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateTable:
    """Estimates of many plans: columns in the order of `plans`. `estimate(i)` gives one row as an `Estimate`."""

    plans: tuple[Plan, ...]
    step_s: Floats
    breakdown_s: dict[str, Floats]
    exposed_by_axis_s: dict[str, Floats]
    peak_bytes: Floats
    reserved_bytes: Floats
    capacity_bytes: float
    fits: NDArray[np.bool_]
    memory: MemoryColumns
    tokens_per_step: float
    model_flops: float
    peak_flops: float
    basis: tuple[str, ...]  # what the interval of each row rests on without a calibration: see `intervals`
    shares: Shares
    runtime: Runtime
    sparse: bool  # layers have experts
    clocks: Floats  # factor of arithmetic's time, relative to a GPU that is never idle
    together: Sequence[NDArray[np.intp]]  # rows that cost no more together than alone
    with_hosts: Callable[[Sequence[int], Sequence[float]], Account]  # see `_account_with_hosts`
    distance: float = 1.0  # factor of the width of ranges, relative to that of measured steps
    calibration: Calibration | None = None
    _by_hosts: dict[tuple[float, ...], Floats] = field(default_factory=dict, compare=False, repr=False)

    def estimate(self, index: int) -> Estimate:
        """Return row `index` with intervals, memory by category, and rates per GPU."""
        plan, step = self.plans[index], float(self.step_s[index])
        worst = int(self.memory.worst_rank[index])
        peak, reserved = float(self.peak_bytes[index]), float(self.reserved_bytes[index])
        by_stage = tuple(
            {name: float(column[index, rank]) for name, column in self.memory.categories.items()}
            for rank in range(plan.pp)
        )
        sources = self.shares.row(index, step)
        return Estimate(
            step_s=self._step_interval(index, step, sources),
            tokens_per_gpu=self.tokens_per_step / plan.gpus,
            model_flops_per_gpu=self.model_flops / plan.gpus,
            peak_flops=self.peak_flops,
            memory=MemoryEstimate(
                peak_bytes=_interval(peak, memory_factors(), Source.DATASHEET),
                reserved_bytes=reserved,
                by_category=by_stage[worst],
                worst_rank=worst * (plan.gpus // plan.pp),
                capacity_bytes=self.capacity_bytes,
                fits=bool(self.fits[index]),
                host_bytes=float(self.memory.host_bytes[index].max()),
                by_stage=by_stage,
                reserved_by_stage=tuple(self.memory.reserved_bytes[index, : plan.pp].tolist()),
            ),
            breakdown_s={name: float(column[index]) for name, column in self.breakdown_s.items()},
            exposed_by_axis_s={name: float(column[index]) for name, column in self.exposed_by_axis_s.items()},
            sources=sources,
        )

    def host_measured(self, index: int) -> bool:
        """Return whether all kinds of layers that a row's host launches ran on this host."""
        known = self.calibration
        return known is not None and known.ran(self.runtime, costs_in(self.plans[index], sparse=self.sparse))

    def _step_interval(self, index: int, step: float, sources: dict[str, float]) -> Interval:
        factors = step_factors(
            self.basis[index],
            sources,
            host=float(self.breakdown_s["host"][index]) / step,
            by_host=lambda factors: self._steps_by_hosts(index, factors) / step,
            calibrated=self.calibration is not None and self.calibration.current,
            factors=interval_table().factors,
            width=self.distance,
            host_measured=self.host_measured(index),
        )
        return _interval(step, factors, Source.DATASHEET if self.calibration is None else main_source(sources))

    def _steps_by_hosts(self, index: int, factors: tuple[float, float]) -> Floats:
        """Return the steps of a row where its host takes each of `factors` times as long."""
        known = self._by_hosts.setdefault(factors, np.full((len(factors), len(self.plans)), np.nan))
        if np.isnan(known[0, index]):
            rows = next(rows for rows in self.together if index in rows)
            known[:, rows] = self.with_hosts(rows.tolist(), factors).total_s.reshape(len(factors), -1)
        return known[:, index]


def estimate_plans(
    scenario: Scenario,
    plans: Sequence[Plan],
    *,
    each_on: Sequence[Cluster] = (),
    each_with: Sequence[Calibration] = (),
) -> EstimateTable:
    """Return step time and memory of every plan, assuming each is legal for the model and the workload.

    `each_on` gives each plan a cluster of its own; these may differ from the scenario's in link rates only. `each_with`
    gives each plan a calibration, for the costs of host, kernels and collectives; memory, contention and ranges come
    from the scenario's.

    Raises BadPlan when a plan needs more GPUs than there are, when the runtime has no description, and when it does not
    know a plan's recompute mode.
    """
    model, cluster, workload, runtime = scenario.model, scenario.cluster, scenario.workload, scenario.runtime
    inputs = _inputs(scenario, plans, each_on, each_with)
    context, (layout, memory), account = inputs.context, _memory(inputs), account_plans(inputs)
    breakdown_s = account.breakdown_s
    measured, fitted = known_shares(layout, inputs.blocks, context.spec.recompute)
    resting = shares(
        breakdown_s,
        measured=measured,
        fitted=fitted,
        calibration=context.calibration,
        runtime=runtime,
        communication_measured=_within_measured(context),
    )
    capacity = cluster.gpu_memory_bytes - CONTEXT_BYTES
    reserved = memory.reserved_bytes.max(axis=1)
    flops = trained_flops_per_token(model, runtime.adapter, workload.seq_len) * workload.tokens_per_step
    return EstimateTable(
        plans=tuple(plans),
        step_s=account.total_s,
        breakdown_s={**breakdown_s, "allocator": np.zeros(len(plans))},  # the replay of allocations gives this part
        exposed_by_axis_s={axis: account.parts_s[axis] for axis in AXES},
        peak_bytes=memory.peak_bytes.max(axis=1),
        reserved_bytes=reserved,
        capacity_bytes=capacity,
        fits=memory.peak_bytes.max(axis=1) <= capacity,
        memory=memory,
        tokens_per_step=float(workload.tokens_per_step),
        model_flops=flops,
        peak_flops=context.roofline.products_peak_flops,
        basis=tuple(basis_of(low=runtime.low, several_nodes=plan.gpus > cluster.gpus_per_node) for plan in plans),
        shares=resting,
        runtime=runtime,
        sparse=model.moe is not None,
        clocks=account.clocks,
        together=account.together,
        with_hosts=partial(_account_with_hosts, scenario, plans, each_on, each_with),
        distance=distance(cluster, runtime, max((plan.gpus for plan in plans), default=1))[0],
        calibration=context.calibration,
    )


def _inputs(
    scenario: Scenario,
    plans: Sequence[Plan],
    each_on: Sequence[Cluster] = (),
    each_with: Sequence[Calibration] = (),
    host_factor: Floats | None = None,
) -> AccountInputs:
    operators = calibrated_operators(scenario)
    require_gpus(plans, scenario.cluster)
    table = table_of(scenario, plans, operators)
    context = cost_context(scenario, table, operators, each_on)
    if each_with:
        context = _with_own_costs(context, scenario, each_with)
    if host_factor is not None:
        spec = replace(context.spec, host=slowed(context.spec.host, host_factor))
        context = replace(context, spec=spec, own_costs=True)
    blocks = network_blocks(operators, context, table.recompute_modes)
    parameters = local_parameters(scenario.model, context)
    return AccountInputs(scenario=scenario, context=context, operators=operators, blocks=blocks, parameters=parameters)


def _memory(inputs: AccountInputs) -> tuple[StageLayout, MemoryColumns]:
    """Return the layers of every rank, and its least memory."""
    model, operators = inputs.scenario.model, inputs.operators
    layout = stage_layout(model, inputs.context.table, operators.spec.pipeline)
    ranks = RankMemory(model, operators, inputs.context, layout, inputs.blocks, inputs.parameters)
    return layout, memory_of_ranks(ranks).scaled(known_costs(inputs.scenario))


def _account_with_hosts(
    scenario: Scenario,
    plans: Sequence[Plan],
    each_on: Sequence[Cluster],
    each_with: Sequence[Calibration],
    rows: Sequence[int],
    factors: Sequence[float],
) -> Account:
    """Return the account of the plans `rows` where hosts take the first of `factors` times as long, then of the same
    plans with the second, and so on.
    """
    some = list(rows) * len(factors)
    on, with_ = [each_on[row] for row in some if each_on], [each_with[row] for row in some if each_with]
    return account_plans(_inputs(scenario, [plans[row] for row in some], on, with_, np.repeat(factors, len(rows))))


def memory_of_plans(scenario: Scenario, plans: Sequence[Plan]) -> MemoryColumns:
    """Return the least memory of every rank under every plan, the same as in `estimate_plans` but without step
    times.
    """
    return _memory(_inputs(scenario, plans))[1]


def table_of(scenario: Scenario, plans: Sequence[Plan] | PlanColumns, operators: ModelOperators) -> PlanTable:
    """Return plans as the analytical model reads them. Raises BadPlan for words that the runtime does not know."""
    if isinstance(plans, PlanColumns):
        for word in words(plans.recompute):
            if (name := canonical_recompute(word, scenario.runtime)) != word:
                plans = replace(plans, recompute=np.where(plans.recompute == word, name, plans.recompute))
    else:
        plans = [with_canonical_recompute(plan, scenario.runtime) for plan in plans]
    return plan_table(
        plans,
        scenario.workload,
        cp_method=operators.spec.context_parallel,
        splits_experts=operators.spec.splits_experts,
        wraps_one=wraps_one(operators.spec, scenario.runtime),
    )


def _within_measured(context: CostContext) -> NDArray[np.bool_]:
    """Return for each plan whether its groups are at most as large as those whose collectives were measured."""
    measured = context.groups.collectives.measured
    most = max((sample.ranks for sample in measured.samples), default=0) if measured is not None else 0
    return np.asarray(context.table["gpus"] <= most)


def calibrated_operators(scenario: Scenario) -> ModelOperators:
    """Return the operators of a model under a runtime, with that runtime's measured host costs."""
    operators = operators_for(scenario.model, scenario.runtime)
    return replace(operators, spec=_calibrated_spec(operators.spec, scenario))


def _calibrated_spec(described: RuntimeSpec, scenario: Scenario) -> RuntimeSpec:
    spec = calibrated_host(described, scenario.host_calibration, compiled=scenario.runtime.compile)
    if scenario.host_calibration is None and scenario.cluster.slowest_kind.c2c_bytes_per_s:
        spec = replace(spec, host=on_grace(spec.host))
    if scenario.runtime.compile:
        spec = replace(spec, host=compiled(spec.host))
    if scenario.runtime.cuda_graph and not scenario.runtime.graph_scopes:
        spec = replace(spec, host=graphed(spec.host))
    return spec


def known_costs(scenario: Scenario) -> RuntimeCosts:
    """Return the costs that runs of the scenario's runtime, or of single layers under it, showed."""
    known = scenario.gpu_calibration
    return RuntimeCosts() if known is None else known.runtime(scenario.runtime.name, compiled=scenario.runtime.compile)


def _spread(spec: RuntimeSpec, scenario: Scenario) -> float:
    """Return the spread of loads over ranks with experts, where the workload does not give loads as numbers."""
    natural = scenario.workload.routing == "natural"
    return spec.unbalanced.get(scenario.model.family, spec.expert_spread) if natural else spec.expert_spread


def autocast_width(runtime: Runtime) -> float:
    """Return the width of parameters over the width of the type in which matrix products compute."""
    return max(1.0, DTYPE_BYTES[runtime.param_dtype] / DTYPE_BYTES[runtime.activation_dtype])


def collectives_of(scenario: Scenario, machine: Cluster) -> CollectiveModel:
    """Return the collectives of a machine with the scenario's measurements, as the scenario's runtime ran them."""
    known = known_costs(scenario)
    return replace(
        collectives_on(machine, scenario.calibration),
        crossing_s=known.crossing_s,
        network_factor=known.network_factor,
    )


def cost_context(
    scenario: Scenario,
    table: PlanTable,
    operators: ModelOperators,
    each_on: Sequence[Cluster] = (),
    *,
    collectives: CollectiveModel | None = None,
) -> CostContext:
    """Return the context for the plans of `table`: all that costs of blocks and traffic depend on, besides the
    operators.

    Pass `collectives` of the scenario where several contexts share their cache.
    """
    model, cluster, calibration = scenario.model, scenario.cluster, scenario.calibration
    measured = scenario.gpu_calibration
    known = known_costs(scenario)
    models = {id(machine): collectives_of(scenario, machine) for machine in each_on}
    models[id(cluster)] = collectives or collectives_of(scenario, cluster)
    roofline = roofline_of(
        cluster,
        scenario.runtime,
        operators.spec,
        measured,
        windowed=windowed_share(model, scenario.workload.attended_len),
        documents=scenario.workload.attended_len < scenario.workload.seq_len,
        sinks=model.attention_sinks,
    )
    shaped = bool(known.of_shapes)
    if shaped:
        costs = [known] * len(table)
        roofline = roofline_by_plan(roofline, costs, model, scenario.workload.seq_len, table)
    return CostContext(
        table=table,
        sizes=axis_sizes(
            model,
            scenario.workload,
            table,
            autocast_width=autocast_width(scenario.runtime),
            expert_spread=_spread(operators.spec, scenario),
            rank=scenario.runtime.adapter.rank if scenario.runtime.adapter is not None else 0,
            domain=cluster.gpus_per_node,
            pads="fused_dispatch" not in operators.features,
        ),
        roofline=roofline,
        groups=GroupTimes(
            cluster,
            table,
            models[id(cluster)],
            models_by_plan=tuple(models[id(machine)] for machine in each_on),
            factor=known.collective_factor,
        ),
        runtime=scenario.runtime,
        spec=operators.spec,
        site=overlap_of(calibration) if table.overlap_modes or table.pushed.any() else SiteRates(),
        calibration=measured,
        own_costs=shaped,
    )


def _with_own_costs(context: CostContext, scenario: Scenario, each_with: Sequence[Calibration]) -> CostContext:
    """Return the context with each plan's costs from its own calibration."""
    scenarios = {id(one): replace(scenario, calibration=one) for one in each_with}
    described = operators_for(scenario.model, scenario.runtime).spec
    hosts = {key: _calibrated_spec(described, one).host for key, one in scenarios.items()}
    costs = {key: known_costs(one) for key, one in scenarios.items()}
    which = [id(one) for one in each_with]
    models: dict[tuple[int, float, float], CollectiveModel] = {}
    for one in each_with:
        known = costs[id(one)]
        key = (id(one.collectives), known.crossing_s, known.network_factor)
        if key not in models:
            models[key] = collectives_of(scenarios[id(one)], scenario.cluster)
    measured = scenario.gpu_calibration
    if measured is not None:
        measured = replace(measured, operators=operators_by_plan(each_with))
    return replace(
        context,
        spec=replace(context.spec, host=host_by_plan([hosts[key] for key in which])),
        roofline=roofline_by_plan(
            replace(context.roofline, measured=measured),
            [costs[key] for key in which],
            scenario.model,
            scenario.workload.seq_len,
            context.table,
        ),
        groups=replace(
            context.groups,
            models_by_plan=tuple(
                models[id(one.collectives), costs[id(one)].crossing_s, costs[id(one)].network_factor]
                for one in each_with
            ),
            factor=np.array([costs[key].collective_factor for key in which]),
        ),
        own_costs=True,
    )


def with_canonical_recompute(plan: Plan, runtime: Runtime) -> Plan:
    """Return `plan` with the names that the runtime's description has for its recompute modes. Raises BadPlan."""
    stages = plan.stages
    if plan.recompute_per_stage and len(plan.recompute_per_stage) != stages:
        raise BadPlan(f"recompute_per_stage has {len(plan.recompute_per_stage)} entries for {stages} stages")
    return replace(
        plan,
        recompute=canonical_recompute(plan.recompute, runtime),
        recompute_per_stage=tuple(canonical_recompute(word, runtime) for word in plan.recompute_per_stage),
    )


def _interval(value: float, factors: tuple[float, float], source: Source) -> Interval:
    return Interval(value=value, low=value * factors[0], high=value * factors[1], source=source)


class Counted(NamedTuple):
    """A plan by its row of a table of estimates."""

    table: EstimateTable
    row: int

    @property
    def plan(self) -> Plan:
        return self.table.plans[self.row]

    @property
    def step_s(self) -> float:
        return float(self.table.step_s[self.row])

    @property
    def estimate(self) -> Estimate:
        return self.table.estimate(self.row)


def counted_rows(table: EstimateTable) -> list[Counted]:
    """Return every plan of a table."""
    return [Counted(table, row) for row in range(len(table.plans))]
