"""Step time and memory of many plans at once, without simulating: sums, maxima and schedule formulas over columns.

The order of the file is the order of a training step: micro batches through the slowest pipeline rank, the schedule's
bubble, data-parallel traffic and what hides it, the host if it is slower than the device, the optimizer. It never
overlaps what the simulation would not; where it must approximate (uneven stages, overlap) it takes the slower side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulator.calibration import Calibration, calibrated, calibrated_host, roofline_of
from simulator.collectives import collective_model
from simulator.data_parallel import FSDP_OPS, data_parallel, optimizer_s, sm_share
from simulator.estimate import Estimate, Interval, MemoryEstimate
from simulator.group_times import GroupTimes
from simulator.layer_cost import BlockCost, CostContext, block_cost
from simulator.memory import CONTEXT_BYTES, MemoryColumns, Parameters, local_parameters, memory_columns
from simulator.model import Model
from simulator.plan import Plan
from simulator.plan_table import Floats, PlanTable, axis_sizes, plan_table
from simulator.provenance import Shares, half_width, main_source, shares
from simulator.roofline import efficiency
from simulator.runtime import DTYPE_BYTES, Runtime
from simulator.runtime_library import (
    HostSpec,
    ModelOperators,
    RuntimeSpec,
    canonical_recompute,
    operators_for,
)
from simulator.stages import StageLayout, bubble_s, last_rank, stage_layout
from simulator.workload import Workload
from topology.cluster import Cluster, Source
from topology.errors import BadPlan
from topology.profile import Profile

# The 80% interval of an uncalibrated prediction, as (low, high) factors on its value. Source: the 10% and 90% quantiles
# of measured over predicted on the development cases (358 step times, 44 peaks of memory), rounded outward, and no
# narrower where less is known. Three bases: one node (0.90 to 1.16), several nodes (0.97 to 1.15), and parts whose
# sustained rate is not measured as sold: a lower power limit than the part that efficiency.toml refers to, or an
# architecture with one published table (0.93 to 1.17, tails to 0.74 and 1.32). Only two peaks are of several nodes: that
# width is assumed.
STEP_SPREAD = {"node": (0.88, 1.18), "nodes": (0.92, 1.24), "unsettled": (0.86, 1.28)}
MEMORY_SPREAD = {"node": (0.90, 1.10), "nodes": (0.83, 1.25), "unsettled": (0.83, 1.25)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateTable:
    """Estimates of many plans: columns in the order of `plans`. `estimate(i)` gives one row as an `Estimate`."""

    plans: tuple[Plan, ...]
    step_s: Floats
    breakdown_s: dict[str, Floats]
    exposed_by_axis_s: dict[str, Floats]
    lower_bound_s: Floats
    peak_bytes: Floats
    reserved_bytes: Floats
    capacity_bytes: float
    fits: NDArray[np.bool_]
    memory: MemoryColumns
    tokens_per_step: float
    model_flops: float
    peak_flops: float
    basis: tuple[str, ...]  # what each row's interval rests on without a calibration: a key of STEP_SPREAD
    shares: Shares
    runtime: Runtime
    clocks: Floats  # arithmetic's time over that of a GPU that is never idle
    calibration: Calibration | None = None

    def estimate(self, index: int) -> Estimate:
        """Return row `index` with intervals, memory by category, and rates per GPU."""
        plan, step = self.plans[index], float(self.step_s[index])
        worst = int(self.memory.worst_rank[index])
        peak, reserved = float(self.peak_bytes[index]), float(self.reserved_bytes[index])
        by_stage = tuple(
            {name: float(column[index, rank]) for name, column in self.memory.categories.items()}
            for rank in range(plan.pp)
        )
        flops = self.model_flops / plan.gpus / step
        sources = self.shares.row(index, step)
        return Estimate(
            step_s=self._step_interval(index, step, sources),
            tokens_per_s_per_gpu=self.tokens_per_step / plan.gpus / step,
            mfu=flops / self.peak_flops,
            tflops_per_gpu=flops / 1e12,
            peak_flops=self.peak_flops,
            memory=MemoryEstimate(
                peak_bytes=_interval(peak, MEMORY_SPREAD[self.basis[index]]),
                reserved_bytes=reserved,
                by_category=by_stage[worst],
                worst_rank=worst * (plan.gpus // plan.pp),
                capacity_bytes=self.capacity_bytes,
                fits=bool(self.fits[index]),
                by_stage=by_stage,
                reserved_by_stage=tuple(self.memory.reserved_bytes[index, : plan.pp].tolist()),
            ),
            breakdown_s={name: float(column[index]) for name, column in self.breakdown_s.items()},
            exposed_by_axis_s={name: float(column[index]) for name, column in self.exposed_by_axis_s.items()},
            sources=sources,
        )

    def _step_interval(self, index: int, step: float, sources: dict[str, float]) -> Interval:
        if self.calibration is None:
            return _interval(step, STEP_SPREAD[self.basis[index]])
        half = half_width(sources, self.calibration, self.runtime)
        return Interval(value=step, low=step * (1 - half), high=step * (1 + half), source=main_source(sources))


def estimate_plans(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    plans: Sequence[Plan],
    runtime: Runtime,
    profile: Profile | None = None,
    *,
    calibration: Calibration | None = None,
) -> EstimateTable:
    """Return step time and memory of every plan, assuming each is legal for the model and the workload.

    Raises BadPlan when the runtime has no description or does not know a plan's recompute word. Without a `profile`
    every figure rests on datasheets and published efficiencies. `calibration` goes before the profile's own.
    """
    calibration = calibration or calibrated(profile, cluster)
    operators = operators_for(model, runtime)
    operators = replace(operators, spec=calibrated_host(operators.spec, calibration, compiled=runtime.compile))
    table = plan_table([spelled(plan, runtime) for plan in plans], workload, cp_method=operators.spec.context_parallel)
    roofline = roofline_of(cluster, runtime, operators.spec, calibration)
    context = CostContext(
        table=table,
        sizes=axis_sizes(model, workload, table),
        roofline=roofline,
        groups=GroupTimes(cluster, table, collective_model(cluster, profile)),
        runtime=runtime,
        spec=operators.spec,
    )
    blocks = {
        "dense": block_cost(operators.dense_layer, context),
        "embedding": block_cost(operators.embedding, context, wrapped=False),
        "head": block_cost(operators.head, context, wrapped=False),
    }
    if model.moe:
        blocks["moe"] = block_cost(operators.moe_layer, context)
    layout = stage_layout(model, table, operators.spec.pipeline)
    parameters = local_parameters(model, context)
    memory = memory_columns(model, operators, context, layout, blocks, parameters)
    step = _step(model, operators, context, layout, blocks, parameters)
    capacity = cluster.gpu_memory_bytes - CONTEXT_BYTES
    reserved = memory.reserved_bytes.max(axis=1)
    flops = 3.0 * model.forward_flops_per_token(workload.seq_len) * workload.tokens_per_step
    return EstimateTable(
        plans=tuple(plans),
        step_s=step.total_s,
        breakdown_s=step.breakdown_s,
        exposed_by_axis_s=step.exposed_s,
        lower_bound_s=step.lower_bound_s,
        peak_bytes=memory.peak_bytes.max(axis=1),
        reserved_bytes=reserved,
        capacity_bytes=capacity,
        fits=reserved <= capacity,
        memory=memory,
        tokens_per_step=float(workload.tokens_per_step),
        model_flops=flops,
        peak_flops=roofline.peak_flops,
        basis=tuple(_basis(cluster, plan) for plan in plans),
        shares=step.shares,
        runtime=runtime,
        clocks=step.clocks,
        calibration=calibration,
    )


def spelled(plan: Plan, runtime: Runtime) -> Plan:
    """Return `plan` with its recompute words as the runtime's description spells them. Raises BadPlan."""
    stages = plan.pp * plan.virtual_stages
    if plan.recompute_per_stage and len(plan.recompute_per_stage) != stages:
        raise BadPlan(f"recompute_per_stage has {len(plan.recompute_per_stage)} entries for {stages} stages")
    return replace(
        plan,
        recompute=canonical_recompute(plan.recompute, runtime),
        recompute_per_stage=tuple(canonical_recompute(word, runtime) for word in plan.recompute_per_stage),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    breakdown_s: dict[str, Floats]
    exposed_s: dict[str, Floats]
    lower_bound_s: Floats
    shares: Shares
    clocks: Floats

    @property
    def total_s(self) -> Floats:
        return sum(self.breakdown_s.values(), np.zeros_like(self.lower_bound_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankSum:
    """A block quantity summed over the layers of each pipeline rank, then read on the rank that decides."""

    layout: StageLayout
    table: PlanTable
    blocks: dict[str, BlockCost]
    has_moe: bool

    def of(self, quantity: str) -> Floats:
        """Return per-rank sums of a dotted quantity such as `forward.compute_s`, shape (plans, ranks)."""
        exists = self.layout.exists
        ranks = np.arange(exists.shape[1])[None, :]
        first, last = (ranks == 0) & exists, (ranks == last_rank(self.table)[:, None]) & exists
        total = (
            np.where(exists, self.layout.dense, 0) * self._read("dense", quantity)
            + first * self._read("embedding", quantity)
            + last * self._read("head", quantity)
        )
        if self.has_moe:
            total = total + np.where(exists, self.layout.moe, 0) * self._read("moe", quantity)
        return np.asarray(total)

    def again(self, quantity: str) -> Floats:
        """Return per-rank sums of what recomputation runs again: each layer under its own mode."""
        total = np.zeros(self.layout.exists.shape)
        for mode, counts in self.layout.by_mode.items():
            for name, layers in zip(("dense", "moe"), counts, strict=True):
                if name in self.blocks and mode in self.blocks[name].recompute:
                    total = total + layers * self._read(name, f"recompute.{mode}.{quantity}")
        return total

    def _read(self, block: str, quantity: str) -> Floats:
        value: object = self.blocks[block]
        for name in quantity.split("."):
            value = value.get(name, 0.0) if isinstance(value, dict) else getattr(value, name)
        return np.broadcast_to(np.asarray(value, dtype=np.float64), (len(self.table),))[:, None]


def _step(
    model: Model,
    operators: ModelOperators,
    context: CostContext,
    layout: StageLayout,
    blocks: dict[str, BlockCost],
    parameters: Parameters,
) -> _Step:
    table, spec, groups = context.table, operators.spec, context.groups
    rank_sum = _RankSum(layout=layout, table=table, blocks=blocks, has_moe="moe" in blocks)
    m = table.micro_batches

    # One micro batch on the slowest pipeline rank: each pass takes as long as the device or the host, whichever is
    # slower.
    def passes(quantity: str) -> dict[str, Floats]:
        return {
            "forward": rank_sum.of(f"forward.{quantity}"),
            "backward": rank_sum.of(f"backward.{quantity}"),
            "recompute": rank_sum.again(quantity),
        }

    device, host = passes("device_s"), passes("host_s")
    layers = np.where(layout.exists, layout.dense + layout.moe, 0)
    layer_host = layer_host_s(spec.host, table)
    waited = WAITING_SHARE * layer_host  # by a host that is not ahead of its device
    layer_host = layer_host - waited
    host["forward"] = host["forward"] + layers * (spec.host.forward_layer_s + FORWARD_SHARE * layer_host)[:, None]
    host["backward"] = (
        host["backward"] + layers * (spec.host.backward_layer_s + (1 - FORWARD_SHARE) * layer_host)[:, None]
    )
    again = _wrapped_layers(spec, layout)
    wrapping = np.array([spec.host.wrapping_s(str(word)) for word in table.recompute])[:, None]
    host["recompute"] = host["recompute"] + again * (spec.host.forward_layer_s + wrapping)
    forward_s = np.maximum(device["forward"], host["forward"])
    behind_s = np.maximum(device["backward"] + device["recompute"], host["backward"] + host["recompute"])
    slowest = np.argmax(forward_s + behind_s, axis=1)

    def here(values: Floats) -> Floats:
        return np.asarray(np.take_along_axis(values, slowest[:, None], axis=1)[:, 0])

    compute = here(rank_sum.of("forward.compute_s")) + here(rank_sum.of("backward.compute_s"))
    recompute = here(rank_sum.again("compute_s"))
    exposed = {
        axis: sum((here(x) for x in passes(f"communication_s.{axis}").values()), np.zeros(len(table)))
        for axis in ("tp", "cp", "ep")
    }
    hidden = sum((here(x) for x in passes("hidden_s").values()), np.zeros(len(table)))
    forward, backward = here(forward_s), here(behind_s)
    # A host that is slower in one pass and quicker in the other runs ahead where it can: what counts is the whole
    # step's issue time against the device's, and the first pass, which nothing ran ahead of.
    on_device = here(device["forward"] + device["backward"] + device["recompute"])
    on_host = here(host["forward"] + host["backward"] + host["recompute"])
    first = forward - here(device["forward"])

    # The schedule: ranks wait for the pipe to fill and drain, and for what neighbours send.
    # The pipe fills and drains through all the other ranks, at each one's own pace. Where ranks hold several stages,
    # uneven ones stall each other in every round: there the slowest rank stands for all.
    weight_s = rank_sum.of("backward.weight_s")
    others = np.maximum(table["pp"] - 1, 1.0)

    def elsewhere(values: Floats) -> Floats:
        mean = (values.sum(axis=1) - here(values)) / others
        return np.asarray(np.where(table["virtual_stages"] > 1, np.maximum(mean, here(values)), mean))

    bubble = bubble_s(table, elsewhere(forward_s), elsewhere(behind_s - weight_s), elsewhere(weight_s))
    boundary = context.sizes["u"] * model.hidden * DTYPE_BYTES[context.runtime.compute_dtype]
    if spec.pipeline.scatter_p2p:
        boundary = np.where(table.sequence_parallel, boundary, boundary / table["tp"])
    hop = groups.time_s("send_recv", "pp", boundary)
    crossings = 2.0 * (table["pp"] - 1)
    # One forward, one backward leaves no slack: what a rank sends is what its neighbour waits for, early receive or not.
    breadth = np.isin(table.schedule, ["GPipe", "LoopedBFS"]) & spec.pipeline.p2p_overlap
    crossings = crossings + np.where((table["pp"] > 1) & ~breadth, 2.0 * table["virtual_stages"] * m, 0.0)
    exposed["pp"] = crossings * hop

    data = data_parallel(operators, context, layout, parameters, forward, backward, slowest)
    beside = data.copies_s + data.contention_s  # keeps the device busy too
    behind = m * (on_host - on_device) + spec.host.rest_s - bubble - beside
    waits = m * here(layers * waited[:, None])
    ahead = np.maximum(np.where(behind > 0, behind + waits, behind), first)
    starved = m * (forward + backward - on_device) if spec.host.synchronizes else ahead
    exposed = {axis: value * (m if axis in {"tp", "cp", "ep"} else 1.0) for axis, value in exposed.items()}
    exposed["dp"] = data.exposed_s

    optimizer = optimizer_s(operators, context, layout, parameters)
    # Clipping needs the norm of all gradients: one number summed over shards, tensor-parallel ranks and stages.
    norm = sum((groups.time_s("all_reduce", axis, NORM_BYTES) for axis in NORM_AXES), np.zeros(len(table)))
    exposed["dp"] = exposed["dp"] + norm
    breakdown = {
        "compute": m * compute,
        "recompute": m * recompute,
        "copies": data.copies_s,
        "contention": data.contention_s + m * hidden * sm_share(context, *FSDP_OPS),
        "exposed_communication": sum(exposed.values(), np.zeros(len(table))),
        "bubble": bubble + data.fill_s,
        "host": starved + spec.host.step_s + spec.host.data_token_s * loaded_tokens(context),
        "optimizer": optimizer,
    }
    clocks = working_clocks(breakdown, context)
    breakdown |= {name: breakdown[name] * clocks for name in ("compute", "recompute")}
    return _Step(
        breakdown_s=breakdown,
        exposed_s=exposed,
        lower_bound_s=m * (compute + recompute) + optimizer,
        clocks=clocks,
        shares=shares(
            breakdown,
            measured_s=sum((here(part) for part in passes("measured_s").values()), np.zeros(len(table))),
            fitted_s=sum((here(part) for part in passes("fitted_s").values()), np.zeros(len(table))),
            kernels_s=compute + recompute,
            calibration=context.roofline.calibration,
            runtime=context.runtime,
            communication_measured=_within_measured(table, groups),
        ),
    )


def working_clocks(breakdown: dict[str, Floats], context: CostContext) -> Floats:
    """Return what arithmetic takes at the clocks that a step's idle moments leave to its busy ones, over what it takes
    on a GPU that is never idle; one without a calibration, whose efficiencies are of whole steps.
    """
    calibration, gpu = context.roofline.calibration, context.roofline.gpu
    if calibration is None:
        return np.ones(len(context.table))
    busy = sum((breakdown[name] for name in BUSY), np.zeros(len(context.table)))
    # A limiter averages over a moment, so of a long pause only the end of it is credited to what follows. Links and
    # memory at work draw power too: communication is no pause.
    idle = breakdown["host"] + np.minimum(breakdown["bubble"], POWER_WINDOW_S)
    return calibration.clocks(busy / np.maximum(busy + idle, 1e-12), efficiency(gpu.architecture).power_exponent)


# Over how long a GPU's power limiter averages. Source: assumed; readings of H200 clocks settle within 0.1 s of a change
# of load (examples/profiles).
POWER_WINDOW_S = 0.1

# Parts of a step in which kernels run.
BUSY = ("compute", "recompute", "copies", "contention", "optimizer", "exposed_communication")

# How much of what parallelism adds to a layer's host time belongs to its forward pass: backward gathers, and reduces.
FORWARD_SHARE = 1 / 3
# How much of it is waiting: ranks whose hosts are not ahead meet in every collective, and each waits for the latest
# launch of all. A host that is ahead of its device waits for nobody. Source: assumed, a half; one- and two-layer runs,
# in which no host gets ahead, show both together.
WAITING_SHARE = 0.5


def layer_host_s(host: HostSpec, table: PlanTable) -> Floats:
    """Return the host seconds that parallelism adds to one layer's two passes, one value a plan."""
    sharded = table.state_shard["parameters"] > 1
    replicated = ~sharded & (table["dp_replicate"] > 1)
    return np.asarray(
        np.where(sharded, host.fsdp_layer_s, 0.0)
        + np.where(replicated, host.ddp_layer_s, 0.0)
        + np.where(table["tp"] > 1, host.tp_layer_s, 0.0)
        + np.where(table["cp"] > 1, host.cp_layer_s, 0.0)
    )


def _wrapped_layers(spec: RuntimeSpec, layout: StageLayout) -> Floats:
    """Return how many layers of each pipeline rank recompute anything."""
    total = np.zeros(layout.exists.shape)
    for name, (dense, moe) in layout.by_mode.items():
        mode = spec.recompute[name]
        total = total + (dense + moe) * (mode.layers if mode.recomputes else 0.0)
    return total


def _within_measured(table: PlanTable, groups: GroupTimes) -> NDArray[np.bool_]:
    """Return which plans are no larger than the groups whose collectives were measured."""
    measured = groups.collectives.measured
    most = max((sample.ranks for sample in measured.samples), default=0) if measured is not None else 0
    return np.array([plan.gpus <= most for plan in table.plans])


def loaded_tokens(context: CostContext) -> Floats:
    """Return the tokens a rank loads for a step: whole sequences of all its micro batches, whatever part it computes."""
    table = context.table
    return np.asarray(context.sizes["S"] * table["micro_batch_size"] * table.micro_batches)


# What the gradient norm is summed over, and the bytes of it.
NORM_AXES = ("dp", "tp", "pipeline")
NORM_BYTES = 4.0


def _basis(cluster: Cluster, plan: Plan) -> str:
    """Return what a plan's interval rests on: a key of STEP_SPREAD."""
    kind = cluster.slowest_kind
    known = efficiency(kind.architecture)
    limited = (kind.power_w or known.reference_w) < 0.9 * known.reference_w
    if limited or kind.architecture.lower() not in SETTLED_ARCHITECTURES:
        return "unsettled"
    return "nodes" if plan.gpus > cluster.gpus_per_node else "node"


# Architectures of which steps of several sources are among the development cases.
SETTLED_ARCHITECTURES = frozenset({"ampere", "hopper"})


def _interval(value: float, spread: tuple[float, float]) -> Interval:
    return Interval(value=value, low=value * spread[0], high=value * spread[1], source=Source.DATASHEET)
