"""One training step, issued to a pipeline rank: micro batches through its stages, traffic around them, the optimizer.

Reads like the loop it stands for. A rank runs its schedule's actions in order; an action runs the units of its stage
(embedding, layers, head) forward, or backward in reverse; each unit is gathered before use and its gradients are sent on
their way after. Memory is counted as the compute stream gets there, in the order in which the host asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from simulator.columns.plan_table import Floats
from simulator.config.runtime import DTYPE_BYTES
from simulator.pipeline.schedules.table import Action, Kind, Schedule
from simulator.runtimes.library import ModelOperators
from simulator.step.context import CostContext
from simulator.step.held import State, between_stages_bytes, placeholder_bytes, state_bytes
from simulator.step.host import host_synchronizes, pass_host_s, rest_host_s, step_host_s
from simulator.step.offload import held_bytes
from simulator.step.rank import Pass, Rank
from simulator.step.symmetric_memory import symmetric_bytes
from simulator.step.traffic import DataTraffic, DataWriter, data_traffic
from simulator.step.units import Unit, held_kinds
from simulator.step.update import NORM_BYTES, UPDATE_LAUNCHES, update_bytes
from simulator.step.zero import ZeroBuffers, zero_buffers

# Whose shares of the gradient norm are summed, and on which streams.
NORM_STREAMS = (("dp", "dp norm"), ("tp", "tp comm"), ("pp", "pp norm"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStages:
    """What a pipeline rank is: its stages, whether it has the network's ends, and its micro batches in flight at once."""

    stages: tuple[int, ...]
    first: bool
    last: bool
    in_flight: Floats


def stages_of_rank(schedule: Schedule, rank: int, in_flight: Floats | float) -> RankStages:
    """Return what a rank of a schedule is, with `in_flight` of its (stage, micro batch) pairs in flight at most."""
    stages = schedule.stages_of(rank)
    return RankStages(
        stages=stages,
        first=0 in stages,
        last=schedule.stages - 1 in stages,
        in_flight=np.atleast_1d(np.asarray(in_flight, dtype=np.float64)) / len(stages),
    )


def message_bytes(context: CostContext, hidden: int) -> Floats:
    """Return the bytes that a rank sends to the next stage for one micro batch."""
    table, runtime = context.table, context.runtime
    nbytes = context.sizes["u"] * hidden * DTYPE_BYTES[runtime.activation_dtype]
    if context.spec.pipeline.scatter_p2p:
        nbytes = np.where(table.sequence_parallel, nbytes, nbytes / table["tp"])
    return np.asarray(nbytes)


