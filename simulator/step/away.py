"""Activation offload: tensors that layers keep for the backward pass are copied to host memory after each layer's
forward pass, and back before its backward pass.

Where a runtime lets `away_layers` layers wait on the GPU, copies have a stream of their own and are hidden behind
compute if they are shorter: forward, a layer waits until the copies of earlier layers are done; backward, the next
layer's tensors are fetched while this layer computes (torchtune/training/_activation_offloading.py, OffloadActivations:
max_fwd_stash_size). Otherwise compute waits for each copy (torch.autograd.graph.save_on_cpu, in transformers' gradient
checkpointing: pull request 48444).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from simulator.columns.plan_table import Floats
from simulator.config.runtime import Runtime
from simulator.config.savers import ACTIVATION_OFFLOAD
from simulator.program.program import COMPUTE
from simulator.step.context import CostContext
from simulator.step.held import saved_bytes
from simulator.step.offload import OFFLOAD
from simulator.step.rank import Rank
from simulator.step.units import Unit
from topology.cluster import Cluster
from topology.rates.host import host_rates


def goes_away(runtime: Runtime) -> bool:
    """Return whether the tensors that layers keep are offloaded to host memory; all layers are then recomputed (rule
    `activation-offload`).
    """
    return ACTIVATION_OFFLOAD in runtime.savers


def away_bytes(context: CostContext) -> Floats:
    """Return the offloaded bytes of one layer for a micro batch, shape (plans,); zero without offload."""
    mode = context.spec.recompute.get("full")
    if mode is None or not goes_away(context.runtime):
        return np.zeros(len(context.table))
    return saved_bytes((), mode, context)


def away_assumed(runtime: Runtime, cluster: Cluster, gpus: int) -> tuple[str, ...]:
    """Return the sentences on what estimates assume about copies to host memory; empty without offload."""
    if not goes_away(runtime):
        return ()
    rate = host_rates(cluster, gpus).copy_bytes_per_s
    return (f"activations go to host memory and back at {rate / 1e9:.0f} GB/s a GPU; the host has the memory",)


@dataclass(slots=True)
class AwayWriter:
    """Issues the copies of one step to a pipeline rank."""

    rank: Rank
    nbytes: Floats
    waits: bool  # compute waits for each copy
    _sent: list[str] = field(default_factory=list)
    _fetched: dict[str, str] = field(default_factory=dict)

    def forward(self, unit: Unit) -> None:
        """Copy the kept tensors of `unit`, whose forward pass has run, to the host."""
        if not unit.wrapped:
            return
        for event in self._sent:
            self.rank.wait(COMPUTE, event)
        self.rank.after(OFFLOAD, COMPUTE)
        self.rank.host_copy("d2h activations", self.nbytes, stream=OFFLOAD)
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
        if unit.wrapped and unit.name not in self._fetched:
            self.rank.host_copy("h2d activations", self.nbytes, stream=OFFLOAD)
            self._fetched[unit.name] = self.rank.record(OFFLOAD)
