"""What the parameters and gradients of a pipeline rank ask of the allocator, unit by unit.

Units are gathered and reduced as FSDP2 does it (torch/distributed/fsdp/_fully_shard: `_fsdp_param_group.py`,
`_fsdp_collectives.py`): a gather fills a flat buffer on a stream of its own, which is copied to a tensor for each
parameter on the compute stream; in a forward pass the buffer is kept until the next one has been copied. Gradients are
copied to a flat buffer on the compute stream, which the next reduction frees; its result, of which gradients are views,
is allocated on the stream of reductions. Without full sharding, gradients are allocated in the backward pass and freed
by the next step's `zero_grad`. Where a rank of a pipeline has several stages, all are gathered before its first pass.

FSDP1 (torch/distributed/fsdp/_flat_param.py, _runtime_utils.py) gathers a unit to one flat tensor of which its
parameters are views, so nothing is copied; a freed unit is kept until the device has used it, and up to `prefetch`
units may be in this state (`limit_all_gathers`). Its root unit, embedding and head, stays gathered until a backward
pass ends. Gradients of views are joined to a flat one on the compute stream.

DeepSpeed's ZeRO gathers in the same way. Its gradients go through buckets (`simulator.step.zero`): contiguous ones that
the backward pass allocates on the compute stream, copies on the stream of reductions, and float32 gradients during the
update.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from simulator.memory.allocator import Block, CachingAllocator, TensorEvent, whole_blocks
from simulator.memory.growing import GrowingAllocator
from simulator.memory.plan_tensors import Held, Piece, PlanTensors
from simulator.step.units import Unit


@dataclass(slots=True, eq=False)
class Instance:
    """A unit for one micro batch: its tensors by slot, and what the second half of a split backward pass still
    needs.
    """

    slots: dict[int, Block] = field(default_factory=dict)
    from_forward: frozenset[int] = frozenset()
    later: tuple[Piece, ...] = ()
    casts: list[Block] = field(default_factory=list)
    away: dict[int, int] = field(default_factory=dict)  # bytes of tensors that wait in host memory, by slot


@dataclass(slots=True)
class Wrapped:
    """A unit's parameters: unsharded ones while gathered, gradients being reduced, gradients that stay, and in a pass
    `fresh` ones, with the bytes that they will have in the type of reductions.
    """

    elements: list[Held]
    gathered: list[Block] = field(default_factory=list)
    flat: Block | None = None
    whole_gradients: dict[int, Block] = field(default_factory=dict)
    gradients: list[Block] = field(default_factory=list)
    fresh: dict[int, tuple[Block, float]] = field(default_factory=dict)


COMPUTE, GATHER, REDUCE, REPLICATE = "compute", "gather", "reduce", "replicate"


class RankUnits:
    """The units of one rank of a plan, and an allocator for what they ask for."""

    def __init__(self, plan: PlanTensors, rank: int, allocator: CachingAllocator | GrowingAllocator) -> None:
        self.plan, self.memory = plan, allocator
        self.context, self.spec, self.traffic = plan.context, plan.context.spec, plan.traffic
        stages = plan.schedule.stages_of(rank)
        self.units = [unit for stage in stages for unit in plan.stages[stage]]
        self.wrapped = {unit.name: Wrapped(elements=plan.elements(unit)) for unit in self.units}
        # Every stage reduces on streams of its own (FSDPCommContext): what is added to their names.
        self.own = {unit.name: f" {n}" * (n > 0) for n, stage in enumerate(stages) for unit in plan.stages[stage]}
        self.flat: Block | None = None  # the last gather's buffer, kept until the next one has been copied
        self.reducing, self.buckets = list[Block](), list[Block]()
        self.passing: list[Block] = []  # freed by the host, but still to be used by the device
        self.summed: list[Block] = []  # sums over replicas, in the type of reductions
        self.optimizer: list[Block] = []
        self.flat_units = self.spec.flat_units
        # A stage's units are resharded and reduced after its last backward pass, in the order of its forward pass
        # (torch/distributed/pipelining/stage.py: perform_reduce_grad).
        self.reduces_together = self.traffic.fully_sharded and len(plan.stages) > 1 and not self.flat_units
        self.one_stage = len(stages) == 1
        self.gathers_ahead = self.reduces_together and not self.one_stage and bool(self.traffic.shard_ranks[0] > 1)
        bytes_of, table = self.context.dtype_bytes, self.context.table
        self.compute_bytes, self.param_bytes = bytes_of("compute"), bytes_of("param")
        self.piped = bool(table["pp"][0] > 1)
        self.vocabulary_cuts = round(float(table["tp"][0])) if self.spec.state.whole_embedding_gradient else 1
        # The embedding whose matrix the head uses; the last stage of a pipeline has a copy.
        self.tied = self.units[0] if plan.tied and not self.piped else None

    def _gather_ahead(self, stage: int) -> None:
        """Gather all stages of a rank before its first pass, on its stream, and copy each from its buffers before
        its own first pass (torch/distributed/pipelining/schedules.py: UNSHARD).
        """
        width = self.traffic.compute_bytes
        if not any(wrapped.gathered or wrapped.flat for wrapped in self.wrapped.values()):
            for unit in self.units:
                self.wrapped[unit.name].flat = next(iter(self._taken(float(unit.elements[0]) * width)), None)
        for unit in self.plan.stages[stage]:
            wrapped = self.wrapped[unit.name]
            if wrapped.flat is not None:
                wrapped.gathered += self._taken(*(elements.used * width for elements in wrapped.elements))
                self.memory.free(wrapped.flat)
                wrapped.flat = None

    def _gather(self, unit: Unit, *, forward: bool) -> None:
        wrapped, t = self.wrapped[unit.name], self.traffic
        if not t.fully_sharded or wrapped.gathered:
            return
        ranks = float(t.shard_ranks[0])
        together = [*filter(self._in_root, self.units)] if self._late(unit) else [unit]
        whole = sum(float(one.elements[0]) for one in together) * t.compute_bytes
        if ranks > 1 or self.flat_units:
            # Shards are cast to a flat buffer of their own where they are stored in a wider type.
            cast = self._taken(whole / ranks, stream=GATHER) if self.param_bytes != t.compute_bytes else []
            # Blocks that copy engines exchange arrive in symmetric memory, which is there throughout.
            buffer = [] if t.pushed and unit.is_layer else self._taken(whole, stream=GATHER)
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
        for one in (self.wrapped[one.name] for one in together):
            one.gathered += self._taken(*(elements.used * t.compute_bytes for elements in one.elements))
        if forward and buffer:
            self.flat = buffer[0]
        else:
            self._give(buffer)

    def _in_root(self, unit: Unit) -> bool:
        fsdp = self.spec.fsdp
        return (fsdp.flat_parameters or fsdp.root_ends) and unit.block in {"embedding", "head"}

    def _late(self, unit: Unit) -> bool:
        """Whether a unit is in FSDP2's root: gathered in one, and reduced when a backward pass ends."""
        return self.spec.fsdp.root_ends and self._in_root(unit)

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
        keep, width = t.gradient_bytes, self.compute_bytes
        if t.fully_sharded:
            keep = t.reduce_bytes if not t.every_micro_batch else t.unsharded_gradient_bytes
            width = t.unsharded_gradient_bytes
        waits = keep != width and self.reduces_together  # for the others of the unit, before it is added to theirs
        updated = self.plan.in_backward and not t.fully_sharded and unit is not self.tied  # at once
        if updated or (rows == 1 and place in wrapped.whole_gradients and not waits):  # added up in place
            self._through(rows * elements * width)
            return
        fresh = self._taken(rows * elements * width)
        if rows > 1 and t.fully_sharded:  # FSDP sums it over tensor-parallel ranks first
            mine = self._taken(elements * t.unsharded_gradient_bytes)
            self._give(fresh)
            fresh = mine
        elif rows > 1:
            elements *= rows
        if waits:
            wrapped.fresh[place] = fresh[0], elements * keep
            return
        if place in wrapped.whole_gradients:
            self._give(fresh)
            return
        if keep != width:
            wider = self._taken(elements * keep)
            self._give(fresh)
            fresh = wider
        wrapped.whole_gradients[place] = fresh[0]
        if not t.fully_sharded and not t.gradients_sharded:
            wrapped.gradients.append(fresh[0])

    def _widen(self, unit: Unit) -> None:
        """Add a unit's new gradients, when it has all, to those in the type of reductions
        (`to_accumulated_grad_if_needed`).
        """
        wrapped = self.wrapped[unit.name]
        for place, (fresh, nbytes) in sorted(wrapped.fresh.items()):
            if place not in wrapped.whole_gradients:
                wrapped.whole_gradients[place] = self._taken(nbytes)[0]
            self._give([fresh])
        wrapped.fresh.clear()

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
        if t.casts_own:
            if not wrapped.gradients:
                wrapped.gradients += self._taken(*(one.trained * t.gradient_bytes for one in wrapped.elements))
            self._give(whole)
            return
        if self.spec.zero is not None:  # through its buckets to gradients that stay
            self._give(whole)
            if t.adds_up:
                self._keep_shard(unit, REDUCE)
            return
        if self.spec.fsdp.flat_parameters:
            flat = self._taken(elements * t.unsharded_gradient_bytes)
            flat += (
                self._taken(elements * t.reduce_bytes, stream=REDUCE + self.own[unit.name])
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
        result = self._taken(shard * t.reduce_bytes, stream=REDUCE + self.own[unit.name])
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
        fresh = self._taken(shard, stream=stream if stream == COMPUTE else stream + self.own[unit.name])
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
        if events := _requests(sizes):
            self.memory.play(events, slots, stream)
        return [*slots.values()]

    def _through(self, nbytes: float) -> None:
        """Allocate a tensor and free it."""
        self.memory.play([*_requests((nbytes,)), (0, 0)], {}, COMPUTE)

    def _give(self, blocks: list[Block]) -> None:
        if blocks:
            self.memory.play(_returns(len(blocks)), dict(enumerate(blocks)), COMPUTE)
            blocks.clear()


@lru_cache(maxsize=1 << 12)
def _requests(sizes: tuple[float, ...]) -> tuple[TensorEvent, ...]:
    """Return the events that allocate tensors of some bytes, in slots of their own."""
    return tuple((slot, whole_blocks(round(nbytes))) for slot, nbytes in enumerate(sizes) if nbytes >= 1)


@lru_cache(maxsize=1 << 8)
def _returns(count: int) -> tuple[TensorEvent, ...]:
    """Return the events that free the tensors of so many slots."""
    return tuple((slot, 0) for slot in range(count))
