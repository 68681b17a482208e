"""Data-parallel traffic and the optimizer of many plans at once: what compute hides, what it does not, what it costs.

The closed form's side of `simulator.step.traffic`, which writes the same traffic as instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_table import Floats
from simulator.kernels.roofline import efficiency
from simulator.pipeline.stages import StageLayout
from simulator.runtimes.library import ModelOperators, RuntimeSpec
from simulator.step.context import CostContext
from simulator.step.held import Parameters
from simulator.step.offload import ADD_PASSES, copy_bytes_per_s, host_gradient_bytes, offloaded, update_bytes_per_s
from simulator.step.traffic import bucket_elements, has_replicas
from simulator.step.update import update_bytes, updated_dtype
from simulator.step.zero import bucket_copies_bytes


def buckets_of(spec: RuntimeSpec, nbytes: Floats) -> Floats:
    """Return into how many reductions data-parallel gradients of `nbytes` go."""
    size = spec.ddp.bucket_bytes
    return np.maximum(np.ceil(nbytes / size), 1.0) if size else np.ones_like(nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    exposed_s: Floats
    fetched_s: (
        Floats  # of it, gathers of what a sharded optimizer has updated, where the first forward pass waits for them
    )
    copies_s: Floats
    contention_s: Floats
    fill_s: Floats  # what the ranks before and after add to the time the pipe takes to fill and drain


def data_parallel(
    operators: ModelOperators,
    context: CostContext,
    layout: StageLayout,
    parameters: Parameters,
    forward: Floats,
    backward: Floats,
    slowest: NDArray[np.int64],
) -> DataParallel:
    """Parameter gathering and gradient reduction of a step: what compute hides, what it does not, what it costs it."""
    table, spec, groups = context.table, operators.spec, context.groups
    m = table.micro_batches
    rows = np.arange(len(table))
    dense, moe = layout.layers
    shared, experts = parameters.of_stage(layout)
    shared, experts = shared[rows, slowest], experts[rows, slowest]
    count = np.maximum((dense + moe)[rows, slowest], 1.0)

    compute_bytes, reduce_bytes = context.dtype_bytes("gathered"), context.dtype_bytes("reduce")
    full = table.fully_sharded
    optimizer_only = ~full & (table.state_shard["optimizer"] > 1)
    gathers = np.where(table.keeps_gathered, 1.0, 2.0 * m)
    reductions = np.where(table["pp"] > 1, 1.0, m)

    gather = groups.time_s("all_gather", "fsdp", shared * compute_bytes) + groups.time_s(
        "all_gather", "expert_fsdp", experts * compute_bytes
    )
    reduce = groups.time_s("reduce_scatter", "fsdp", shared * reduce_bytes) + groups.time_s(
        "reduce_scatter", "expert_fsdp", experts * reduce_bytes
    )
    # Shards that are kept in host memory come from there before each gather.
    owned = owned_elements(context, shared, experts)
    if table.offloaded["parameters"].any():
        fetch = owned * context.dtype_bytes("param") / copy_bytes_per_s(context)
        gather = gather + np.where(table.offloaded["parameters"], fetch, 0.0)
    # Hybrid sharding sums the shards over replicas, behind each reduce-scatter.
    shard = shared / table["sharded_over"] + experts / np.maximum(table.expert_shard["gradients"], 1.0)
    replicas = groups.time_s("all_reduce", "replicate", shard * reduce_bytes)
    replicas = np.where(full & has_replicas(table), replicas, 0.0)

    # What is copied in and out of flat buffers runs on the compute stream, and so hides traffic like any kernel.
    hbm = context.roofline.memory_bytes_per_s
    packing = context.roofline.packing_bytes_per_s((shared + experts) / count * compute_bytes)
    packs = full & spec.fsdp.copy_in_copy_out
    copy_out = np.where(packs, 2 * (shared + experts) * compute_bytes / packing, 0.0)
    copy_in = np.where(packs, (shared + experts) * (compute_bytes + reduce_bytes) / packing, 0.0)
    through_buckets = (shared + experts) * bucket_copies_bytes(context) / hbm
    if spec.zero is not None:
        copy_in = np.where(full, through_buckets, 0.0)
    copies = gathers * copy_out + reductions * copy_in
    # Beside compute a collective takes longer than alone, so it hides less.
    calibration = context.calibration
    beside = calibration.contention_of(*FSDP_OPS) if calibration is not None else None
    slowed = beside.collective if beside is not None else 1.0
    # Fully sharded: each layer's traffic hides behind the layer before it; the first gather and the last reduction
    # have nothing to hide behind.
    again = gathers > 1
    forward_window, backward_window = forward + copy_out, backward + copy_in + np.where(again, copy_out, 0.0)
    passes_of_gather = gathers / np.where(again, 2.0, 1.0)
    first, last_one = gather / count, (reduce + replicas) / count
    if context.calibration is not None:
        over = replicas / np.maximum(reduce, 1e-12)
        first, last_one = _ends(context, parameters, has_first=slowest == 0, replicas=over)
    exposed_forward = first + np.maximum(slowed * gather - forward_window, 0.0) * (1 - 1 / count)
    # Replicas have a communicator, and a stream, of their own.
    busiest = slowed * np.maximum(np.where(again, gather, 0.0) + reduce, replicas)
    exposed_backward = last_one + np.maximum(busiest - backward_window, 0.0) * (1 - 1 / count)
    sharded_exposed = passes_of_gather * exposed_forward + reductions * exposed_backward
    sharded_total = gathers * gather + reductions * (reduce + replicas)
    # Gradients of further micro batches are added up by kernels of their own, unless a product does it on the fly.
    adding = np.zeros(len(table))
    if spec.state.gradient_dtype != "reduce":
        width = context.dtype_bytes(spec.state.gradient_dtype)
        piped = np.where(table["pp"] > 1, m * (compute_bytes + 2 * reduce_bytes), 0.0)
        added = np.where(full, piped, (m - 1) * 3 * width) * (shared + experts)
        copies = copies + added / hbm
        adding = (compute_bytes + 2 * reduce_bytes) * (shared + experts) / hbm

    # The CPU adds up gradients that are kept in host memory.
    sends = full & offloaded(context, "gradients") & (table["pp"] == 1)
    if sends.any():
        on_host = ADD_PASSES * owned * host_gradient_bytes(context) / update_bytes_per_s(context)
        copies = copies + np.where(sends, (m - 1) * on_host, 0.0)

    # Replicated parameters: gradients are summed once a step, behind the last backward where the runtime overlaps;
    # a sharded optimizer scatters them and gathers parameters back.
    buckets = buckets_of(spec, (shared + experts) * reduce_bytes)
    reduce_all = buckets * (
        groups.time_s("all_reduce", "dp", shared * reduce_bytes / buckets)
        + groups.time_s("all_reduce", "expert_dp", experts * reduce_bytes / buckets)
    )
    last = np.minimum(1 / count, 1 / buckets) if spec.ddp.bucket_bytes else 1 / count
    hidden = np.minimum(reduce_all, backward) * (1 - last) if spec.ddp.overlap else np.zeros(len(table))
    # With sharded gradients (ZeRO-2) there is nowhere to add up whole ones: each micro batch's are scattered.
    scatters = np.where((table.state_shard["gradients"] > 1) & (table["pp"] == 1), m, 1.0)
    # Scattered behind a backward, gathered behind the next step's first forward, all but a layer's share.
    zero_2 = table.state_shard["gradients"] > 1
    # Overlapped, they go out in buckets that are no smaller than a layer.
    behind = ~zero_2 & spec.ddp.sharded_overlap
    sent = np.where(behind, np.maximum((shared + experts) / np.maximum(bucket_elements(context), 1.0), 1.0), 1.0)
    sent = np.minimum(sent, count)
    going, coming = (
        sent * (groups.time_s(op, "dp", shared * width / sent) + groups.time_s(op, "expert_dp", experts * width / sent))
        for op, width in (
            ("all_reduce" if spec.ddp.sums_whole else "reduce_scatter", reduce_bytes),
            ("all_gather", compute_bytes),
        )
    )
    scattered = scatters * going + coming
    copies = copies + np.where(optimizer_only, scatters * through_buckets, 0.0)
    sends_behind = np.where(zero_2, spec.ddp.overlap or spec.ddp.sharded_overlap, spec.ddp.sharded_overlap)
    fetches_behind = ~zero_2 & spec.ddp.sharded_overlap & spec.ddp.gathers_overlap
    fetches_hidden = fetches_behind * (1 - 1 / count) * np.minimum(coming, forward)
    sharded_hidden = sends_behind * (1 - 1 / count) * scatters * np.minimum(going, backward) + fetches_hidden
    times = np.where((table["pp"] == 1) & spec.ddp.every_micro_batch, m, 1.0)
    replicated_exposed = np.where(optimizer_only, scattered - sharded_hidden, times * (reduce_all - hidden))
    hidden = times * hidden

    exposed = np.where(full, sharded_exposed, replicated_exposed)
    overlapped = np.where(
        full, np.maximum(sharded_total - sharded_exposed, 0.0), np.where(optimizer_only, sharded_hidden, hidden)
    )
    share = np.where(full, sm_share(context, *FSDP_OPS), sm_share(context, "all_reduce"))
    contention = np.maximum(overlapped, 0.0) * share
    # Each rank gathers layer by layer when the first micro batch comes by, and each adds gradients up as it leaves.
    once = exposed_forward + 2 * (shared + experts) * compute_bytes / hbm + np.where(table["pp"] > 1, adding, 0.0)
    fill = np.where(full & (table["pp"] > 1), (table["pp"] - 1) * once, 0.0)
    fetched = np.where(optimizer_only & fetches_behind, coming - fetches_hidden, 0.0)
    return DataParallel(exposed_s=exposed, fetched_s=fetched, copies_s=copies, contention_s=contention, fill_s=fill)


def _ends(
    context: CostContext, parameters: Parameters, *, has_first: NDArray[np.bool_], replicas: Floats
) -> tuple[Floats, Floats]:
    """Return seconds of (the gathers before the first layer, the reductions after the last) unit by unit.

    The embedding is a unit of its own: its gather and the first layer's have nothing but its lookup to hide behind, and
    its gradient, made last, is reduced when nothing else is left. Next to a few layers it weighs more than they do. The
    plain rule, an equal share for every layer, is what uncalibrated efficiencies were settled with.
    """
    groups, table = context.groups, context.table
    embedding = np.where(has_first, parameters.embedding, 0.0)
    layer = np.broadcast_to(parameters.dense_layer, embedding.shape)
    gather = sum(
        (groups.time_s("all_gather", "fsdp", part * context.dtype_bytes("compute")) for part in (embedding, layer)),
        np.zeros(len(table)),
    )
    reduce = groups.time_s(
        "reduce_scatter", "fsdp", np.where(has_first, embedding, layer) * context.dtype_bytes("reduce")
    )
    return gather, reduce * (1.0 + replicas)


FSDP_OPS = ("all_gather", "reduce_scatter")


def sm_share(context: CostContext, *ops: str) -> float:
    """Return the compute lost for each second of collectives beside it: the share of the SMs that they hold, or what
    was measured of `ops`.
    """
    calibration = context.calibration
    beside = calibration.contention_of(*ops) if calibration is not None else None
    if beside is not None:
        return beside.lost
    gpu = context.roofline.gpu
    return efficiency(gpu.architecture).nccl_sms / gpu.sm_count


def owned_elements(context: CostContext, shared: Floats, experts: Floats) -> Floats:
    """Return the elements of parameters that a rank updates, of `shared` ones before sharding and routed experts apart.

    Plans are the last dimension, of the arguments as well.
    """
    table = context.table
    return np.asarray(shared / table.state_shard["optimizer"] + experts / table.expert_shard["optimizer"])


def optimizer_s(context: CostContext, layout: StageLayout, parameters: Parameters) -> Floats:
    """Return seconds of gradient clipping and the optimizer update on the rank that moves most."""
    shared, experts = parameters.of_stage(layout)
    away = context.table.offloaded["optimizer"]
    owned = owned_elements(context, shared.T, experts.T).T
    moved = np.asarray(update_bytes(context.runtime, np.where(away[:, None], 0.0, owned), shared + experts))
    seconds = moved.max(axis=1) / context.roofline.update_bytes_per_s(updated_dtype(context.runtime))
    return np.asarray(seconds + (_on_host_s(context, owned.max(axis=1)) if away.any() else 0.0))


def _on_host_s(context: CostContext, owned: Floats) -> Floats:
    """Return seconds of an update by the CPU, with what moves there and back around it; 0 where the GPU updates."""
    table, link = context.table, copy_bytes_per_s(context)
    seconds = np.asarray(update_bytes(context.runtime, owned, 0.0)) / update_bytes_per_s(context)
    late = ~(table.fully_sharded & offloaded(context, "gradients"))
    seconds = seconds + np.where(late, owned * host_gradient_bytes(context) / link, 0.0)
    back = np.where(table.offloaded["parameters"], 0.0, owned * context.dtype_bytes("param") / link)
    return np.where(table.offloaded["optimizer"], seconds + back, 0.0)
