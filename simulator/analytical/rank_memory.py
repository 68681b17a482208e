"""The memory of every pipeline rank by kind, from which `simulator.analytical.memory` adds up its bound."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.analytical.layer_cost import BlockMemory
from simulator.analytical.wide_layers import least_memory
from simulator.columns.plan_table import Floats
from simulator.config.model import Model
from simulator.config.savers import OPTIMIZER_IN_BACKWARD
from simulator.kernels.operators import tensor_bytes
from simulator.pipeline.schedules.registry import where
from simulator.pipeline.stages import StageLayout, beside_gradients, in_flight
from simulator.runtimes.model_operators import ModelOperators
from simulator.step.away import away_bytes, counted_layers, goes_away
from simulator.step.context import CostContext
from simulator.step.frozen import frozen_units_keep_inputs
from simulator.step.held import (
    Parameters,
    State,
    between_stages_bytes,
    casts_experts,
    head_cached_bytes,
    head_peak_bytes,
    placeholder_bytes,
    state_bytes,
)
from simulator.step.offload import held_bytes
from simulator.step.symmetric_memory import exchange_bytes, symmetric_bytes
from simulator.step.units import LAYERS
from simulator.step.zero import zero_buffers

# Cached properties of `RankMemory` that depend on the recompute modes of layers.
FROM_MODE = ("again", "remembered", "kept_casts", "_saved", "_by_all", "recomputed", "kept_gradients")
FIRST_AND_LAST = 2  # micro batches: of more, one goes back alongside gradients and is not the last


class Flight(NamedTuple):
    """Micro batches in flight on ranks, and the bytes that follow from no recompute mode; shape (plans, ranks)."""

    held: Floats  # micro batches in flight
    missing: Floats  # passes of a stage that are not in flight
    whole: Floats  # micro batches of which a rank surely keeps all; with several stages, one at most
    of_heads: Floats  # what the head saved
    cached: Floats  # logits that the last stage keeps
    between: Floats  # what stages exchange


class RankMemory:
    """Bytes of each kind of memory, of shape (plans, ranks); parameters are counted in elements, before sharding."""

    def __init__(
        self,
        model: Model,
        operators: ModelOperators,
        context: CostContext,
        layout: StageLayout,
        blocks: Mapping[str, BlockMemory],
        parameters: Parameters,
    ) -> None:
        self.model, self.operators, self.context = model, operators, context
        self.layout, self.blocks, self.parameters = layout, least_memory(blocks), parameters
        self.bounds = blocks["dense"].bounds  # whether to find the least of all recompute modes and of resharding
        self.spec, self.table = operators.spec, context.table
        self.shared, self.experts = parameters.of_stage(layout)
        self.whole = self.shared + self.experts
        self.trained = np.add(*parameters.of("gradients").of_stage(layout))
        self.full = self.table.fully_sharded[:, None]
        self.piped = (self.table["pp"] > 1)[:, None]
        self.stages = np.maximum(self.table["virtual_stages"], 1.0)[:, None]
        dense, moe = layout.layers
        # Parameters of the last layer of a rank, whose backward pass comes first. Embedding and head are units of their
        # own.
        of_moe = (parameters.moe_layer + parameters.experts)[:, None]
        self.layer = np.where(moe > 0, of_moe, (dense > 0) * parameters.dense_layer[:, None])
        self.alike = np.where(moe > 0, moe if model.dense_layers_lead else np.minimum(moe, 1), dense)
        self.embedding, self.head = layout.first * parameters.embedding[:, None], layout.last * parameters.head[:, None]
        self.zero = zero_buffers(context, self.trained, self.sharded("optimizer"))
        if OPTIMIZER_IN_BACKWARD in context.runtime.savers:  # no temporaries of all parameters at once
            self.zero = replace(self.zero, update=0.0 * self.zero.update)
        self.state = {kind: self.sharded(kind) * held_bytes(context, kind)[:, None] for kind in state_bytes(context)}
        # Autocast keeps a 16-bit copy of every weight that products use from its first use to the end of the forward
        # pass, and backward keeps those of layers that are not run again; embeddings are looked up without a cast.
        # Compiled blocks contain their casts, so autocast keeps no copies for them.
        compute = context.dtype_bytes("compute")
        cast = self.table.conditions["autocast"] & (context.dtype_bytes("param") > compute)
        self.cast_bytes = np.where(cast, compute, 0.0)[:, None]

    def under(self, mode: str) -> RankMemory:
        """Return the same ranks with all layers under one recompute mode: what does not follow from it is shared."""
        found = copy(self)
        found.layout = self.layout.under(mode)
        for name in FROM_MODE:
            vars(found).pop(name, None)
        return found

    def sharded(self, kind: State) -> Floats:
        """Return for how many parameters the rank holds state of a kind."""
        shared, experts = self.parameters.of(kind).of_stage(self.layout)
        return shared / self.table.state_shard[kind][:, None] + experts / self.table.expert_shard[kind][:, None]

    # --- gradients ----------------------------------------------------------------------------------------------

    @cached_property
    def buffers(self) -> Floats:
        """Buffers that reducing gradients holds throughout the step, besides the gradients themselves."""
        # Where data-parallel buckets are copies, they add the size of all gradients as autograd makes them.
        copied = self.spec.ddp.bucket_copy & (self.table["dp_replicate"] > 1)
        buckets = np.where(copied[:, None], self.trained * self.context.dtype_bytes("trained"), 0.0)
        buckets = buckets + _placeholders(self.operators, self.context, *self.layout.layers)
        return np.where(self.full, 0.0, buckets) + self.zero.standing

    @cached_property
    def added_gradients(self) -> Floats:
        """Gradients summed over the micro batches of a pipeline until the last one: unsharded, where only shards stay
        afterwards.
        """
        scattered = (self.table.state_shard["gradients"] > 1)[:, None] * state_bytes(self.context)["gradients"]
        width = np.where(self.full, self.context.dtype_bytes("reduce"), scattered)
        return np.where(self.piped & (not self.in_place), self.trained * width, 0.0)

    @property
    def in_place(self) -> bool:
        """Whether matrix products add gradients into buffers that exist throughout the step."""
        return self.spec.state.gradient_dtype == "reduce"

    @cached_property
    def sent_bytes(self) -> Floats:
        """Bytes for each gradient of a unit in the buffer that its reduction assembles."""
        unsharded = self.spec.state.unsharded_gradient_dtype
        width = self.context.dtype_bytes(unsharded if self.spec.fsdp.flat_parameters else "reduce")
        return np.where(self.table.casts_own[:, None] | (self.spec.zero is not None), 0.0, width)

    def passing(self, unit: Floats) -> Floats:
        """Return the bytes of a fully sharded unit's gradients during their reduction; zero for models with frozen
        parts, where a unit may have no gradients.
        """
        if self.parameters.trained is not None:
            return np.zeros_like(self.whole)
        unsharded = 0.0 if self.in_place else self.context.dtype_bytes(self.spec.state.unsharded_gradient_dtype)
        return np.where(self.full, unit * (unsharded + self.sent_bytes), 0.0)

    # --- parameters for use -------------------------------------------------------------------------------------

    @cached_property
    def again(self) -> Floats:
        """Parameters of layers that are recomputed."""
        return self._recomputed(experts=True)

    @cached_property
    def remembered(self) -> Floats:
        """Those of which autocast has copies at the end of the forward pass."""
        return self._recomputed(experts=False) if casts_experts(self.operators.moe_layer) else self.again

    def _recomputed(self, *, experts: bool) -> Floats:
        again = np.zeros_like(self.shared)
        for mode, layers in self.layout.by_mode.items():
            if mode != "none":
                again = again + self.spec.recompute[mode].layers * self._parameters(layers, experts=experts)
        if self.bounds:  # under any mode, all copies exist at the end of the forward pass
            again = again + self._parameters(self.layout.by_mode.get("none"), experts=experts)
        return again

    @cached_property
    def kept_casts(self) -> Floats:
        """16-bit copies of weights that each micro batch in flight keeps."""
        looked_up = np.where(self.model.tied_embeddings, 0.0, self.embedding)
        return (self.whole - self.again - looked_up) * self.cast_bytes

    def gathered(
        self,
        unit: Floats,
        *,
        waiting: Floats | float = 0.0,
        buffer: Floats | float = 0.0,
        before: Floats | float = 0.0,
    ) -> tuple[Floats, Floats]:
        """Return the gathered bytes while `unit` computes, on the compute stream and on the stream of gathers. Where
        parameters are copies, the latter still holds the `buffer` they were copied from; where they are views, also
        units gathered ahead and `waiting` for the device. In the backward pass of the last micro batch, units whose
        backward pass came `before` are already freed.
        """
        width = np.where(self.full, self.context.dtype_bytes("gathered"), 0.0)
        last = (self.table.micro_batches <= FIRST_AND_LAST)[:, None]
        whole = self.whole - np.where(last, before, 0.0)
        root = self.embedding if self.spec.fsdp.flat_parameters or self.spec.fsdp.root_ends else 0.0
        window = self._kept_or(whole, unit + root + (waiting if self.spec.flat_units else 0.0)) * width
        if self.spec.flat_units:
            return np.zeros_like(self.whole), window
        return window, np.where(self._buffered & self._resharded, buffer * width, 0.0)

    def _kept_or(self, whole: Floats, resharded: Floats) -> Floats:
        """Return the parameters that are gathered: all where they stay so between passes, else the given ones."""
        return np.minimum(whole, resharded) if self.bounds else np.where(self._resharded, resharded, whole)

    @property
    def _resharded(self) -> NDArray[np.bool_]:
        """Rows whose units are surely freed between passes."""
        return ~self.table.keeps_gathered[:, None] & (not self.bounds)

    @cached_property
    def stage_ends(self) -> Floats:
        """Bytes that stay gathered when the first micro batch begins its backward pass, besides the unit that computes:
        each further stage keeps its last unit, which its backward pass needs first.
        """
        of, (dense, moe) = self.parameters, self.layout.layers
        smaller = np.minimum(of.dense_layer, of.moe_layer + of.experts)[:, None]
        layer = np.where((dense > 0) & (moe > 0), smaller, self.layer)
        with_layers = np.ceil((dense + moe) / np.maximum(self.layout.largest, 1))  # stages, at least
        others = np.maximum(with_layers - 1, 0.0)
        resharded = self.full & self.piped & self._resharded & (not self.spec.flat_units)
        return np.where(resharded, others * layer * self.context.dtype_bytes("gathered"), 0.0)

    @cached_property
    def _buffered(self) -> NDArray[np.bool_]:
        """Rows whose units are gathered into a buffer that is kept until the next unit has been copied out of
        its own. Of exchanges by copy engines, only ends have such buffers, which are not counted.
        """
        ranks = ((self.context.groups.extent("fsdp")[0] > 1) & ~self.table.pushed)[:, None]
        return self.full & ranks & (not self.spec.flat_units)

    @cached_property
    def gathers(self) -> Floats:
        """The most bytes that the stream of gathers holds at once."""
        width, prefetch = self.context.dtype_bytes("gathered"), self.spec.fsdp.prefetch
        end = np.maximum(self.embedding, self.head)
        both = np.where(self.alike > 0, np.maximum(end, np.where(self.alike > 1, self.layer, 0.0)) + self.layer, end)
        if self.spec.flat_units:
            ahead = np.maximum(
                np.minimum(self.alike, 1 + prefetch) * self.layer, end + np.minimum(self.alike, prefetch) * self.layer
            )
            return np.where(self.full, self._kept_or(self.whole, ahead) * width, 0.0)
        return np.where(self._buffered & (self.stages == 1), both * width, 0.0)  # several on the stream of computing

    # --- activations --------------------------------------------------------------------------------------------

    @cached_property
    def symmetric(self) -> Floats:
        """Bytes of the buffers of overlapped tensor parallelism, and of FSDP's exchanges by copy engines."""
        return symmetric_bytes(self.context, *self.layout.layers) + exchange_bytes(self.context, self.layer)

    @cached_property
    def in_flight(self) -> Floats:
        """Micro batches in flight when the first of them begins its backward pass."""
        return in_flight(self.table, self.layout.rank)

    @cached_property
    def beside_gradients(self) -> Floats:
        """Micro batches in flight once there are gradients of all parameters."""
        return beside_gradients(self.table, self.layout.rank)

    @cached_property
    def heads(self) -> Floats:
        """For how many micro batches the head's results exist when the first backward pass begins, or when its weights
        get their first gradient.
        """
        micro_batches = self.table.micro_batches[:, None]
        deferred = np.where(self._lags, np.minimum(self.layout.rank + 1.0, micro_batches), 1.0)
        return np.where(self.layout.last, np.where(self._all_first, micro_batches, deferred), 0.0)

    @cached_property
    def heads_beside_gradients(self) -> Floats:
        """The same as `heads`, once there are gradients of all parameters."""
        fewer = np.where(self._lags & (self.stages > 1), np.minimum(self.heads, 1.0), self.heads - 1)
        return np.where(self.heads > 1, fewer, self.heads)

    @cached_property
    def _lags(self) -> NDArray[np.bool_]:
        return where(self.table.schedule, lambda kind: kind.lags)[:, None]

    @property
    def splits(self) -> NDArray[np.bool_]:
        """Rows whose schedules compute gradients of inputs and of weights separately."""
        return where(self.table.schedule, lambda kind: kind.splits_backward)[:, None]

    @cached_property
    def _all_first(self) -> NDArray[np.bool_]:
        return where(self.table.schedule, lambda kind: kind.forwards_first)[:, None]

    @cached_property
    def head_saved(self) -> Floats:
        """Bytes that the head's forward pass saves."""
        return self.layout.last * self.blocks["head"].saved_bytes["none"][:, None]

    @cached_property
    def turning(self) -> Floats:
        """Bytes that the backward pass of the loss takes at its start, besides what its forward pass saved."""
        head = head_peak_bytes(self.context) - self.blocks["head"].saved_bytes["none"]
        return np.where(self.layout.last, np.maximum(head, 0.0)[:, None], 0.0)

    @cached_property
    def _saved(self) -> tuple[Floats, Floats]:
        """Bytes that the forward passes of a micro batch save in all, and the most that one layer saves."""
        layout, blocks = self.layout, self.blocks
        saved = layout.first * blocks["embedding"].saved_bytes["none"][:, None]
        most = np.zeros_like(saved)
        for mode, counts in layout.by_mode.items():
            for name, layers in zip(LAYERS, counts, strict=True):
                if name in blocks:
                    of_layer = blocks[name].saved_bytes[mode][:, None]
                    # More passes may be in flight on one stage of a rank than on another: all stages count as the
                    # smallest.
                    of_stage = np.where(self.stages > 1, np.floor(layers / self.stages), layers)
                    saved = saved + self.stages * (of_stage * of_layer - self._wrapped_more(name, mode, of_stage))
                    most = np.maximum(most, (layers > 0) * of_layer)
        return saved, most

    def _saved_by_all(self, *, as_wrapped: bool) -> tuple[Floats, Floats]:
        """Return the least that the forward passes of a micro batch through all stages of a rank save, and the most
        through one stage. With `as_wrapped`, every layer saves as little as one that its mode wraps.
        """
        layout, blocks = self.layout, self.blocks
        ends = layout.first * blocks["embedding"].saved_bytes["none"][:, None]
        saved, most = ends, np.zeros_like(ends)
        for mode, counts in layout.by_mode.items():
            for name, layers in zip(LAYERS, counts, strict=True):
                if name in blocks:
                    of_layer, everything = (
                        blocks[name].saved_bytes[mode][:, None],
                        blocks[name].everything_bytes[:, None],
                    )
                    less = self._wrapped_less(name, mode)
                    wrapped = np.minimum(of_layer, everything - less)
                    at_least = of_layer * layers - (layers > 0) * self.stages * less
                    at_most = wrapped if as_wrapped else np.where(less > 0, everything, of_layer)
                    saved = saved + (wrapped * layers if as_wrapped else at_least)
                    most = np.maximum(most, (layers > 0) * at_most)
        return saved, ends + layout.largest * most

    @cached_property
    def _by_all(self) -> list[tuple[Floats, Floats]]:
        return [self._saved_by_all(as_wrapped=as_wrapped) for as_wrapped in (False, True)]

    def _wrapped_less(self, name: str, mode: str) -> Floats | float:
        """Return how many bytes less a wrapped layer saves, for a mode that wraps every n-th layer."""
        share = self.spec.recompute[mode].layers
        if share == 1.0:
            return 0.0
        return (self.blocks[name].everything_bytes - self.blocks[name].saved_bytes[mode])[:, None] / share

    def _wrapped_more(self, name: str, mode: str, layers: Floats) -> Floats | float:
        """Return by how much the saved bytes of `layers` consecutive layers can be below average, for a mode that wraps
        every n-th layer.
        """
        share = self.spec.recompute[mode].layers
        return (np.ceil(layers * share) - layers * share) * self._wrapped_less(name, mode)

    @property
    def saved_by_layer(self) -> Floats:
        return self._saved[1]

    @cached_property
    def recomputed(self) -> Floats:
        """Bytes that recomputing a layer takes, besides what it saved."""
        found = np.zeros_like(self.shared)
        for mode, (dense, moe) in self.layout.by_mode.items():
            for name, held in (("dense", dense * (self.layout.moe <= 0)), ("moe", moe)):
                if mode != "none" and name in self.blocks:
                    more = self.blocks[name].everything_bytes - self.blocks[name].saved_bytes[mode]
                    found = np.maximum(found, (held > 0) * np.maximum(more, 0.0)[:, None])
        return found + (found > 0) * self.layer * self.cast_bytes

    @cached_property
    def kept_gradients(self) -> Floats:
        """Bytes of the gradients of frozen layers' inputs that stay until the backward pass ends, but the first's."""
        again = sum(
            (np.add(*counts) for mode, counts in self.layout.by_mode.items() if self.spec.recompute[mode].recomputes),
            np.zeros_like(self.shared),
        )
        stream = tensor_bytes("u hr", self.context.sizes, self.context.dtype_bytes)[:, None]
        keeps = frozen_units_keep_inputs(self.context)[:, None] & ~self.piped
        return np.where(keeps, np.maximum(again - 1, 0.0) * stream, 0.0)

    def flight(self, held: Floats, heads: Floats) -> Flight:
        """Return what of `held` micro batches in flight, `heads` of which have the head's results, follows from no
        recompute mode.
        """
        cached = self.layout.last * head_cached_bytes(self.context)[:, None]
        return Flight(
            held=held,
            missing=self.stages * np.maximum(self.table.micro_batches[:, None] - held, 0.0),
            whole=np.where(self.stages == 1, held, held >= 1),
            of_heads=self.head_saved * heads,
            cached=cached * np.where(self._all_first, heads, np.minimum(heads, 1.0)),
            between=np.add(*between_stages_bytes(self.context, self.layout.first, self.layout.last, held)),
        )

    def activations(self, flight: Flight) -> Floats:
        """Return the bytes that forward passes saved and that stages received for micro batches in flight."""
        saved, of_layer = self._saved
        if goes_away(self.context.runtime):  # everything but one layer's is offloaded
            return flight.of_heads + np.minimum(saved, of_layer)
        saved = np.maximum(saved - counted_layers(self.table)[:, None] * of_layer, np.minimum(saved, of_layer))
        # Where nearly all micro batches are in flight on all stages: the bytes of all, less those of the passes not in
        # flight.
        micro_batches = self.table.micro_batches[:, None]
        found = most = saved * flight.held
        for by_all, by_one in self._by_all:
            most = np.maximum(most, by_all * micro_batches - by_one * flight.missing)
        found = np.where(self.stages > 1, most, found)
        if self.table.paired.any():  # where two passes run at once, a layer of one comes before that of the other goes
            found = found + np.where(self.table.paired[:, None], of_layer, 0.0)
        return found + flight.of_heads + flight.cached + flight.between

    @cached_property
    def away(self) -> Floats:
        """Bytes that the layers of micro batches in flight keep in host memory."""
        layers, counted = sum(self.layout.layers), counted_layers(self.table)[:, None]
        return (layers * away_bytes(self.context)[:, None] + counted * self._saved[1]) * self.in_flight

    def _parameters(self, layers: tuple[Floats, Floats] | None, *, experts: bool) -> Floats | float:
        """Return the parameters of `layers`, the counts of dense layers and of layers with experts; counts and result
        have shape (plans, ranks).
        """
        if layers is None:
            return 0.0
        of, (dense, moe) = self.parameters, layers
        return dense * of.dense_layer[:, None] + moe * (of.moe_layer + of.experts * experts)[:, None]


def _placeholders(
    operators: ModelOperators, context: CostContext, dense: NDArray[np.int64], moe: NDArray[np.int64]
) -> Floats:
    """Return placeholder bytes by pipeline rank, for its `dense` and `moe` layers; those of the head are freed
    at once.
    """
    total = np.zeros_like(dense, dtype=np.float64)
    for has_dense, has_moe in ((True, False), (False, True), (True, True)):
        held = ((dense > 0) == has_dense) & ((moe > 0) == has_moe)
        if held.any():
            layers = operators.dense_layer * has_dense + operators.moe_layer * has_moe
            total = np.where(held, placeholder_bytes(layers, context)[:, None], total)
    return total
