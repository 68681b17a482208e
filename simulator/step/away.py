"""Activation offload: tensors that layers keep for the backward pass are copied to host memory after each layer's
forward pass, and back before its backward pass: what checkpoints keep (the memory saver `activation_offload`), or all
that the first `Plan.offload_layers` layers save.

Where a runtime lets `away_layers` layers wait on the GPU, copies have a stream of their own and are hidden behind
compute if they are shorter: forward, a layer waits until the copies of earlier layers are done; backward, the next
layer's tensors are fetched while this layer computes (torchtune/training/_activation_offloading.py, OffloadActivations:
max_fwd_stash_size). Otherwise compute waits for each copy (torch.autograd.graph.save_on_cpu, in transformers' gradient
checkpointing: pull request 48444).

Of a number of layers, each may be copied until as many layers have run as stay on the GPU, and begins to return as many
before its turn (NVIDIA/TransformerEngine @d0067d0d, transformer_engine/pytorch/cpu_offload.py:
DefaultOffloadSynchronizer). Copies then have the whole pass, so their bytes are spread over all layers here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from simulator.columns.plan_table import Floats, PlanTable
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.savers import ACTIVATION_OFFLOAD
from simulator.program.program import COMPUTE
from simulator.runtimes.model_operators import operators_for
from simulator.runtimes.parts import RecomputeSpec
from simulator.step.context import CostContext
from simulator.step.held import saved_bytes
from simulator.step.offload import OFFLOAD
from simulator.step.rank import Rank
from simulator.step.units import LAYERS, Unit
from topology.cluster import Cluster
from topology.rates.host import host_rates


def goes_away(runtime: Runtime) -> bool:
    """Return whether the tensors that checkpoints keep are offloaded; all layers are then recomputed (rule
    `activation-offload`).
    """
    return ACTIVATION_OFFLOAD in runtime.savers


def away_bytes(context: CostContext) -> Floats:
    """Return the bytes of one layer for a micro batch that the saver offloads, shape (plans,); zero without it."""
    mode = context.spec.recompute.get("full")
    if mode is None or not goes_away(context.runtime):
        return np.zeros(len(context.table))
    return saved_bytes((), mode, context)


def moved_bytes(context: CostContext, model: Model) -> dict[str, Floats]:
    """Return the bytes that leave with a layer for a micro batch, by kind of layer, each of shape (plans,) and in the
    mean over layers; empty where nothing is offloaded.
    """
    if goes_away(context.runtime):
        return dict.fromkeys(LAYERS, away_bytes(context))
    counted = counted_layers(context.table)
    if not counted.any():
        return {}
    share, blocks = counted / model.layers, operators_for(model, context.runtime).blocks
    return {kind: share * saved_bytes(blocks[kind], RecomputeSpec(), context) for kind in LAYERS if kind in blocks}


def counted_layers(table: PlanTable) -> Floats:
    """Return how many layers of each plan are offloaded without a checkpoint, shape (plans,)."""
    return np.maximum(table.offload_layers, 0).astype(np.float64)


def layers_on_gpu(plan: Plan, context: CostContext, layers: int) -> int:
    """Return the layers whose tensors may be on the GPU at once, besides those that a pass works on."""
    return layers - plan.offload_layers if plan.offload_layers else context.spec.away_layers


def away_assumed(runtime: Runtime, plans: Iterable[Plan], cluster: Cluster) -> tuple[str, ...]:
    """Return the sentences on what estimates assume about copies to host memory; empty without offload."""
    if not goes_away(runtime):
        plans = [plan for plan in plans if plan.offload_layers]
        if not plans:
            return ()
    rate = host_rates(cluster, max((plan.gpus for plan in plans), default=1)).copy_bytes_per_s
    return (f"activations go to host memory and back at {rate / 1e9:.0f} GB/s a GPU; the host has the memory",)


@dataclass(slots=True)
class AwayWriter:
    """Issues the copies of one step to a pipeline rank."""

    rank: Rank
    nbytes: Mapping[str, Floats]  # of a layer, by kind
    waits: bool  # compute waits for each copy
    _sent: list[str] = field(default_factory=list)
    _fetched: dict[str, str] = field(default_factory=dict)

    def forward(self, unit: Unit) -> None:
        """Copy the kept tensors of `unit`, whose forward pass has run, to the host."""
        if unit.block not in self.nbytes:
            return
        for event in self._sent:
            self.rank.wait(COMPUTE, event)
        self.rank.after(OFFLOAD, COMPUTE)
        self.rank.host_copy("d2h activations", self.nbytes[unit.block], stream=OFFLOAD)
        if self.waits:  # and so does the host: the copy is no asynchronous one
            self.rank.after(COMPUTE, OFFLOAD)
            self.rank.synchronize()
        else:
            self._sent = [self.rank.record(OFFLOAD)]

    def backward(self, unit: Unit, following: Unit | None) -> None:
        """Copy the kept tensors of `unit` back before its backward pass, and start the copy of those of `following`."""
        self._sent = []
        if self.waits:
            self.rank.after(OFFLOAD, COMPUTE)
        self._fetch(unit)
        if unit.name in self._fetched:
            self.rank.wait(COMPUTE, self._fetched.pop(unit.name))
        if following is not None and not self.waits:
            self.rank.after(OFFLOAD, COMPUTE)
            self._fetch(following)

    def _fetch(self, unit: Unit) -> None:
        if unit.block in self.nbytes and unit.name not in self._fetched:
            self.rank.host_copy("h2d activations", self.nbytes[unit.block], stream=OFFLOAD)
            self._fetched[unit.name] = self.rank.record(OFFLOAD)
