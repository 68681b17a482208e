"""Peak memory of every pipeline rank, by category.

Allocated memory peaks when the first backward pass starts: activations of all micro batches in flight, the loss turning
round on the last rank, layers gathered for use. What the allocator *reserves* is more: it keeps a pool per CUDA stream
and a block freed on one stream is not reused on another, so gradients and gathered parameters that FSDP allocates on
its communication streams add to the peak of the compute stream even when they never coincide.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.closed_form.layer_cost import BlockCost
from simulator.columns.plan_table import Floats
from simulator.config.model import Model
from simulator.pipeline.schedules import SPLIT_BACKWARD
from simulator.pipeline.stages import StageLayout, head_in_flight, in_flight
from simulator.runtimes.library import ModelOperators
from simulator.step.context import CostContext
from simulator.step.held import (
    Parameters,
    State,
    between_stages_bytes,
    head_cached_bytes,
    head_left_bytes,
    head_peak_bytes,
    placeholder_bytes,
    state_bytes,
)
from simulator.step.offload import held_bytes, host_bytes, offloaded
from simulator.step.symmetric_memory import symmetric_bytes
from simulator.step.traffic import has_replicas
from simulator.step.zero import zero_buffers

# Bytes beside the allocator's and NCCL's: CUDA's context and loaded kernels. Source: a run that filled both of its two H200 and
# retried allocations (2026-11-23.1/14 of examples/validation/fresh.jsonl) held 137.8 of 139.8 GiB, beside 1.1 of communicators.
CONTEXT_BYTES = 0.9 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryColumns:
    """Bytes, shape (plans, pipeline ranks); ranks a plan does not have hold zero."""

    categories: dict[str, Floats]
    peak_bytes: Floats
    reserved_bytes: Floats
    host_bytes: Floats  # of offloaded state

    def scaled(self, factor: float) -> MemoryColumns:
        """Return `factor` times the bytes: what runs of a runtime took over what its description says."""
        if factor == 1.0:
            return self
        return MemoryColumns(
            categories={name: factor * column for name, column in self.categories.items()},
            peak_bytes=factor * self.peak_bytes,
            reserved_bytes=factor * self.reserved_bytes,
            host_bytes=self.host_bytes,
        )

    @property
    def worst_rank(self) -> NDArray[np.int64]:
        worst: NDArray[np.int64] = np.argmax(self.reserved_bytes, axis=1)
        return worst


def memory_columns(
    model: Model,
    operators: ModelOperators,
    context: CostContext,
    layout: StageLayout,
    blocks: dict[str, BlockCost],
    parameters: Parameters,
    *,
    at_least: bool = False,
) -> MemoryColumns:
    """Return peak memory of every pipeline rank under every plan; with `at_least` a lower bound where schedules would
    have to be counted out.
    """
    table, spec = context.table, operators.spec
    exists, first, last = layout.exists, layout.first, layout.last
    shared, experts = parameters.of_stage(layout)

    def sharded(kind: str) -> Floats:
        return shared / table.state_shard[kind][:, None] + experts / table.expert_shard[kind][:, None]

    widths = state_bytes(context)
    param_bytes, gradient_bytes = widths["parameters"], widths["gradients"]
    fully_sharded = table.fully_sharded[:, None]

    # Layers in flight under full sharding: the one computing, those gathered ahead, and the two ends of the network,
    # which are units of their own. Backward holds their unsharded gradients until they are reduced.
    per_layer = np.maximum(parameters.dense_layer, (parameters.moe_layer + parameters.experts) * (model.moe_layers > 0))
    ends = np.maximum(first * parameters.embedding[:, None], last * parameters.head[:, None])
    window = np.where(
        table.keeps_gathered[:, None], shared + experts, (1.0 + spec.fsdp.prefetch) * per_layer[:, None] + ends
    )
    gathered = np.where(fully_sharded, window * context.dtype_bytes("compute"), 0.0)
    # Autocast keeps a 16-bit copy of every weight that products use from its first use to the end of the forward pass,
    # and backward keeps those of layers that are not run again; embeddings are looked up as they are. Compiled blocks cast
    # by themselves, and autocast remembers nothing of theirs.
    cast = table.conditions["autocast"] & (param_bytes > context.dtype_bytes("compute"))
    cast_bytes = np.where(cast[:, None], context.dtype_bytes("compute"), 0.0)
    again = np.zeros_like(shared)
    for mode, (in_dense, in_moe) in layout.by_mode.items():
        if mode != "none":
            again = again + spec.recompute[mode].layers * _of_layers(parameters, (in_dense, in_moe))
    if blocks["dense"].bounds:  # whatever the mode, copies are there together at the end of the forward pass
        again = again + _of_layers(parameters, layout.by_mode.get("none"))
    looked_up = np.where(model.tied_embeddings, 0.0, first * parameters.embedding[:, None])
    gathered = np.where(cast[:, None], (shared + experts - again - looked_up) * cast_bytes, gathered)
    zero = zero_buffers(context, shared + experts, sharded("optimizer"))
    sent_bytes = 0.0 if spec.zero else context.dtype_bytes("reduce")  # of a module at once
    unsharded_gradients = np.maximum(per_layer[:, None], ends) * (
        context.dtype_bytes(spec.state.unsharded_gradient_dtype) + sent_bytes
    )
    # A data-parallel reduction through buckets may hold them beside the gradients.
    copied = spec.ddp.bucket_copy & (table["dp_replicate"] > 1)
    buckets = np.where(copied[:, None], (shared + experts) * gradient_bytes, 0.0)
    buckets = buckets + _placeholders(operators, context, *layout.layers)
    # Micro batches of a pipeline add up whole gradients, in the type they are reduced in, until the last one.
    adding = (table["pp"] > 1)[:, None] * (shared + experts) * context.dtype_bytes("reduce")
    reduction = np.where(fully_sharded, unsharded_gradients + adding, buckets) + zero.standing + zero.reducing
    passing = np.where(fully_sharded, unsharded_gradients, 0.0) + zero.reducing

    flying = in_flight(table, layout.rank, at_least=at_least)
    saved = first * blocks["embedding"].saved_bytes["none"][:, None]
    for mode, (in_dense, in_moe) in layout.by_mode.items():
        saved = saved + in_dense * blocks["dense"].saved_bytes[mode][:, None]
        if "moe" in blocks:
            saved = saved + in_moe * blocks["moe"].saved_bytes[mode][:, None]
    head_saved = blocks["head"].saved_bytes["none"]
    head_kept = (head_saved + head_cached_bytes(context)) * head_in_flight(table, at_least=at_least)
    activations = saved * flying + last * head_kept[:, None]
    # Micro batches in flight hold what a stage received: most of them is least beside.
    most = np.isin(table.schedule, SPLIT_BACKWARD)[:, None] & at_least
    received = np.where(most, np.maximum(table.micro_batches[:, None], flying), flying)
    activations = activations + between_stages_bytes(context, first, last, received)
    # A recomputed block's intermediates live again, one block at a time.
    widest = np.max([blocks[name].everything_bytes for name in ("dense", "moe") if name in blocks], axis=0)
    wrapped = sum((a + b for mode, (a, b) in layout.by_mode.items() if mode != "none"), np.zeros_like(shared))
    recomputed = np.where(wrapped > 0, widest[:, None] + per_layer[:, None] * cast_bytes, 0.0)
    loss = last * np.maximum(head_peak_bytes(context) - head_saved, 0.0)[:, None]
    remembered = np.zeros_like(again) if context.runtime.compile else again * cast_bytes
    turning = np.maximum(np.maximum(loss, recomputed * exists), remembered * exists)
    # Buckets are there from the first gradient, when the loss has turned round.
    reduction = reduction + np.maximum(recomputed + zero.buckets - turning, 0.0)

    categories: dict[str, Floats] = {
        **{str(kind): sharded(kind) * held_bytes(context, kind)[:, None] for kind in widths},
        "activations": activations,
        "gathered_parameters": gathered,
        "gradient_buffers": reduction,
        "loss_and_recompute": turning,
        "symmetric_buffers": symmetric_bytes(context, *layout.layers),
    }
    categories = {k: np.where(exists, v, 0.0) for k, v in categories.items()}
    everything = sum(categories.values(), np.zeros_like(shared))
    # The loss and a unit's whole gradient do not coincide: under full sharding gradients appear as activations go, and
    # shards of them are there before only if an earlier micro batch has left them.
    # Main gradients, and a flat partition of them, are there from the beginning.
    appear = (spec.state.gradient_dtype != "reduce") & ~(fully_sharded & (spec.zero is not None))
    alone = (table.micro_batches <= 1)[:, None]
    fresh = fully_sharded & appear & ((table["pp"] > 1)[:, None] | alone)
    whole = ~fully_sharded & appear & alone & spec.state.gradients_freed
    early = everything - np.where(exists, passing, 0.0) - np.where(fresh | whole, categories["gradients"], 0.0)
    # At the end each unit's whole gradient turns into its shard: what is left of the ones makes room for the others.
    turned = np.where(fully_sharded & exists, np.minimum(adding, categories["gradients"]), 0.0)
    late = everything - categories["activations"] - categories["loss_and_recompute"] - turned + exists * zero.update
    peak = np.maximum(early, late)
    # One pool per stream: the compute stream's peak and the communication streams' peak add up.
    # Whole gradients come from the compute stream's own pool, where activations have made room for them.
    reserved = np.where(whole, peak, np.maximum(everything, late)) + last * head_left_bytes(context)[:, None]
    # Replicas keep what they sum to the end of a backward pass, beside the gradients of micro batches before.
    beside = ~alone & (table["pp"] <= 1)[:, None] | (context.dtype_bytes("reduce") != gradient_bytes)
    summed = fully_sharded & has_replicas(table)[:, None] & beside
    reserved = reserved + np.where(summed, sharded("gradients") * context.dtype_bytes("reduce"), 0.0)
    away: list[State] = [kind for kind in widths if offloaded(context, kind).any()]
    on_host = sum((sharded(kind) * host_bytes(context, kind)[:, None] for kind in away), np.zeros_like(shared))
    return MemoryColumns(
        categories=categories,
        peak_bytes=peak,
        reserved_bytes=np.where(exists, reserved, 0.0),
        host_bytes=np.where(exists, on_host, 0.0),
    )


def _of_layers(parameters: Parameters, layers: tuple[Floats, Floats] | None) -> Floats | float:
    """Return the parameters of so many dense layers and layers with experts; both of shape (plans, ranks)."""
    if layers is None:
        return 0.0
    dense, moe = layers
    return dense * parameters.dense_layer[:, None] + moe * (parameters.moe_layer + parameters.experts)[:, None]


def _placeholders(
    operators: ModelOperators, context: CostContext, dense: NDArray[np.int64], moe: NDArray[np.int64]
) -> Floats:
    """Return those bytes by pipeline rank, as it holds `dense` and `moe` layers; the head's come and go."""
    total = np.zeros(dense.shape)
    both = operators.dense_layer + operators.moe_layer
    for held, kind in (
        ((dense > 0) & (moe == 0), operators.dense_layer),
        ((dense == 0) & (moe > 0), operators.moe_layer),
        ((dense > 0) & (moe > 0), both),
    ):
        if held.any():
            total = np.where(held, placeholder_bytes(kind, context)[:, None], total)
    return total
