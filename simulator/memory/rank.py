"""One pipeline rank's step as its host runs it: the requests to the caching allocator, in order and by stream.

The host runs ahead of the device, so a tensor exists from the moment its operator is issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest

import numpy as np

from simulator.kernels.operators import tensor_bytes
from simulator.memory.allocator import Block, CachingAllocator
from simulator.memory.growing import GrowingAllocator
from simulator.memory.plan_tensors import Piece, PlanTensors
from simulator.memory.rank_units import COMPUTE, REDUCE, Instance, RankUnits
from simulator.pipeline.schedules.table import Action, Kind
from simulator.step.held import autocast_remembers, placeholder_bytes, workspace_bytes
from simulator.step.symmetric_memory import exchange_bytes, symmetric_bytes
from simulator.step.units import Unit, held_kinds
from topology.time_limit import check_time

PEERS = "peers"


class RankReplay(RankUnits):
    """One rank of a plan with an allocator: call `begin()` or `start()`, then `step()` repeatedly."""

    def __init__(self, plan: PlanTensors, rank: int, allocator: CachingAllocator | GrowingAllocator) -> None:
        super().__init__(plan, rank, allocator)
        self.rank = rank
        self.row = plan.schedule.table[rank]
        self.running: dict[tuple[str, int], Instance] = {}
        self.outputs: dict[tuple[int, int], Block] = {}
        # The newest output, to which a schedule of one stage refers until there is another (schedules.py: `output`).
        self.newest: list[Block] = []
        self.logits: list[Block] = []  # logits that a trainer keeps for metrics until there are others
        self.kept: list[Block] = []  # inputs of frozen units and their gradients, kept until a backward pass ends
        self.leaving: list[Instance] = []  # layers whose tensors are being copied to host memory
        self.watches = False  # whether to record the most bytes allocated in each pass of a step, unit by unit
        self.highest: list[int] = []
        self.zero = plan.zero_of(self.units)
        self.casts = bool(self.context.table.conditions["autocast"][0]) and self.param_bytes > self.compute_bytes
        self.message_bytes = float(tensor_bytes("u h", self.context.sizes, self.context.dtype_bytes)[0])

    # --- the step -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Allocate what exists before a step; where all steps repeat the first, the optimizer's state as well."""
        self.start()
        if self.plan.repeats and not self.optimizer:
            self.make_optimizer()

    def start(self) -> None:
        """Allocate what exists before the first step."""
        for unit in self.units:
            width = self.plan.share(unit, "parameters") * self.plan.state["parameters"]
            self._taken(*(elements.stored * width for elements in self.wrapped[unit.name].elements))
        workspace = workspace_bytes(self.context.roofline.gpu.architecture)
        self._taken(workspace, workspace)  # of the forward and the backward pass
        whole = float(sum(u.trained.all[0] for u in self.units))
        if not self.traffic.adds_up:  # gradients are added up in place, in buffers that stay
            for unit in self.units:
                shard = float(unit.trained.all[0]) * self.plan.share(unit, "gradients")
                self._taken(shard * self.plan.state["gradients"])
        if self.spec.ddp.bucket_copy and not self.traffic.fully_sharded and self.context.table["dp_replicate"][0] > 1:
            bucket = self.spec.ddp.bucket_bytes or whole
            left = whole * self.context.dtype_bytes("trained")
            while left > 0:
                self._taken(min(left, bucket))
                left -= bucket
        dense, moe = (np.full((1, 1), count) for count in held_kinds(self.units))
        operators = self.plan.operators
        kinds = [*(operators.dense_layer if dense[0, 0] else ()), *(operators.moe_layer if moe[0, 0] else ())]
        if not self.traffic.fully_sharded:
            self._taken(float(placeholder_bytes(kinds, self.context)[0]))
        block = max((float(unit.elements[0]) for unit in self.units if unit.is_layer), default=0.0)
        shared = symmetric_bytes(self.context, dense, moe) + exchange_bytes(self.context, np.array([[block]]))
        self._taken(float(shared[0, 0]), stream=PEERS)
        self._taken(*self.plan.stage_buffers(self.rank))
        self._taken(self.zero["standing"])
        if self.spec.state.flattens_elements:  # stage_1_and_2.py: initialize_optimizer_states updates zeros at first
            self.make_optimizer()

    def step(self) -> None:
        """Run one step."""
        for wrapped in self.wrapped.values():  # zero_grad(set_to_none=True)
            if wrapped.gradients and not self.traffic.fully_sharded:
                wrapped.whole_gradients.clear()
            self._give(wrapped.gradients)
        self.highest = []
        self.run_row(0, len(self.row))
        self.end_step()

    def run_row(self, start: int, stop: int) -> None:
        """Run the actions of a step from one number up to another."""
        for action in self.row[start:stop]:
            check_time()
            self.run(action)

    def end_step(self) -> None:
        """Update the parameters after the last action."""
        self._give(self.newest)  # the schedule has returned
        for flat in self.plan.flattened_at_end(self.units):
            self._give(self._taken(*flat))
        if not self.optimizer:
            self.make_optimizer()
        made = self.plan.made_by_update(self.units, self.zero["update"])
        self._give(self._taken(*made))

    def run(self, action: Action) -> None:
        """Run an action of the schedule; passes of a pair layer by layer, the forward pass ahead."""
        passes = [self._pass(leaf) for leaf in action.leaves]
        if self.watches:
            passes = [self._watched(units) for units in passes]
        deque(zip_longest(*reversed(passes)) if self.plan.paired else chain(*passes), maxlen=0)

    def _watched(self, units: Iterator[None]) -> Iterator[None]:
        """Record the most bytes allocated in each unit's pass."""
        memory = self.memory
        memory.peak_allocated_bytes = memory.allocated_bytes
        for _ in units:
            self.highest.append(memory.peak_allocated_bytes)
            yield
            memory.peak_allocated_bytes = memory.allocated_bytes
        if self.highest:  # what ends the pass
            self.highest[-1] = max(self.highest[-1], memory.peak_allocated_bytes)

    def _pass(self, leaf: Action) -> Iterator[None]:
        """Return a pass as an iterator over its units."""
        last = leaf.micro_batch == self.plan.last_turned[leaf.stage]
        if leaf.kind is Kind.FORWARD:
            return self._forward(leaf.stage, leaf.micro_batch)
        if leaf.kind is Kind.WEIGHT_GRAD:
            return self._weights_turn(leaf.stage, leaf.micro_batch, last=last)
        return self._backward(leaf.stage, leaf.micro_batch, last=last, split=leaf.kind is Kind.INPUT_GRAD)

    def _forward(self, stage: int, micro_batch: int) -> Iterator[None]:
        units = self.plan.stages[stage]
        if self.gathers_ahead:
            self._gather_ahead(stage)
        given = None if stage == 0 or self.spec.pipeline.receive_buffers else self._taken(self.message_bytes)[0]
        recast, own = list[Block](), list[Block]()
        for position, unit in enumerate(units):
            passes = self.plan.passes(unit)
            self._gather(unit, forward=True)
            instance = self.running[unit.name, micro_batch] = Instance()
            if self.casts:
                instance.casts = self._taken(unit.kept_cast[0] * self.compute_bytes)
                own, others = (self._taken(nbytes) for nbytes in self.plan.recast_bytes(unit))
                if not autocast_remembers(self.context.runtime):
                    self._give(others)
                recast += others
            if given is not None:
                instance.slots[passes.inward] = given
            self._play(unit, instance, self.plan.pieces(passes.forward))
            self._give(own)
            instance.from_forward = frozenset(instance.slots)
            given = instance.slots.pop(passes.outward, None)
            if self.plan.away and unit.is_layer:
                self._send_away(instance)
            if position + 1 < len(units) and unit is not self.tied and not self._in_root(unit):
                self._reshard(unit, last_use=False)
            yield
        self._give(recast)
        if given is not None:
            # A pipeline keeps the output of a stage until its backward pass (torch/distributed/pipelining/stage.py,
            # fwd_cache).
            if self.spec.layer.metrics_after and units and units[-1].block == "head":
                self._give(self.logits)
                self.logits.append(given)
            elif self.piped and self.spec.pipeline.caches_outputs:
                self._give(self.newest)
                self.outputs[stage, micro_batch] = given
            else:
                self.memory.free(given)

    def _backward(self, stage: int, micro_batch: int, *, last: bool, split: bool) -> Iterator[None]:
        units = self.plan.stages[stage]
        output = self.output_after(stage, micro_batch)
        if not self.buckets:
            self.buckets = self._taken(self.zero["buckets"]) + self._taken(self.zero["reducing"], stream=REDUCE)
        gradient: Block | None = None
        for position, unit in reversed([*enumerate(units)]):
            passes, instance = self.plan.passes(unit), self.running[unit.name, micro_batch]
            self._gather(unit, forward=False)
            self._fetch(instance)
            if self.plan.away and 0 < self.plan.returns_ahead <= position:  # in the meantime
                self._fetch(self.running[units[position - self.plan.returns_ahead].name, micro_batch])
            if gradient is not None and gradient not in self.kept:
                instance.slots[passes.incoming] = gradient
            if keeps := self.plan.keeps_inputs(unit):
                self.kept.append(instance.slots.pop(passes.inward))
            again = self._taken(*self.plan.recast_bytes(unit)) if self.casts and unit.wrapped else []
            if split:
                now, instance.later = self.plan.halves(passes.backward, instance.from_forward)
            else:
                now = self.plan.pieces(passes.backward)
            self._play(unit, instance, now)
            self._give(again)
            gradient = instance.slots.pop(passes.gradient, None)
            self.kept += [gradient] if keeps and gradient is not None else []
            if not split:
                self._turned(unit, micro_batch, last=last)
            if not self.reduces_together:
                for done in [*reversed(units)] if unit is units[0] else [] if self._in_root(unit) else [unit]:
                    self._reshard(done, last_use=last)
            yield
        if self.traffic.reduces(last_micro_batch=last) and not self.reduces_together:
            for unit in filter(self._late, reversed(units)):
                self._reduce(unit)
        self._give(output)
        self._give([gradient] if gradient is not None and gradient not in self.kept else [])
        self._give(self.kept)
        if units and units[-1].block == "head":  # a stage may have nothing to do
            self.passing += self._taken(*self.plan.metrics)
            self._give(self.passing)
        if not split:
            self._end_backward(stage, last=last)

    def output_after(self, stage: int, micro_batch: int) -> list[Block]:
        """Return the output of a stage that its backward pass frees."""
        found = [self.outputs.pop((stage, micro_batch))] if (stage, micro_batch) in self.outputs else []
        if self.one_stage and found and all(other < micro_batch for _, other in self.outputs):
            self.newest, found = found, []
        return found

    def _weights_turn(self, stage: int, micro_batch: int, *, last: bool) -> Iterator[None]:
        """The second half of a split backward pass: compute weight gradients and free their inputs."""
        for unit in reversed(self.plan.stages[stage]):
            instance = self.running[unit.name, micro_batch]
            self._play(unit, instance, instance.later)
            self._turned(unit, micro_batch, last=last)
            yield
        self._end_backward(stage, last=last)

    def _end_backward(self, stage: int, *, last: bool) -> None:
        if self.traffic.reduces(last_micro_batch=last):
            for unit in self.plan.stages[stage] if self.reduces_together else ():
                self._reshard(unit, last_use=True)
                self._reduce(unit)
            self._free_last_buffers()

    def _play(self, unit: Unit, instance: Instance, pieces: Iterable[Piece]) -> None:
        for events, weight in pieces:
            self.memory.play(events, instance.slots, COMPUTE)
            if weight is not None:
                self._weight_gradient(unit, weight)

    def _turned(self, unit: Unit, micro_batch: int, *, last: bool) -> None:
        """All gradients of a unit are computed: free its tensors, and reduce the gradients."""
        instance = self.running.pop((unit.name, micro_batch))
        self._give([*instance.casts, *instance.slots.values()])
        if self.spec.state.gradient_dtype != "reduce":
            self._weight_gradient(unit, len(self.wrapped[unit.name].elements) - 1)
        self._widen(unit)
        if self.traffic.reduces(last_micro_batch=last) and not self.reduces_together and not self._late(unit):
            self._reduce(unit)
        if self.plan.in_backward and not self.traffic.fully_sharded and not (unit.block == "head" and self.tied):
            self.wrapped[unit.name].whole_gradients.clear()
            self._give(self.wrapped[unit.name].gradients)

    def _send_away(self, instance: Instance) -> None:
        """After a layer's forward pass: copy what it keeps to host memory, after that of earlier layers."""
        self.leaving.append(instance)
        while len(self.leaving) > self.plan.on_gpu:
            gone = self.leaving.pop(0)
            gone.away = {slot: size for slot, (_, _, size) in gone.slots.items()}
            self._give([*gone.slots.values()])
            gone.slots.clear()

    def _fetch(self, instance: Instance) -> None:
        """Copy what a layer keeps back to the GPU."""
        if instance in self.leaving:
            self.leaving.remove(instance)
        for slot, nbytes in instance.away.items():
            instance.slots[slot] = self.memory.allocate(nbytes, COMPUTE)
        instance.away = {}