class StepWalk:
    """Walks plans that differ in amounts only: those of `context`, with the units `stages` of each stage."""

    def __init__(
        self, context: CostContext, operators: ModelOperators, stages: Sequence[Sequence[Unit]], *, single: bool
    ) -> None:
        self.context, self.operators, self.stages = context, operators, stages
        self.spec, self.single = context.spec, single  # a step of one micro batch
        self.traffic: DataTraffic = data_traffic(context)
        # A pipeline is given all its tokens at once.
        self.waits_for_tokens = self.spec.host.synchronizes == "micro_batch" and bool(context.table["pp"][0] == 1)
        self.synchronizes = bool(host_synchronizes(self.spec.host, context.table)[0])
        self.cast_bytes = self._cast_bytes()

    def with_stages(self, stages: Sequence[Sequence[Unit]]) -> StepWalk:
        """Return a walk of the same plans with other units on their stages."""
        other = copy(self)
        other.stages = stages
        return other

    def units_of(self, held: RankStages) -> list[Unit]:
        return [unit for stage in held.stages for unit in self.stages[stage]]

    def begin(self, rank: Rank, held: RankStages) -> DataWriter:
        """What is there before the first micro batch: parameters, optimizer state, and the step's own host work."""
        units, spec = self.units_of(held), self.spec
        rank.host_work("step", step_host_s(spec.host, self.context))
        standing: tuple[State, ...] = ("parameters", "optimizer")
        for kind in standing:
            rank.alloc(kind, self._sharded(units, kind) * held_bytes(self.context, kind), kind, filled=True)
        if not self.traffic.gradients_appear and not self._gradients_come:
            nbytes = self._sharded(units, "gradients") * held_bytes(self.context, "gradients")
            rank.alloc("gradients", nbytes, "gradients", filled=True)
        table = self.context.table
        if not self.traffic.fully_sharded:
            if spec.ddp.bucket_copy:
                whole = sum(u.repeats * u.elements for u in units) * state_bytes(self.context)["gradients"]
                rank.alloc("buckets", np.where(table["dp_replicate"] > 1, whole, 0.0), "gradient_buffers", filled=True)
            rank.alloc("placeholders", self._placeholder_bytes(units), "gradient_buffers", filled=True)
        rank.alloc("between stages", self._between_stages_bytes(held), "activations", filled=True)
        dense, moe = (np.full((len(table), 1), count) for count in held_kinds(units))
        rank.alloc("symmetric", symmetric_bytes(self.context, dense, moe)[:, 0], "symmetric_buffers", filled=True)
        kept = sum(u.repeats * u.kept_cast for u in units) * self.cast_bytes
        rank.alloc("cast weights", kept, "gathered_parameters", filled=True)
        zero = self._zero_buffers(units)
        if zero is not None:
            rank.alloc("bucket", zero.standing, "gradient_buffers", filled=True)
        return DataWriter(rank=rank, traffic=self.traffic, zero=zero)

    def action(self, rank: Rank, data: DataWriter, stage: int, kind: Kind, micro_batch: int, *, last: bool) -> None:
        """Run one action of a schedule; `last`: of the step's last micro batch."""
        if kind is not Kind.WEIGHT_GRAD and self.spec.host.pp_pass_s:
            rank.host_work("pass", pass_host_s(self.spec.host, self.context.table))
        if kind is Kind.FORWARD:
            if micro_batch and self.waits_for_tokens:
                rank.synchronize()
            self._forward(rank, data, self.stages[stage], micro_batch)
        else:
            self._backward(rank, data, self.stages[stage], kind, micro_batch, last=last)
            if stage == 0 and kind is not Kind.INPUT_GRAD and self.traffic.reduces(last_micro_batch=last):
                data.wait_for_reductions()
        if self.synchronizes:
            rank.synchronize()

    def pair(self, rank: Rank, data: DataWriter, backward: Action, forward: Action, *, last: bool) -> None:
        """Run a backward and a forward beside each other; `last`: the backward is of the step's last micro batch."""
        rank.begin_pair()
        self.action(rank, data, backward.stage, backward.kind, backward.micro_batch, last=last)
        rank.next_of_pair()
        self.action(rank, data, forward.stage, forward.kind, forward.micro_batch, last=False)
        rank.end_pair()

    def _forward(self, rank: Rank, data: DataWriter, units: Sequence[Unit], micro_batch: int) -> None:
        # Autocast remembers its copies to the end of the pass; what compiled blocks cast is theirs.
        remembered = 0.0 if self.context.runtime.compile else self.cast_bytes
        for position, unit in enumerate(units):
            following = units[position + 1] if position + 1 < len(units) else None
            rank.begin(unit)
            data.before(unit, following)
            rank.alloc(f"saved {unit.name} {micro_batch}", unit.saved_bytes, "activations")
            rank.alloc(f"cast {unit.name} {micro_batch}", unit.recast * remembered, "loss_and_recompute")
            if np.any(unit.passing_bytes):
                rank.alloc(f"passing {unit.name} {micro_batch}", unit.passing_bytes, "loss_and_recompute")
                rank.run(unit, Pass.FORWARD)
                rank.free(f"passing {unit.name} {micro_batch}")
            else:
                rank.run(unit, Pass.FORWARD)
            # The last unit is needed again at once.
            if position + 1 < len(units):
                data.after(unit, last_use=False)
            rank.ended(unit)
        for unit in units:
            rank.free(f"cast {unit.name} {micro_batch}")

    def _backward(
        self, rank: Rank, data: DataWriter, units: Sequence[Unit], kind: Kind, micro_batch: int, *, last: bool
    ) -> None:
        reducing = self.traffic.reduces(last_micro_batch=last) and kind is not Kind.INPUT_GRAD
        whole = self.traffic.unsharded_gradient_bytes if self.traffic.fully_sharded else 0.0
        for position in reversed(range(len(units))):
            unit = units[position]
            name = f"{unit.name} {micro_batch}"
            rank.begin(unit)
            if kind is Kind.WEIGHT_GRAD:
                rank.run(unit, Pass.WEIGHT)
            else:
                data.before(unit, units[position - 1] if position else None)
                again = np.where(unit.again_bytes > 0, unit.recast * self.cast_bytes, 0.0)
                rank.alloc(f"again {name}", unit.again_bytes + again, "loss_and_recompute")
                rank.run(unit, Pass.BACKWARD if kind is Kind.BACKWARD else Pass.INPUT)
                rank.free(f"again {name}")
            if kind is not Kind.INPUT_GRAD:
                rank.free(f"saved {name}")
                # Its gradient is whole by the time its activations are gone.
                rank.alloc(f"gradient of {name}", unit.elements * whole, "gradient_buffers")
                data.after_backward(unit, reducing=reducing)
                rank.free(f"gradient of {name}")
                if self._gradients_come:
                    rank.alloc(f"gradient of {name}", self._gradient_bytes(unit), "gradients")
                data.after(unit, last_use=last)
            rank.ended(unit)

    def end(self, rank: Rank, data: DataWriter, held: RankStages) -> None:
        """Join what is under way, sum the gradient norm over all that share it, and update."""
        units = self.units_of(held)
        rank.host_work("rest", rest_host_s(self.spec.host, self.context.table))
        data.finish(units)
        for family, stream in NORM_STREAMS:
            rank.blocking("all_reduce", family, NORM_BYTES, stream=stream)
        if self.spec.host.norm_to_host:
            rank.synchronize()
            rank.host_work("clip", UPDATE_LAUNCHES * self.spec.host.launch_s)
        owned = self._sharded(units, "optimizer")
        runtime, whole = self.context.runtime, sum(u.repeats * u.elements for u in units)
        wide = 0.0 if data.zero is None else data.zero.update / whole
        for unit in units:  # module by module: they fit where activations have been
            rank.alloc(f"wide gradient of {unit.name}", unit.repeats * unit.elements * wide, "gradients")
        if self.traffic.updates_on_host:
            rank.update(update_bytes(runtime, 0.0, whole), owned)
            data.update_on_host(owned, update_bytes(runtime, owned, 0.0))
        else:
            rank.update(update_bytes(runtime, owned, whole), owned)
        for unit in units:
            rank.free(f"wide gradient of {unit.name}")
        data.redistribute(units)

    # --- amounts ------------------------------------------------------------------------------------------------

    @property
    def _gradients_come(self) -> bool:
        """Whether gradients that stay whole are there only from the backward pass that makes them: one a step."""
        state = self.spec.state
        return self.single and state.gradients_freed and not self.traffic.fully_sharded and self.traffic.adds_up

    def _gradient_bytes(self, unit: Unit) -> Floats:
        """Bytes of the gradients of a unit on a rank, in the type and the shards in which they are kept."""
        return self._sharded([unit], "gradients") / unit.repeats * held_bytes(self.context, "gradients")

    def _sharded(self, units: Sequence[Unit], kind: State) -> Floats:
        """Return the elements of some units that a rank has of a kind of state."""
        table = self.context.table
        shard, expert = table.state_shard[kind], table.expert_shard[kind]
        return np.asarray(sum(u.repeats * (u.shared / shard + u.experts / expert) for u in units))

    def _cast_bytes(self) -> Floats:
        """Bytes of an element of the copies that autocast makes of weights; 0 where it makes none."""
        bytes_of = self.context.dtype_bytes
        casts = self.context.table.conditions["autocast"] & (bytes_of("param") > bytes_of("compute"))
        return np.where(casts, bytes_of("compute"), 0.0)

    def _between_stages_bytes(self, held: RankStages) -> Floats:
        rows = (len(self.context.table), 1)
        first, last = np.full(rows, held.first), np.full(rows, held.last)
        return between_stages_bytes(self.context, first, last, held.in_flight[:, None])[:, 0]

    def _zero_buffers(self, units: Sequence[Unit]) -> ZeroBuffers | None:
        """Return the buffers of a runtime that has ZeRO's."""
        if self.spec.zero is None:
            return None
        return zero_buffers(
            self.context, np.asarray(sum(u.repeats * u.elements for u in units)), self._sharded(units, "optimizer")
        )

    def _placeholder_bytes(self, units: Sequence[Unit]) -> Floats:
        dense, moe = held_kinds(units)
        layers = [*(self.operators.dense_layer if dense else ()), *(self.operators.moe_layer if moe else ())]
        return placeholder_bytes(layers, self.context)
