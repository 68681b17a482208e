"""The host's work in a step besides launching kernels: modules, wrappers, loading data, waiting for the device."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from simulator.columns.experts import largest_of
from simulator.columns.plan_columns import words
from simulator.columns.plan_table import Floats, PlanTable
from simulator.config.plan import Plan
from simulator.config.savers import OPTIMIZER_IN_BACKWARD
from simulator.runtimes.library import RuntimeSpec
from simulator.runtimes.parts import HostSpec
from simulator.step.context import CostContext
from simulator.step.units import Unit

# The share of the forward pass in the host time that parallelism adds to a layer: of FSDP and tensor parallelism 41 to
# 46 %, of expert parallelism 46 %, in torchtitan and in our executor (tests/bench/host_cost.py, titan_host_cost.py;
# examples/profiles/hosts.md). DDP has nothing to do before backward.
FORWARD_SHARE = 0.43
# The host's cost of full sharding on a single wrapped rank, over its cost with several ranks. Source: our executor on a
# CPU takes 2.4 and 3.3 ms a layer, with collectives that send nothing; launching real ones adds a third.
WRAPPED_SHARE = 0.5
# The same where that rank casts its parameters itself. Source: our executor on a CPU takes 0.10 ms a layer for casts
# where FSDP2 takes 0.86 (examples/profiles/hosts.md), and launches real ones on a GPU.
CASTS_SHARE = 0.07

# What full sharding costs the host of a layer whose parameters stay gathered after the forward pass, over what it costs
# otherwise: the backward pass gathers nothing. Source: two H200, 0.7 to 0.9; a CPU, 0.75 (examples/profiles/hosts.md).
STAYS_SHARE = 0.75

# What tensor parallelism adds to a layer of which it divides attention alone, since experts are whole and take the
# tokens as they lie between layers: one of two gathers, and one of two sums.
ATTENTION_ALONE = 0.5

# What tensor parallelism adds to a compiled layer, over what it adds to an eager one: DTensor's dispatch is part of the
# graph, and its inputs, parameters and gradients are still unwrapped and wrapped for every call. Source: torchtitan
# 0.2.2's Llama on a CPU, 1.9 and 5.3 ms a layer (tests/bench/titan_dispatch.py; examples/profiles/hosts.md).
COMPILED_DISPATCH = 0.36

# Cost of requesting a batch from torchtitan's loader, in tokens: 256 tokens take 0.8 ms, of thousands each takes 1.5 us
# (examples/profiles/h200x4.json).
BATCH_TOKENS = 280

# Kernels that a stream holds before they begin; a host that launches one more waits. Source: CUDA does not document it;
# a program that launched 10,000 of 190 us saw the host wait from about 1,000 on, for each stream (NVIDIA developer
# forum, topic 68937). Next power of two assumed.
QUEUED_LAUNCHES = 1024.0

# Launches that an optimizer's step for one parameter costs the host in a backward pass: a norm, and `step` of an
# optimizer of its own. Source: 212 us on a host whose launches take 40 (one H200; examples/profiles/hosts.md).
UPDATE_LAUNCHES = 5.3

# FSDP2 packs gradients for their reduction by a kernel that finds its tensors in a list of tiles, one for every 2 KiB
# of a rank's shard. The host writes that list for every reduction: 3.5 ns a tile where malloc has the memory at hand,
# and 9 to 15 for lists of 4 MiB and more, for which it takes fresh pages. Source: torch,
# aten/src/ATen/native/cuda/TensorShape.cu (get_chunk_cat_metadata, pack_vecs); `_chunk_cat` in six runs on two H200,
# and the same lists on a CPU (examples/profiles/hosts.md).
TILE_BYTES = 2048
TILE_S, FRESH_TILE_S = 3.5e-9, 10e-9
REUSED_TILES = 2.0**18

# Largest ratio of the slowest process to the median; no measured process took longer (hosts.md in examples/profiles).
SLOWEST = 1.9

# Host seconds to replay the graph of a layer's pass. Source: assumed; a graph of kernels in a row takes 2.5 us and a
# nanosecond for each (NVIDIA, "Constant Time Launch for Straight-Line CUDA Graphs", 2024), the rest is Python around
# it.
REPLAY_S = 20e-6


# Time that a Grace takes for Python and launches, over that of the x86 hosts whose costs are described. Source: forward
# passes of torch's Linear take 37.1 and 33.2 us on GB200 and GH200, and 13.5 on a DGX H100 with Xeon 8480C
# (NVIDIA/TransformerEngine issue #2053).
GRACE = 2.6


def on_grace(host: HostSpec) -> HostSpec:
    """Return the described host costs for a Grace CPU; loading text is another kind of work."""
    return replace(slowed(host, GRACE), data_token_s=host.data_token_s)


def slowed(host: HostSpec, factor: float | Floats) -> HostSpec:
    """Return the costs of a host that takes `factor` times as long; of an array, each plan's host takes its own."""
    seconds = {f.name: getattr(host, f.name) for f in fields(host) if f.name.endswith("_s")}
    return replace(host, **{name: factor * one for name, one in seconds.items() if np.any(one)})


