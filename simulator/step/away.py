"""Activations that wait in host memory: what layers keep for backward goes there as they have run, and comes back
before their turn.

Where a runtime's `away_layers` may wait on the GPU, copies have a stream of their own and hide behind compute as far as
they are shorter: forward, a layer waits until those before it have gone; backward, the layer before is fetched while
this one computes (torchtune/training/_activation_offloading.py, OffloadActivations: max_fwd_stash_size). Without,
compute waits for each copy (torch.autograd.graph.save_on_cpu, in transformers' gradient checkpointing: pull request
48444).
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
    """Return whether what layers keep waits in host memory; they all run again then (rule `activation-offload`)."""
    return ACTIVATION_OFFLOAD in runtime.savers


def away_bytes(context: CostContext) -> Floats:
    """Return the bytes of a micro batch that one layer keeps, one value a plan; none where they stay."""
    mode = context.spec.recompute.get("full")
    if mode is None or not goes_away(context.runtime):
        return np.zeros(len(context.table))
    return saved_bytes((), mode, context)


def away_assumed(runtime: Runtime, cluster: Cluster, gpus: int) -> tuple[str, ...]:
    """Return what estimates assume of the way to host memory, in words; nothing where activations stay."""
    if not goes_away(runtime):
        return ()
    rate = host_rates(cluster, gpus).copy_bytes_per_s
    return (f"activations go to host memory and back at {rate / 1e9:.0f} GB/s a GPU; the host has the memory",)


@dataclass(slots=True)
class AwayWriter:
    """Tells a pipeline rank the copies of one step."""

    rank: Rank
    nbytes: Floats
    waits: bool  # compute waits for each copy
    _sent: list[str] = field(default_factory=list)
    _fetched: dict[str, str] = field(default_factory=dict)

    def forward(self, unit: Unit) -> None:
        """Send what `unit`, which has run forward, keeps."""
        if not unit.wrapped:
            return
        for event in self._sent:
            self.rank.wait(COMPUTE, event)
        self.rank.after(OFFLOAD, COMPUTE)
        self.rank.host_copy("d2h activations", self.nbytes, stream=OFFLOAD)
        if self.waits:
            self.rank.after(COMPUTE, OFFLOAD)
        else:
            self._sent = [self.rank.record(OFFLOAD)]

    def backward(self, unit: Unit, following: Unit | None) -> None:
        """Have what `unit` kept come back before it runs backward, and what `following` did under way."""
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
