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

from simulator.analytical.layer_cost import BlockCost
from simulator.calibration.calibration import RuntimeCosts
from simulator.columns.plan_table import Floats
from simulator.config.model import Model
from simulator.pipeline.schedules.registry import where
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
from topology.units import GIB

# Bytes besides the allocator's and NCCL's: CUDA's context and loaded kernels. Source: a run that filled both of its two
# H200 and retried allocations (2026-11-23.1/14 of examples/validation/fresh.jsonl) held 137.8 of 139.8 GiB, alongside
# 1.1 of communicators.
CONTEXT_BYTES = 0.9 * GIB
STATE = ("parameters", "gradients", "gradient_buffers", "optimizer")  # what stays from step to step


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryColumns:
    """Bytes, shape (plans, pipeline ranks); ranks a plan does not have hold zero."""

    categories: dict[str, Floats]
    peak_bytes: Floats
    reserved_bytes: Floats
    host_bytes: Floats  # of offloaded state

    def scaled(self, costs: RuntimeCosts) -> MemoryColumns:
        """Return what runs of a runtime took where its description says this."""
        if costs.reserved == costs.activations == 1.0:
            return self
        state = self.state_bytes
        return MemoryColumns(
            categories={
                name: costs.held_bytes(column, column if name in STATE else 0.0)
                for name, column in self.categories.items()
            },
            peak_bytes=costs.held_bytes(self.peak_bytes, state),
            reserved_bytes=costs.held_bytes(self.reserved_bytes, state),
            host_bytes=self.host_bytes,
        )

    @property
    def state_bytes(self) -> Floats:
        """Return the bytes of state on every rank."""
        return np.asarray(sum(self.categories[name] for name in STATE))

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
    ranks = _Ranks(model, operators, context, layout, blocks, parameters)
    exists, widths = layout.exists, state_bytes(context)
    turning, recomputed = ranks.loss_and_recompute()
    # Buckets are there from the first gradient, when the loss ends.
    buckets = np.maximum(recomputed + ranks.zero.buckets - turning, 0.0)
    categories: dict[str, Floats] = {
        **{str(kind): ranks.sharded(kind) * held_bytes(context, kind)[:, None] for kind in widths},
        "activations": ranks.activations(at_least=at_least),
        "gathered_parameters": ranks.gathered(),
        "gradient_buffers": ranks.gradient_buffers() + buckets,
        "loss_and_recompute": turning,
        "symmetric_buffers": symmetric_bytes(context, *layout.layers),
    }
    categories = {k: np.where(exists, v, 0.0) for k, v in categories.items()}
    peak, reserved = ranks.peaks(categories)
    away: list[State] = [kind for kind in widths if offloaded(context, kind).any()]
    on_host = sum((ranks.sharded(kind) * host_bytes(context, kind)[:, None] for kind in away), np.zeros_like(peak))
    return MemoryColumns(
        categories=categories,
        peak_bytes=peak,
        reserved_bytes=np.where(exists, reserved, 0.0),
        host_bytes=np.where(exists, on_host, 0.0),
    )