def graphed(host: HostSpec) -> HostSpec:
    """Return host costs for layers launched by replaying graphs: kernels, collectives and modules cost nothing."""
    by_layer = [one.name for one in fields(host) if one.name.endswith("_layer_s")]
    launches = ("launch_s", "backward_launch_s", "dtensor_launch_s", "collective_s")
    silent = dict.fromkeys((*by_layer, "checkpoint_s", "fsdp_again_s", *launches), 0.0)
    replays = dict.fromkeys(("forward_layer_s", "backward_layer_s"), REPLAY_S)
    return replace(host, selective_s=None, **silent | replays)  # type: ignore[arg-type]  # floats


def compiled(host: HostSpec) -> HostSpec:
    """Return host costs for compiled layers: recomputation is part of their graphs, so nothing is wrapped and no
    operator goes through Python; neither do experts where the layer is one graph, as it is of plain tensors.
    """
    around_s = (1.0 if host.plain_tensors else COMPILED_DISPATCH) * host.tp_layer_s
    experts_s = 0.0 if host.plain_tensors else host.moe_layer_s
    return replace(
        host,
        checkpoint_s=0.0,
        fsdp_again_s=0.0,
        selective_s=None,
        plain_tensors=True,
        tp_layer_s=around_s,
        moe_layer_s=experts_s,
    )


def _dispatch_s(spec: RuntimeSpec, table: PlanTable, *, sparse: bool = False) -> Floats:
    """Return the host seconds that tensor parallelism adds to a layer of the description's model."""
    more = sum(more for part, more in spec.tp_layer_more.items() if sparse or part != "shared_expert")
    whole = (table["ep"] > 1) & (table["etp"] == 1) & (sparse and spec.host.plain_tensors)
    share = np.where(whole, ATTENTION_ALONE, 1.0)
    return np.where(table["tp"] > 1, share * spec.host.tp_layer_s * (1.0 + more), 0.0)


def _experts_s(host: HostSpec, table: PlanTable) -> Floats:
    """Return the host seconds that experts add to a layer."""
    return np.asarray(host.moe_layer_s + np.where(table["ep"] > 1, host.ep_layer_s, 0.0))


def costs_in(plan: Plan, *, sparse: bool) -> frozenset[str]:
    """Return the costs that can occur in a step under `plan`; `sparse`: for a model with experts."""
    sharded = plan.dp_shard * plan.cp > 1
    kinds = {
        "fsdp_layer_s": sharded,
        "fsdp_rest_s": sharded,
        "ddp_layer_s": plan.dp_replicate > 1,
        "ddp_rest_s": plan.dp_replicate > 1,
        "tp_layer_s": plan.tp > 1,
        "tp_rest_s": plan.tp > 1,
        "fsdp_tp_layer_s": plan.tp > 1,  # wrapped for mixed types even where nothing is sharded
        "cp_layer_s": plan.cp > 1,
        "cp_rest_s": plan.cp > 1,
        "moe_layer_s": sparse,
        "ep_layer_s": sparse and plan.ep > 1,
        "pp_pass_s": plan.pp > 1,
        "checkpoint_s": plan.recompute != "none",
        "selective_s": plan.recompute != "none",
        "fsdp_again_s": plan.recompute != "none" and (sharded or plan.tp > 1),
    }
    wrapped = {"fsdp_layer_s", "fsdp_rest_s"} if plan.tp > 1 else set()
    return frozenset({"launch_s", "rest_s"} | wrapped | {name for name, occurs in kinds.items() if occurs})


