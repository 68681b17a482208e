"""The least memory of every pipeline rank: a bound below what the allocator's replay finds.

`simulator.memory` replays a plan's allocations one by one; its result is what users see. A search must first rule out
plans that cannot fit, many at a time. This module adds up what is certainly allocated together at a few moments of a
step, once the optimizer has its state: a rank's first backward pass begins with the activations of all micro batches in
flight; later ones begin with fewer activations and with gradients; at the end there are gradients and the temporaries
of the update.

The allocator *reserves* a pool for each CUDA stream, and a block freed on one stream is not reused on another. So it
reserves at least the sum of the largest amounts that each stream has allocated (compute, gathers, reductions), even
where these do not coincide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from simulator.analytical.rank_memory import RankMemory
from simulator.calibration.calibration import RuntimeCosts
from simulator.columns.plan_table import Floats
from simulator.kernels.operators import tensor_bytes
from simulator.pipeline.schedules.registry import where
from simulator.runtimes.library import turns_at_once
from simulator.step.held import State, autocast_remembers, state_bytes, workspace_bytes
from simulator.step.offload import host_bytes, offloaded
from simulator.step.traffic import has_replicas
from topology.units import GIB

# Bytes of CUDA's context and loaded kernels, which neither the allocator nor NCCL counts. Source: a run that filled
# both of its two H200 and retried allocations (2026-11-23.1/14 of examples/validation/fresh.jsonl) held 137.8 of 139.8
# GiB, alongside 1.1 of communicators.
CONTEXT_BYTES = 0.9 * GIB
# A bound may equal what is allocated, except for the gradients of a few vectors and the rounding of sizes.
ROUNDED = 1.0 - 1e-5
STATE = ("parameters", "gradients", "gradient_buffers", "optimizer")  # kept from step to step


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryColumns:
    """Bytes, shape (plans, pipeline ranks); ranks a plan does not have hold zero.

    `categories` has the bytes of each kind in a step; they need not all be allocated at one moment.
    """

    categories: dict[str, Floats]
    peak_bytes: Floats
    reserved_bytes: Floats
    host_bytes: Floats  # of offloaded state

    def scaled(self, costs: RuntimeCosts) -> MemoryColumns:
        """Return these bytes corrected by what runs of the runtime used, compared with its description."""
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


def memory_of_ranks(ranks: RankMemory) -> MemoryColumns:
    """Return the least peak memory of the pipeline ranks that `ranks` describes."""
    context, layout = ranks.context, ranks.layout
    shared = SharedParts(ranks)
    peak, reserved = least_bytes(ranks, shared)
    updating = peak <= (shared.standing + shared.end) * ROUNDED  # the fullest moment is an update
    away: list[State] = [kind for kind in state_bytes(context) if offloaded(context, kind).any()]
    on_host = sum((ranks.sharded(kind) * host_bytes(context, kind)[:, None] for kind in away), np.zeros_like(peak))
    categories = _categories(ranks, updating)
    return MemoryColumns(
        categories={name: np.where(layout.exists, column, 0.0) for name, column in categories.items()},
        peak_bytes=peak,
        reserved_bytes=reserved,
        host_bytes=np.where(layout.exists, on_host + ranks.away, 0.0),
    )


def least_bytes(ranks: RankMemory, shared: SharedParts | None = None) -> tuple[Floats, Floats]:
    """Return lower bounds of the allocated and of the reserved bytes of every rank, each of shape (plans, pipeline
    ranks). `shared` are the parts of the same ranks under another recompute mode.
    """
    peaks = _peaks(ranks, shared or SharedParts(ranks))
    peak, reserved = (np.where(ranks.layout.exists, nbytes * ROUNDED, 0.0) for nbytes in peaks)
    return peak, reserved


def _categories(ranks: RankMemory, updating: NDArray[np.bool_]) -> dict[str, Floats]:
    """Return the bytes of each kind of memory in a step. Of gradients, an update has temporaries instead of those of
    their reduction.
    """
    zero = ranks.zero
    reducing = ranks.added_gradients + ranks.passing(ranks.layer) + zero.buckets + zero.reducing
    return {
        **{str(kind): nbytes for kind, nbytes in ranks.state.items()},
        "activations": ranks.activations(ranks.flight(ranks.in_flight, ranks.heads)),
        "gathered_parameters": sum(ranks.gathered(np.maximum(ranks.layer, ranks.head)), ranks.kept_casts),
        "gradient_buffers": ranks.buffers + np.where(updating, np.maximum(zero.update, reducing), reducing),
        "loss_and_recompute": np.maximum(ranks.turning, ranks.recomputed),
        "symmetric_buffers": ranks.symmetric,
    }


class SharedParts:
    """What bounds of the same ranks under several recompute modes have in common: bytes, shape (plans, ranks)."""

    def __init__(self, ranks: RankMemory) -> None:
        state, zero, full = ranks.state, ranks.zero, ranks.full
        gradients = np.zeros_like(ranks.shared) if ranks.in_place else state["gradients"]
        workspaces = 2 * workspace_bytes(ranks.context.roofline.gpu.architecture)
        # From step to step.
        standing = state["parameters"] + state["optimizer"] + (state["gradients"] - gradients) + ranks.buffers
        self.standing: Floats = standing + ranks.symmetric + workspaces
        # The first backward pass, a later one with gradients, and those gradients: in all, and on the compute stream.
        # Whole gradients are on the compute stream or, with fully sharded units, shards on the stream of reductions.
        held, shards = ranks.beside_gradients, full & ~ranks.piped
        first = ranks.flight(ranks.in_flight, ranks.heads)
        self.first = first._replace(between=first.between + _outputs(ranks))
        self.later = ranks.flight(held, ranks.heads_beside_gradients)
        self.added = np.where(held > 0, np.where(ranks.added_gradients > 0, ranks.added_gradients, gradients), 0.0)
        self.added_computing = np.where(shards, 0.0, self.added)
        # While the head and while a layer computes, and in the backward pass of the first layer: gathered bytes on the
        # compute stream; the same on the stream of gathers, where they surely coincide with the activations in flight.
        self.of_head, self.of_layer, self.of_first_layer = _windows(ranks)
        # The end of the step: in all, on the compute stream, and on the stream of reductions. Every unit has its
        # gradient; with full sharding, the last unit's is still unsharded.
        together = (
            full & ranks.piped & (not ranks.spec.flat_units)
        )  # in the order of the forward pass, resharded before
        last = np.where(ranks.layout.first, ranks.embedding, ranks.layer)
        last = np.where(together, np.where(ranks.layout.last, np.minimum(ranks.head, ranks.layer), ranks.layer), last)
        if ranks.parameters.trained is not None:  # perhaps nothing is being reduced then
            last = np.zeros_like(last)
        width = ranks.context.dtype_bytes("gathered")
        reduced = np.where(full, gradients * (1 - last / np.maximum(ranks.whole, 1.0)), gradients)
        # With a split backward pass a unit's weights are freed before its weight gradients are computed.
        kept = full & ~ranks.splits & ~together & (not ranks.spec.flat_units)
        passing = ranks.passing(last) + np.where(kept, last * width, 0.0)
        in_compute = np.where(full, 0.0, gradients)
        reducing = np.where(full, gradients, 0.0) + _summed_over_replicas(ranks)
        self.end = np.maximum(reduced + passing, gradients + zero.update)
        self.end_computing = np.maximum(in_compute + passing, in_compute + zero.update)
        self.reducing = np.maximum(reducing, zero.reducing)


def _windows(ranks: RankMemory) -> Iterator[tuple[Floats, Floats]]:
    """Yield the gathered bytes while the head computes, while a layer does, and in the backward pass of the first."""
    last, head, layer, prefetch = ranks.layout.last, ranks.head, ranks.layer, ranks.spec.fsdp.prefetch
    alone = ranks.stages == 1

    def window(unit: Floats, **others: Floats) -> tuple[Floats, Floats]:
        compute, gather = ranks.gathered(unit, **others)
        return compute, np.where(alone, gather, 0.0)

    before = np.minimum(ranks.alike, prefetch) * layer
    # In a second forward pass the head is still gathered, so a layer was copied last.
    copied = np.where((ranks.heads > 1) & (ranks.alike > 0), np.minimum(layer, head), head)
    yield window(head, waiting=before, buffer=copied)
    before = np.where(last, head * (prefetch > 0), np.minimum(np.maximum(ranks.alike - 1, 0), prefetch) * layer)
    # A stage's last layer stays gathered from pass to pass; where it is the only one of its size, none is copied later.
    copied = np.where(last, head, np.where(ranks.alike > 1, layer, 0.0))
    yield window(layer, waiting=before, buffer=copied, before=head)
    yield window(layer, waiting=head)


def _peaks(ranks: RankMemory, shared: SharedParts) -> tuple[Floats, Floats]:
    """Return lower bounds of the most bytes allocated at a moment, and of the bytes reserved."""
    zero, held = ranks.zero, shared.later.held
    first = ranks.activations(shared.first) + ranks.kept_casts * shared.first.whole
    first = first + ranks.stage_ends
    later = ranks.activations(shared.later)
    later = np.where(held > 0, later + ranks.kept_casts * shared.later.whole, 0.0)
    turns = _turns(ranks, shared)
    most = reduce(np.maximum, [compute for compute, _ in turns])
    computing = np.maximum(first, later + shared.added_computing) + most + zero.buckets
    later = later + shared.added
    # Where every forward pass comes before the first backward pass, the later ones find its weights and gather none.
    gathers_again = shared.first.held < ranks.table.micro_batches[:, None]
    allocated = reduce(
        np.maximum, [one + np.maximum(first + gather, later + gather * gathers_again) for one, gather in turns]
    )
    peak = shared.standing + np.maximum(allocated + zero.buckets + zero.reducing, shared.end)
    reserved = shared.standing + np.maximum(computing, shared.end_computing) + ranks.gathers + shared.reducing
    return peak, np.maximum(reserved, peak)


def _outputs(ranks: RankMemory) -> Floats:
    """Return the bytes of the outputs that stages keep until their backward pass has run, when the first micro batch
    begins its own.

    They are of the passes in flight that have begun no half of a backward pass, but for those of the head, whose logits
    are counted by themselves.
    """
    table, layout = ranks.table, ranks.layout
    if not ranks.spec.pipeline.caches_outputs:
        return np.zeros_like(ranks.shared)
    in_v, lags, all_first = (
        where(table.schedule, fact)[:, None]
        for fact in (lambda kind: kind.v_shaped, lambda kind: kind.lags, lambda kind: kind.forwards_first)
    )
    halved = np.where(lags, layout.rank, 0.0)
    heads = np.where(layout.last, np.where(all_first, table.micro_batches[:, None], 1.0), 0.0)
    kept = np.maximum(ranks.in_flight * ranks.stages - halved - heads, 0.0)
    message = tensor_bytes("u h", ranks.context.sizes, ranks.context.dtype_bytes)[:, None]
    return np.where(ranks.piped & ~in_v, kept * message, 0.0)


def _turns(ranks: RankMemory, shared: SharedParts) -> list[tuple[Floats, Floats]]:
    """Return (compute stream, stream of gathers): the most bytes allocated in moments of a micro batch's backward pass
    that have the same units gathered, besides the activations in flight.
    """
    head, layer, reduces = ranks.head, ranks.layer, ranks.full & ~ranks.piped
    # At the end of the forward pass: copies of all weights that are used again. Where the backward pass of the loss
    # begins there, its buffers come on top.
    copies = ranks.remembered * ranks.cast_bytes * autocast_remembers(ranks.context.runtime)
    found = [(copies, np.zeros_like(layer))]
    compute, gather = shared.of_head
    without_head = ranks.head_saved + head * ranks.cast_bytes
    after_head = compute + np.where(reduces, ranks.passing(head), 0.0) - without_head
    loss = compute + ranks.turning + copies * turns_at_once(ranks.context.runtime)
    found.append((np.maximum(loss, after_head), gather))
    compute, gather = shared.of_layer
    sent = np.where(reduces & (ranks.parameters.trained is None), head * ranks.sent_bytes, 0.0)
    without_layer = without_head + ranks.saved_by_layer + layer * ranks.cast_bytes
    after_layer = compute + np.where(reduces, ranks.passing(layer), 0.0) - without_layer
    found.append((np.maximum(compute + ranks.recomputed + sent - without_head, after_layer), gather))
    if ranks.kept_gradients.any():
        compute, gather = shared.of_first_layer
        found.append((compute + ranks.recomputed + ranks.kept_gradients - without_head, gather))
    return found


def _summed_over_replicas(ranks: RankMemory) -> Floats:
    """Return the bytes that sums over replicas keep until a stage's backward pass ends, besides gradients of earlier
    micro batches.
    """
    table, reduce_bytes = ranks.table, ranks.context.dtype_bytes("reduce")
    again = (table.micro_batches > 1)[:, None] & ~ranks.piped
    apart = again | (reduce_bytes != state_bytes(ranks.context)["gradients"])
    summed = ranks.full & has_replicas(table)[:, None] & apart & (ranks.spec.zero is None)
    return np.where(summed, ranks.sharded("gradients") / ranks.stages * reduce_bytes, 0.0)
