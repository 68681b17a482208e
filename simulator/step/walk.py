"""One training step, issued to a pipeline rank: micro batches through its stages, traffic around them, the optimizer.

A rank runs its schedule's actions in order; an action runs the units of its stage (embedding, layers, head) forward, or
backward in reverse; each unit is gathered before use, and the reduction of its gradients is started afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from simulator.columns.plan_table import Floats
from simulator.config.model import Model
from simulator.config.optimizers import OPTIMIZERS
from simulator.config.runtime import DTYPE_BYTES
from simulator.config.savers import OPTIMIZER_IN_BACKWARD
from simulator.pipeline.schedules.table import Action, Kind
from simulator.step.away import AwayWriter, goes_away, moved_bytes
from simulator.step.context import CostContext
from simulator.step.data_writer import DataWriter
from simulator.step.host import (
    end_host_s,
    host_synchronizes,
    loading_host_s,
    loads_ahead,
    pass_host_s,
    rest_host_s,
    step_host_s,
)
from simulator.step.rank import RUNS, Pass, Rank, Value
from simulator.step.traffic import DataTraffic
from simulator.step.units import Unit
from simulator.step.update import NORM_BYTES, UPDATE_LAUNCHES, host_update_bytes, update_bytes, updates_units

# The groups over which the gradient norm is summed, and the streams of these sums.
NORM_STREAMS = (("dp", "dp norm"), ("tp", "tp comm"), ("pp", "pp norm"))


def message_bytes(context: CostContext, hidden: int) -> Floats:
    """Return the bytes that a rank sends to the next stage for one micro batch."""
    table, runtime = context.table, context.runtime
    nbytes = context.sizes["u"] * hidden * DTYPE_BYTES[runtime.activation_dtype]
    if context.spec.pipeline.scatter_p2p:
        nbytes = np.where(table.sequence_parallel, nbytes, nbytes / table["tp"])
    return np.asarray(nbytes)


class StepWalk:
    """Walks plans whose steps have the same operations: those of `context`, with the units `stages` of each stage."""

    def __init__(self, context: CostContext, stages: Sequence[Sequence[Unit]], model: Model) -> None:
        self.context, self.stages, self.spec = context, stages, context.spec
        self.traffic = DataTraffic(context)
        # A pipeline loads all tokens at once.
        self.waits_for_tokens = self.spec.host.synchronizes == "micro_batch" and bool(context.table["pp"][0] == 1)
        self.synchronizes = bool(host_synchronizes(self.spec.host, context.table)[0])
        self.away = moved_bytes(context, model)
        self.in_backward = OPTIMIZER_IN_BACKWARD in context.runtime.savers
        self.updates_units = updates_units(context.runtime)
        self.loads_ahead = bool(loads_ahead(self.spec.host, context)[0])
        self.host_passes = bool(np.any(self.spec.host.pp_pass_s))  # whether passes take host time of their own

    def with_stages(self, stages: Sequence[Sequence[Unit]]) -> StepWalk:
        """Return a walk of the same plans with other units in their stages."""
        other = copy(self)
        other.stages = stages
        return other

    def begin(self, rank: Rank) -> DataWriter:
        """Issue the host's work before the first micro batch."""
        rank.host_work("step", step_host_s(self.spec.host, self.context))
        return DataWriter(rank=rank, traffic=self.traffic)

    def action(self, rank: Rank, data: DataWriter, stage: int, kind: Kind, micro_batch: int, *, last: bool) -> None:
        """Run one action of a schedule; `last`: it belongs to the step's last micro batch."""
        if kind is not Kind.WEIGHT_GRAD and self.host_passes:
            rank.host_work("pass", pass_host_s(self.spec.host, self.context.table))
        if kind is Kind.FORWARD:
            if micro_batch and self.waits_for_tokens:
                rank.synchronize()
            self._forward(rank, data, self.stages[stage])
        else:
            self._backward(rank, data, self.stages[stage], kind, last=last)
            if stage == 0 and kind is not Kind.INPUT_GRAD and self.traffic.reduces(last_micro_batch=last):
                data.wait_for_reductions()
        if self.synchronizes:
            rank.synchronize()

    def pair(self, rank: Rank, data: DataWriter, backward: Action, forward: Action, *, last: bool) -> None:
        """Run a backward and a forward pass at the same time; `last`: the backward pass belongs to the step's last
        micro batch.
        """
        rank.begin_pair()
        self.action(rank, data, backward.stage, backward.kind, backward.micro_batch, last=last)
        rank.next_of_pair()
        self.action(rank, data, forward.stage, forward.kind, forward.micro_batch, last=False)
        rank.end_pair()

    def _forward(self, rank: Rank, data: DataWriter, units: Sequence[Unit]) -> None:
        away = self._away(rank)
        for position, unit in enumerate(units):
            following = units[position + 1] if position + 1 < len(units) else None
            rank.begin(unit)
            data.before(unit, following)
            rank.run(unit, Pass.FORWARD)
            if away is not None:
                away.forward(unit)
            if following is not None:  # the last unit is needed again at once, by the backward pass
                data.after(unit, last_use=False)
            rank.ended(unit)

    def _backward(self, rank: Rank, data: DataWriter, units: Sequence[Unit], kind: Kind, *, last: bool) -> None:
        reducing = self.traffic.reduces(last_micro_batch=last) and kind is not Kind.INPUT_GRAD
        away = self._away(rank)
        done: Unit | None = None  # whose gradients are there
        for position in reversed(range(len(units))):
            unit = units[position]
            rank.begin(unit)
            if done is not None and self.updates_units and last:
                self._update(rank, [replace(done, repeats=1)])
            done = unit
            data.before_gradients(unit, reducing=reducing)
            if kind is not Kind.WEIGHT_GRAD:
                following = units[position - 1] if position else None
                data.before(unit, following)
                if away is not None:
                    away.backward(unit, following)
            rank.run(unit, RUNS[kind])
            if kind is not Kind.INPUT_GRAD:
                data.after_backward(unit, reducing=reducing, ends_pass=not position)
                data.after(unit, last_use=last)
            rank.ended(unit)

    def _away(self, rank: Rank) -> AwayWriter | None:
        """Return the writer of activation offload; None without offload."""
        if not self.away:
            return None
        waits = goes_away(self.context.runtime) and self.spec.away_layers == 0
        return AwayWriter(rank=rank, nbytes=self.away, waits=waits)

    def end(self, rank: Rank, data: DataWriter, stages: Sequence[int]) -> None:
        """Wait for all traffic, sum the gradient norm over the ranks that share it, and update the parameters of a
        rank's stages.
        """
        units = [unit for stage in stages for unit in self.stages[stage]]
        tensors = sum(unit.repeats * unit.tensors for unit in units)
        rank.host_work("rest", rest_host_s(self.spec.host, self.context.table) + end_host_s(self.context, tensors))
        data.finish(units)
        for family, stream in () if self.in_backward else NORM_STREAMS:
            rank.blocking("all_reduce", family, NORM_BYTES, stream=stream)
        if self.spec.host.norm_to_host:
            rank.synchronize()
            rank.host_work("clip", UPDATE_LAUNCHES * self.spec.host.launch_s)
        self._wait_for_tensors(rank, tensors)
        matrices = self._orthogonalise(rank, data, units)
        left = [self.stages[stage][0] for stage in stages] if self.updates_units else units
        owned = self._update(rank, left, matrices)
        if self.traffic.updates_on_host:
            data.update_on_host(owned, host_update_bytes(self.context.runtime, owned))
        data.redistribute(units)
        if self.loads_ahead:
            rank.host_work("loading", loading_host_s(self.spec.host, self.context))
            rank.copy("tokens", 0.0)  # the device waits for them

    def _update(self, rank: Rank, units: Sequence[Unit], matrices: Value = 0.0) -> Floats:
        """Update the parameters of some units on the device, unless the host does, and return their elements on a
        rank.
        """
        runtime, owned = self.context.runtime, self._owned(units)
        whole = sum(u.repeats * u.trained.all for u in units)
        quantised = sum(u.repeats * u.trained.all for u in units if u.is_layer and not u.wide)
        here = 0.0 if self.traffic.updates_on_host else owned
        rank.update(update_bytes(runtime, here, whole, matrices, self.context.table.micro_batches, quantised), owned)
        return owned

    def _wait_for_tensors(self, rank: Rank, tensors: int) -> None:
        """Issue host work for each updated tensor, for an optimizer whose updates wait for the host; the one for
        DTensors does not wait.
        """
        context, each_s = self.context, OPTIMIZERS[self.context.runtime.optimizer].tensor_s
        if not each_s or self.traffic.updates_on_host:
            return
        cut = (context.table.fully_sharded | (context.table["tp"] > 1)) & (not self.spec.flat_units)
        rank.synchronize()
        rank.host_work("tensors", np.where(cut, 0.0, each_s * tensors))

    def _owned(self, units: Sequence[Unit]) -> Floats:
        """Return the elements that a rank updates in some units."""
        table = self.context.table
        shard, expert = table.state_shard["optimizer"], table.expert_shard["optimizer"]
        return np.asarray(sum(u.repeats * (u.trained.shared / shard + u.trained.experts / expert) for u in units))

    def _orthogonalise(self, rank: Rank, data: DataWriter, units: Sequence[Unit]) -> Value:
        """Orthogonalise the momentum of hidden matrices if the optimizer does so, and return the elements of those that
        a rank updates.
        """
        found = [(unit.repeats, unit.orthogonal) for unit in units if unit.orthogonal is not None]
        if not found:
            return 0.0
        shard, expert = (
            each["optimizer"] for each in (self.context.table.state_shard, self.context.table.expert_shard)
        )
        for repeats, each in found:
            data.gather_matrices(each, repeats)
            rank.orthogonalise(repeats * each.products_s(self.context), repeats * (each.shared + each.experts))
        return np.asarray(sum(repeats * (each.shared / shard + each.experts / expert) for repeats, each in found))
