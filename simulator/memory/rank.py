"""One pipeline rank's step as its host runs it: the requests to the caching allocator, in order and by stream.

The host runs ahead of the device, so a tensor exists from the moment its operator is issued. Units are gathered and
reduced as FSDP2 does it (torch/distributed/fsdp/_fully_shard: `_fsdp_param_group.py`, `_fsdp_collectives.py`): a gather
fills a flat buffer on a stream of its own, which is copied to a tensor for each parameter on the compute stream; in a
forward pass the buffer is kept until the next one has been copied. Gradients are copied to a flat buffer on the compute
stream, which the next reduction frees; its result, of which gradients are views, is allocated on the stream of
reductions. Without full sharding, gradients are allocated in the backward pass and freed by the next step's
`zero_grad`.

FSDP1 (torch/distributed/fsdp/_flat_param.py, _runtime_utils.py) gathers a unit to one flat tensor of which its
parameters are views, so nothing is copied; a freed unit is kept until the device has used it, and up to `prefetch`
units may be in this state (`limit_all_gathers`). Its root unit, embedding and head, stays gathered until a backward
pass ends. Gradients of views are joined to a flat one on the compute stream.

DeepSpeed's ZeRO gathers in the same way. Its gradients go through buckets (`simulator.step.zero`): contiguous ones that
the backward pass allocates on the compute stream, copies on the stream of reductions, and float32 gradients during the
update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest

import numpy as np

from simulator.kernels.operators import tensor_bytes
from simulator.memory.allocator import Block, CachingAllocator, whole_blocks
from simulator.memory.growing import GrowingAllocator
from simulator.memory.plan_tensors import Piece, PlanTensors
from simulator.memory.wrapped import Instance, Wrapped
from simulator.pipeline.schedules.table import Action, Kind
from simulator.step.cublas import workspace_bytes
from simulator.step.held import autocast_remembers, placeholder_bytes, state_bytes
from simulator.step.symmetric_memory import symmetric_bytes
from simulator.step.units import Unit, held_kinds
from topology.time_limit import check_time

COMPUTE, GATHER, REDUCE, REPLICATE, PEERS = "compute", "gather", "reduce", "replicate", "peers"


class RankReplay:
    """One rank of a plan with an allocator: call `begin()` or `start()`, then `step()` repeatedly."""

    def __init__(
        self,
        plan: PlanTensors,
        rank: int,
        allocator: CachingAllocator | GrowingAllocator,
        *,
        micro_batches: float,
    ) -> None:
        self.plan, self.rank, self.memory = plan, rank, allocator
        self.micro_batches = micro_batches  # micro batches of the step itself; the replayed schedule may have fewer
        self.context, self.spec, self.traffic = plan.context, plan.context.spec, plan.traffic
        self.row = plan.schedule.table[rank]
        self.units = [unit for stage in plan.schedule.stages_of(rank) for unit in plan.stages[stage]]
        self.wrapped = {unit.name: Wrapped(elements=plan.elements(unit)) for unit in self.units}
        self.running: dict[tuple[str, int], Instance] = {}
        self.outputs: dict[tuple[int, int], Block] = {}
        self.logits: list[Block] = []  # logits that a trainer keeps for metrics until there are others
        self.flat: Block | None = None  # the last gather's buffer, kept until the next one has been copied
        self.reducing, self.buckets = list[Block](), list[Block]()
        self.passing: list[Block] = []  # freed by the host, but still to be used by the device
        self.summed: list[Block] = []  # sums over replicas, in the type of reductions
        self.optimizer: list[Block] = []
        self.kept: list[Block] = []  # inputs of frozen units and their gradients, kept until a backward pass ends
        self.leaving: list[Instance] = []  # layers whose tensors are being copied to host memory
        self.watches = False  # whether to record the most bytes allocated in each pass of a step, unit by unit
        self.highest: list[int] = []
        bytes_of, table = self.context.dtype_bytes, self.context.table
        self.flat_units = self.spec.fsdp.flat_parameters or self.spec.zero is not None
        self.zero = plan.zero_of(self.units)
        self.compute_bytes, self.param_bytes = bytes_of("compute"), bytes_of("param")
        self.casts = bool(table.conditions["autocast"][0]) and self.param_bytes > self.compute_bytes
        self.piped = bool(table["pp"][0] > 1)
        self.message_bytes = float(tensor_bytes("u h", self.context.sizes, bytes_of)[0])
        self.vocabulary_cuts = round(float(table["tp"][0])) if self.spec.state.whole_embedding_gradient else 1
        # The embedding whose matrix the head uses; the last stage of a pipeline has a copy.
        self.tied = self.units[0] if plan.tied and not self.piped else None

    # --- the step -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Allocate what exists before a step; where all steps repeat the first, the optimizer's state as well."""
        self.start()
        if self.plan.repeats:
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
            left = whole * state_bytes(self.context)["gradients"]
            while left > 0:
                self._taken(min(left, bucket))
                left -= bucket
        dense, moe = (np.full((1, 1), count) for count in held_kinds(self.units))
        operators = self.plan.operators
        kinds = [*(operators.dense_layer if dense[0, 0] else ()), *(operators.moe_layer if moe[0, 0] else ())]
        if not self.traffic.fully_sharded:
            self._taken(float(placeholder_bytes(kinds, self.context)[0]))
        self._taken(float(symmetric_bytes(self.context, dense, moe)[0, 0]), stream=PEERS)
        self._taken(*self.plan.stage_buffers(self.rank, self.micro_batches))
        self._taken(self.zero["standing"])

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
            if self.plan.away and unit.block in {"dense", "moe"}:
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
                self.outputs[stage, micro_batch] = given
            else:
                self.memory.free(given)

    def _backward(self, stage: int, micro_batch: int, *, last: bool, split: bool) -> Iterator[None]:
        units = self.plan.stages[stage]
        output = self.outputs.pop((stage, micro_batch), None)
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
            for done in [*reversed(units)] if unit is units[0] else [] if self._in_root(unit) else [unit]:
                self._reshard(done, last_use=last)
            yield
        self._give([block for block in (gradient, output) if block is not None and block not in self.kept])
        self._give(self.kept)
        if units and units[-1].block == "head":  # a stage may have nothing to do
            self.passing += self._taken(*self.plan.metrics)
            self._give(self.passing)
        if not split and self.traffic.reduces(last_micro_batch=last):
            self._free_last_buffers()

    def _weights_turn(self, stage: int, micro_batch: int, *, last: bool) -> Iterator[None]:
        """The second half of a split backward pass: compute weight gradients and free their inputs."""
        for unit in reversed(self.plan.stages[stage]):
            instance = self.running[unit.name, micro_batch]
            self._play(unit, instance, instance.later)
            self._turned(unit, micro_batch, last=last)
            yield
        if self.traffic.reduces(last_micro_batch=last):
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
        if self.traffic.reduces(last_micro_batch=last):
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

    # --- parameters and gradients -------------------------------------------------------------------------------

    def _gather(self, unit: Unit, *, forward: bool) -> None:
        wrapped, t = self.wrapped[unit.name], self.traffic
        if not t.fully_sharded or wrapped.gathered:
            return
        ranks = float(t.shard_ranks[0])
        whole = float(unit.elements[0]) * t.compute_bytes
        if ranks > 1 or self.flat_units:
            # Shards are cast to a flat buffer of their own where they are stored in a wider type.
            cast = self._taken(whole / ranks, stream=GATHER) if self.param_bytes != t.compute_bytes else []
            buffer = self._taken(whole, stream=GATHER)
            self._give(cast)
            if self.flat_units:
                wrapped.gathered += buffer
                while len(self.passing) > self.spec.fsdp.prefetch:
                    self.memory.free(self.passing.pop(0))
                return
            if forward and self.flat is not None:
                self.memory.free(self.flat)
                self.flat = None
        else:
            buffer = []
        wrapped.gathered += self._taken(*(elements.used * t.compute_bytes for elements in wrapped.elements))
        if forward and buffer:
            self.flat = buffer[0]
        else:
            self._give(buffer)

    def _in_root(self, unit: Unit) -> bool:
        return self.spec.fsdp.flat_parameters and unit.block in {"embedding", "head"}

    def _reshard(self, unit: Unit, *, last_use: bool) -> None:
        if self.traffic.fully_sharded and (last_use or not self.traffic.keeps_gathered):
            if self.flat_units:
                self.passing += self.wrapped[unit.name].gathered
                self.wrapped[unit.name].gathered.clear()
            self._give(self.wrapped[unit.name].gathered)

    def _weight_gradient(self, unit: Unit, place: int) -> None:
        """Allocate the gradient of one parameter, or add to the existing one."""
        rows = self.vocabulary_cuts if unit.block == "embedding" and place == 0 else 1
        if unit.block == "head" and place == 0 and self.tied is not None:
            unit = self.tied  # rows of the tied embedding are added later
        wrapped, t = self.wrapped[unit.name], self.traffic
        elements = wrapped.elements[place].trained
        if not elements or not (t.adds_up or t.fully_sharded):
            return
        fresh = self._taken(rows * elements * (t.unsharded_gradient_bytes if t.fully_sharded else self.compute_bytes))
        if self.plan.in_backward and not t.fully_sharded and unit is not self.tied:  # used for the update, then freed
            self._give(fresh)
            return
        if rows > 1 and t.fully_sharded:  # FSDP sums it over tensor-parallel ranks first
            mine = self._taken(elements * t.unsharded_gradient_bytes)
            self._give(fresh)
            fresh = mine
        elif rows > 1:
            elements *= rows
        if t.fully_sharded:
            keep = t.reduce_bytes if not t.every_micro_batch else t.unsharded_gradient_bytes
            width = t.unsharded_gradient_bytes
        else:
            keep, width = t.gradient_bytes, self.compute_bytes
        if place in wrapped.whole_gradients:
            self._give(fresh)  # added up in place
            return
        if keep != width:
            wider = self._taken(elements * keep)
            self._give(fresh)
            fresh = wider
        wrapped.whole_gradients[place] = fresh[0]
        if not t.fully_sharded and not t.gradients_sharded:
            wrapped.gradients.append(fresh[0])

    def _reduce(self, unit: Unit) -> None:
        wrapped, t = self.wrapped[unit.name], self.traffic
        elements = float(unit.trained.all[0])
        if not elements or (not t.fully_sharded and not t.gradients_sharded):
            return
        whole, wrapped.whole_gradients = list(wrapped.whole_gradients.values()), {}
        if not t.fully_sharded:
            self._give(whole)
            self._keep_shard(unit, COMPUTE)
            return
        if self.spec.zero is not None:  # through its buckets to gradients that stay
            self._give(whole)
            if t.adds_up:
                self._keep_shard(unit, REDUCE)
            return
        if self.spec.fsdp.flat_parameters:
            flat = self._taken(elements * t.unsharded_gradient_bytes)
            flat += (
                self._taken(elements * t.reduce_bytes, stream=REDUCE)
                if t.reduce_bytes != t.unsharded_gradient_bytes
                else []
            )
            self._give(self.reducing)
        else:
            self._give(self.reducing)
            flat = self._taken(elements * t.reduce_bytes)
        self.reducing = flat
        self._give(whole)
        shard = elements * self.plan.share(unit, "gradients")
        result = self._taken(shard * t.reduce_bytes, stream=REDUCE)
        # What replicas sum on a stream of their own is kept to the end of the backward pass (`_all_reduce_state`).
        kept = self.summed if t.replicated_sharding else []
        if self.plan.in_backward:
            self._give(result)
            return
        if t.gradient_bytes != t.reduce_bytes and not t.sends:
            self._keep_shard(unit, REPLICATE if t.replicated_sharding else REDUCE)
        elif not wrapped.gradients and not t.sends:
            kept = wrapped.gradients
        if kept is self.summed or kept is wrapped.gradients:
            kept += result
        else:  # cast, added to the existing one, or copied to the host
            self._give(result)

    def _keep_shard(self, unit: Unit, stream: str) -> None:
        shard = float(unit.trained.all[0]) * self.plan.share(unit, "gradients") * self.plan.state["gradients"]
        fresh = self._taken(shard, stream=stream)
        if self.wrapped[unit.name].gradients:
            self._give(fresh)
        else:
            self.wrapped[unit.name].gradients += fresh

    def _free_last_buffers(self) -> None:
        """End a backward pass with reductions: free its last buffers."""
        flat, self.flat = self.flat, None
        for blocks in (self.buckets, self.reducing, self.passing, self.summed, [flat] if flat else []):
            self._give(blocks)

    def make_optimizer(self) -> None:
        """Allocate the optimizer's state, tensor by tensor, as the first step does at its end."""
        master = bool(self.spec.state.master_weights and self.param_bytes < 4)
        for unit in self.units:
            share = self.plan.share(unit, "optimizer")
            for elements, chosen, width in self.plan.optimizers(unit):
                kinds, nbytes = len(chosen.states) + master, elements * share * width
                if kinds:  # plain SGD has no state
                    self.optimizer += self._taken(*[nbytes / kinds] * kinds)

    # --- blocks -------------------------------------------------------------------------------------------------

    def _taken(self, *sizes: float, stream: str = COMPUTE) -> list[Block]:
        """Allocate tensors of the given bytes, in turn; none for less than one byte."""
        slots: dict[int, Block] = {}
        events = [(slot, whole_blocks(round(nbytes))) for slot, nbytes in enumerate(sizes) if nbytes >= 1]
        if events:
            self.memory.play(events, slots, stream)
        return [*slots.values()]

    def _give(self, blocks: list[Block]) -> None:
        if blocks:
            slots = dict(enumerate(blocks))
            self.memory.play([(slot, 0) for slot in slots], slots, COMPUTE)
            blocks.clear()