def layer_host_s(spec: RuntimeSpec, table: PlanTable, *, sparse: bool = False) -> tuple[Floats, Floats]:
    """Return the host seconds of one layer's forward and backward pass besides its launches, each of shape (plans,):
    means over micro batches, of which DDP may act on the last only.

    `sparse`: for a layer with experts.
    """
    host, reduced = spec.host, 1.0 if spec.ddp.every_micro_batch else 1.0 / table.micro_batches
    sharded = table.fully_sharded
    replicated = ~sharded & (table["dp_replicate"] > 1)
    added = (
        _sharding(table) * np.where(table.keeps_gathered, STAYS_SHARE, 1.0) * host.fsdp_layer_s
        + _dispatch_s(spec, table, sparse=sparse)
        + np.where((table["tp"] > 1) & (table["pp"] > 1), table["tp"] * host.tp_rank_layer_s, 0.0)
        + np.where(table["cp"] > 1, host.cp_layer_s, 0.0)
        + (_experts_s(host, table) if sparse else 0.0)
        + np.where(sharded & (table["tp"] > 1), host.fsdp_tp_layer_s, 0.0)
    )
    forward = host.forward_layer_s + FORWARD_SHARE * added
    backward = (
        host.backward_layer_s + (1 - FORWARD_SHARE) * added + np.where(replicated, reduced * host.ddp_layer_s, 0.0)
    )
    return forward, backward


def unit_host_s(context: CostContext, unit: Unit) -> tuple[Floats, Floats]:
    """Return the host seconds of a unit's forward and backward pass besides its launches and recomputation, each of
    shape (plans,), with those of updating its parameters where that is part of the backward pass.
    """
    updates = unit.tensors if OPTIMIZER_IN_BACKWARD in context.runtime.savers else 0
    nothing = np.zeros(len(context.table))
    forward_s, backward_s = nothing, nothing
    if unit.is_layer:
        forward_s, backward_s = layer_host_s(context.spec, context.table, sparse=unit.sparse)
    return forward_s, backward_s + (nothing + updates * UPDATE_LAUNCHES * context.spec.host.backward_launch_s)


def end_host_s(context: CostContext, tensors: int) -> Floats:
    """Return the host seconds of updating `tensors` parameters after the backward pass, shape (plans,)."""
    host = context.spec.host
    launches = 0.0 if OPTIMIZER_IN_BACKWARD in context.runtime.savers else tensors * host.update_launches
    return np.zeros(len(context.table)) + launches * host.launch_s


def accumulate_host_s(context: CostContext, tensors: int) -> Floats:
    """Return the host seconds of adding `tensors` gradients to those of earlier micro batches, shape (plans,)."""
    host = context.spec.host
    return np.zeros(len(context.table)) + tensors * host.accumulate_launches * host.backward_launch_s


def tiles_host_s(nbytes: Floats | float, *, keeps_memory: bool = False) -> Floats:
    """Return the host seconds to list the tiles of the gradients that FSDP2 reduces together, `nbytes` of them in each
    rank's shard.
    """
    tiles = np.asarray(nbytes) / TILE_BYTES
    fresh = 0.0 if keeps_memory else np.maximum(tiles - REUSED_TILES, 0.0)
    return np.asarray(TILE_S * tiles + FRESH_TILE_S * fresh)


def _sharding(table: PlanTable) -> Floats:
    """Return the share of full sharding's host cost that applies to each plan."""
    of_one = np.where(table.casts_own, CASTS_SHARE, WRAPPED_SHARE)
    return np.where(table.fully_sharded, np.where(table.state_shard["parameters"] > 1, 1.0, of_one), 0.0)


def pass_host_s(host: HostSpec, table: PlanTable) -> Floats:
    """Return the host seconds of a pass of a pipeline stage besides those of its layers, shape (plans,)."""
    return np.where(table["pp"] > 1, host.pp_pass_s, 0.0)