class _Ranks:
    """Bytes of each kind on every pipeline rank of every plan, all of shape (plans, ranks)."""

    def __init__(
        self,
        model: Model,
        operators: ModelOperators,
        context: CostContext,
        layout: StageLayout,
        blocks: dict[str, BlockCost],
        parameters: Parameters,
    ) -> None:
        self.operators, self.context, self.layout, self.blocks = operators, context, layout, blocks
        self.parameters, self.spec, self.table = parameters, operators.spec, context.table
        self.shared, self.experts = parameters.of_stage(layout)
        self.whole = self.shared + self.experts  # parameters of the rank before they are sharded
        self.fully_sharded = self.table.fully_sharded[:, None]
        layer = np.maximum(parameters.dense_layer, (parameters.moe_layer + parameters.experts) * (model.moe_layers > 0))
        self.per_layer = layer[:, None]
        # The two ends of the network are units of their own.
        self.embedding = layout.first * parameters.embedding[:, None]
        self.ends = np.maximum(self.embedding, layout.last * parameters.head[:, None])
        self.looked_up = np.where(model.tied_embeddings, 0.0, self.embedding)
        self.zero = zero_buffers(context, self.whole, self.sharded("optimizer"))
        # Autocast keeps a 16-bit copy of every weight that products use from its first use to the end of the forward
        # pass, and backward keeps those of layers that are not run again; embeddings are looked up as they are.
        # Compiled blocks cast by themselves, and autocast remembers nothing of theirs.
        compute = context.dtype_bytes("compute")
        self.cast = (self.table.conditions["autocast"] & (state_bytes(context)["parameters"] > compute))[:, None]
        self.cast_bytes = np.where(self.cast, compute, 0.0)
        self.again = self._run_again()

    def sharded(self, kind: State) -> Floats:
        """Return how many parameters have their `kind` of state on the rank."""
        shared = self.shared / self.table.state_shard[kind][:, None]
        return shared + self.experts / self.table.expert_shard[kind][:, None]

    def _run_again(self) -> Floats:
        """Return the parameters of layers that recomputation runs again."""
        again = np.zeros_like(self.shared)
        for mode, layers in self.layout.by_mode.items():
            if mode != "none":
                again = again + self.spec.recompute[mode].layers * _of_layers(self.parameters, layers)
        if self.blocks["dense"].bounds:  # whatever the mode, copies are there together at the end of the forward pass
            again = again + _of_layers(self.parameters, self.layout.by_mode.get("none"))
        return again

    def gathered(self) -> Floats:
        """Return parameters gathered for use: the layer computing, those ahead, and the ends; or copies that autocast
        made.
        """
        ahead = (1.0 + self.spec.fsdp.prefetch) * self.per_layer + self.ends
        window = np.where(self.table.keeps_gathered[:, None], self.whole, ahead)
        gathered = np.where(self.fully_sharded, window * self.context.dtype_bytes("compute"), 0.0)
        return np.where(self.cast, (self.whole - self.again - self.looked_up) * self.cast_bytes, gathered)

    def unsharded_gradients(self) -> Floats:
        """Return the gradients of one unit, which backward holds until they are reduced, and what is sent of them."""
        sent_bytes = 0.0 if self.spec.zero else self.context.dtype_bytes("reduce")  # of a module at once
        held = self.context.dtype_bytes(self.spec.state.unsharded_gradient_dtype) + sent_bytes
        return np.where(self.fully_sharded, np.maximum(self.per_layer, self.ends) * held, 0.0)

    def added_gradients(self) -> Floats:
        """Return whole gradients that micro batches of a pipeline add up, in the type they are reduced in, until the
        last one.
        """
        return (self.table["pp"] > 1)[:, None] * self.whole * self.context.dtype_bytes("reduce")

    def gradient_buffers(self) -> Floats:
        """Return what reducing gradients holds besides the gradients themselves."""
        # A data-parallel reduction through buckets may hold them besides the gradients.
        copied = self.spec.ddp.bucket_copy & (self.table["dp_replicate"] > 1)
        buckets = np.where(copied[:, None], self.whole * state_bytes(self.context)["gradients"], 0.0)
        buckets = buckets + _placeholders(self.operators, self.context, *self.layout.layers)
        held = np.where(self.fully_sharded, self.unsharded_gradients() + self.added_gradients(), buckets)
        return held + self.zero.standing + self.zero.reducing

    def activations(self, *, at_least: bool) -> Floats:
        """Return what forward passes saved, and stages received, of all micro batches in flight."""
        table, layout, blocks = self.table, self.layout, self.blocks
        pairs_in_flight = in_flight(table, layout.rank, at_least=at_least)
        saved = layout.first * blocks["embedding"].saved_bytes["none"][:, None]
        ahead = np.zeros_like(saved)  # of passes at the same time a layer of the one is there before the other's goes
        for mode, (in_dense, in_moe) in layout.by_mode.items():
            saved = saved + in_dense * blocks["dense"].saved_bytes[mode][:, None]
            if "moe" in blocks:
                saved = saved + in_moe * blocks["moe"].saved_bytes[mode][:, None]
                ahead = np.maximum(ahead, (in_moe > 0) * blocks["moe"].saved_bytes[mode][:, None])
        head = blocks["head"].saved_bytes["none"] + head_cached_bytes(self.context)
        in_head = head * head_in_flight(table, at_least=at_least)
        # Micro batches in flight hold what a stage received: most of them is least besides.
        most = where(table.schedule, lambda kind: kind.splits_backward)[:, None] & at_least
        received = np.where(most, np.maximum(table.micro_batches[:, None], pairs_in_flight), pairs_in_flight)
        activations = (
            saved * pairs_in_flight + layout.last * in_head[:, None] + np.where(table.paired[:, None], ahead, 0.0)
        )
        return activations + between_stages_bytes(self.context, layout.first, layout.last, received)

    def loss_and_recompute(self) -> tuple[Floats, Floats]:
        """Return the most that the loss, or a block run again, takes for a moment; and what such a block takes."""
        blocks, layout = self.blocks, self.layout
        # A recomputed block's intermediates live again, one block at a time.
        widest = np.max([blocks[name].everything_bytes for name in ("dense", "moe") if name in blocks], axis=0)
        wrapped = sum((a + b for mode, (a, b) in layout.by_mode.items() if mode != "none"), np.zeros_like(self.shared))
        recomputed = np.where(wrapped > 0, widest[:, None] + self.per_layer * self.cast_bytes, 0.0)
        head = head_peak_bytes(self.context) - blocks["head"].saved_bytes["none"]
        loss = layout.last * np.maximum(head, 0.0)[:, None]
        copies = np.zeros_like(self.again) if self.context.runtime.compile else self.again * self.cast_bytes
        turning = np.maximum(np.maximum(loss, recomputed * layout.exists), copies * layout.exists)
        return turning, recomputed

    def peaks(self, categories: dict[str, Floats]) -> tuple[Floats, Floats]:
        """Return the most allocated in a step, and what the allocator reserves for it."""
        table, state, exists = self.table, self.spec.state, self.layout.exists
        everything = sum(categories.values(), np.zeros_like(self.shared))
        # The loss and a unit's whole gradient do not coincide: under full sharding gradients appear as activations go,
        # and shards of them are there before only if an earlier micro batch has left them. Main gradients, and a flat
        # partition of them, are there from the beginning.
        appear = (state.gradient_dtype != "reduce") & ~(self.fully_sharded & (self.spec.zero is not None))
        single = (table.micro_batches <= 1)[:, None]
        fresh = self.fully_sharded & appear & ((table["pp"] > 1)[:, None] | single)
        whole = ~self.fully_sharded & appear & single & state.gradients_freed
        passing = self.unsharded_gradients() + self.zero.reducing
        early = everything - np.where(exists, passing, 0.0) - np.where(fresh | whole, categories["gradients"], 0.0)
        # At the end each unit's whole gradient turns into its shard: what is left of the ones makes room for the
        # others.
        adding = self.added_gradients()
        added = np.where(self.fully_sharded & exists, np.minimum(adding, categories["gradients"]), 0.0)
        backward = categories["activations"] + categories["loss_and_recompute"]
        late = everything - backward - added + exists * self.zero.update
        peak = np.maximum(early, late)
        # One pool per stream: the compute stream's peak and the communication streams' peak add up.
        # Whole gradients come from the compute stream's own pool, where activations have made room for them.
        reserved = np.where(whole, peak, np.maximum(everything, late))
        reserved = reserved + self.layout.last * head_left_bytes(self.context)[:, None]
        return peak, reserved + self._summed_over_replicas(single)

    def _summed_over_replicas(self, single: NDArray[np.bool_]) -> Floats:
        """Return what replicas keep of their sums to the end of a backward pass, besides the gradients of micro batches
        before.
        """
        reduce_bytes, table = self.context.dtype_bytes("reduce"), self.table
        kept = ~single & (table["pp"] <= 1)[:, None] | (reduce_bytes != state_bytes(self.context)["gradients"])
        summed = self.fully_sharded & has_replicas(table)[:, None] & kept
        return np.where(summed, self.sharded("gradients") * reduce_bytes, 0.0)


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