def step_host_s(host: HostSpec, context: CostContext) -> Floats:
    """Return the host seconds of a step during which the device is idle, shape (plans,): the step's own work and
    loading data, unless that is done ahead.
    """
    table = context.table
    cut = table.fully_sharded | (table["tp"] > 1) | (table["cp"] > 1)
    loading_s = np.where(loads_ahead(host, context), 0.0, loading_host_s(host, context))
    return np.asarray(host.step_s + np.where(cut, host.cut_step_s, 0.0) + loading_s)


def loads_ahead(host: HostSpec, context: CostContext) -> NDArray[np.bool_]:
    """Return for each plan whether data of the next step are loaded while the device is at work.

    In a pipeline the host waits for the device after its passes: ranks without a loss put one together there
    (torchtitan 0.2.2, train.py: forward_backward_step).
    """
    ahead = host.loads_ahead and not context.runtime.logs_each_step
    return np.asarray(ahead & (np.asarray(host.data_token_s) > 0) & (context.table["pp"] == 1))


def loading_host_s(host: HostSpec, context: CostContext) -> Floats:
    """Return the host seconds of loading a step's data, shape (plans,), on the slowest rank."""
    return host.data_token_s * loaded_tokens(context) * slowest(context.table["gpus"], host.data_spread)


def slowest(ranks: Floats, spread: float) -> Floats:
    """Return the time of the slowest of `ranks` processes that wait for each other, over their median.

    `spread` is their standard deviation over the median.
    """
    if not spread:
        return np.ones(len(ranks))
    counts, back = np.unique(ranks, return_inverse=True)
    largest = np.array([largest_of(n) for n in counts.tolist()])
    return np.minimum(1.0 + spread * largest, SLOWEST)[back]


def rest_host_s(host: HostSpec, table: PlanTable) -> Floats:
    """Return the host seconds of a step outside its layers, without those at its start, shape (plans,)."""
    return np.asarray(
        host.rest_s
        + _sharding(table) * host.fsdp_rest_s
        + np.where(~table.fully_sharded & (table["dp_replicate"] > 1), host.ddp_rest_s, 0.0)
        + np.where(table["tp"] > 1, host.tp_rest_s, 0.0)
        + np.where(table["cp"] > 1, host.cp_rest_s, 0.0)
    )


def host_synchronizes(host: HostSpec, table: PlanTable) -> NDArray[np.bool_]:
    """Return for each plan whether the host waits for the device after every pass."""
    if host.synchronizes == "pipeline":
        return np.asarray((table["pp"] > 1) & (table["virtual_stages"] == 1))
    return np.full(len(table), host.synchronizes == "always")


def again_host_s(spec: RuntimeSpec, table: PlanTable, *, sparse: bool = False) -> Floats:
    """Return the host seconds of recomputing one layer, besides launches: modules, wrapping, tensor parallelism, parts
    of sequences, experts. `sparse`: a layer with experts.
    """
    host = spec.host
    wrapping = np.zeros(len(table))
    for word in words(table.recompute):
        wrapping = np.where(table.recompute == word, host.wrapping_s(word), wrapping)
    wrapping = wrapping + np.where((table.recompute != "none") & table.fully_sharded, host.fsdp_again_s, 0.0)
    parts = _dispatch_s(spec, table, sparse=sparse) + (_experts_s(host, table) if sparse else 0.0)
    parts = np.where(wrapping > 0, parts, 0.0)  # else recomputation is part of a compiled layer's graph
    parts = parts + np.where(table["cp"] > 1, host.cp_layer_s, 0.0)
    return np.asarray(host.forward_layer_s + wrapping + FORWARD_SHARE * parts)


def loaded_tokens(context: CostContext) -> Floats:
    """Return the tokens that a rank loads for a step: whole sequences of all its micro batches, even if it computes
    only a part of each, plus the cost of each request in tokens. A pipeline requests all micro batches at once.
    """
    table = context.table
    batches = np.where(table["pp"] > 1, 1, table.micro_batches)
    return np.asarray(context.sizes["S"] * table["micro_batch_size"] * table.micro_batches + BATCH_TOKENS * batches)
