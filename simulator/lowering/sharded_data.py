"""Data-parallel traffic of a step as instructions: full sharding with prefetch, or reduction of whole gradients.

Fully sharded (FSDP2, torch.distributed.fsdp `fully_shard`): every unit's parameters are gathered just before use, the
next unit's while this one computes; its gradients are scattered when its backward ends, and with hybrid sharding summed
over replicas on a stream of their own. Gathers and scatters share one communicator and so one stream here. What is
copied in and out of flat buffers runs on the compute stream.

Otherwise gradients stay whole: reduced in buckets behind the backward that makes them (DDP), or after the last one
(Megatron), or scattered to a sharded optimizer (ZeRO-1) and, with sharded gradients (ZeRO-2), after each micro batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from simulator.lowering.steps import KernelStep
from simulator.lowering.writing import StepWriter
from simulator.program.cost_model import Cost
from simulator.program.program import COMPUTE, CodeWriter

STREAM = "fsdp comm"
REPLICAS = "replicate comm"
GATHER_POOL, REDUCE_POOL = "gather", "reduce"  # the allocator keeps memory of these streams apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One wrapped module: elements of its parameters on this rank before sharding, routed experts apart.

    A collapsed stage stands for `pieces` modules in a row: only the first one's gather and the last one's reduction
    have nothing to hide behind, the others run beside the stage's compute. `widest` is the largest module in it.
    Elements that products use: `kept_cast` of modules that run once, whose narrow copies backward keeps under autocast,
    `recast` of those that run again.
    """

    name: str
    shared: float
    experts: float = 0.0
    pieces: int = 1
    widest: float = 0.0
    kept_cast: float = 0.0
    recast: float = 0.0

    @property
    def elements(self) -> float:
        return self.shared + self.experts

    @property
    def in_use(self) -> float:
        """Elements that are whole at once while the unit computes."""
        return self.widest or self.elements


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTraffic:
    """How a plan keeps data-parallel ranks in step. Group names are families of the program."""

    fully_sharded: bool
    keeps_gathered: bool
    optimizer_sharded: bool
    gradients_sharded: bool
    overlap: bool
    replicated_sharding: bool  # shards are summed over replicas too (HSDP)
    shard_ranks: int
    expert_shard_ranks: int
    every_micro_batch: bool
    scatters_each: bool  # sharded gradients (ZeRO-2) go out after every micro batch
    compute_bytes: float
    reduce_bytes: float
    copies: bool
    gradient_bytes: float
    unsharded_gradient_bytes: float
    gradients_appear: bool  # a shard of each unit's gradient is allocated when it is first reduced
    adds_up: bool  # gradients of further micro batches are added by kernels of their own
    bucket_bytes: float
    hbm_bytes_per_s: float
    packing_bytes_per_s: float  # of copies into and out of flat buffers
    dp_ranks: int
    expert_dp_ranks: int


@dataclass(slots=True)
class DataWriter:
    """Writes the traffic of one pipeline rank around the compute that `training` writes."""

    code: CodeWriter
    traffic: DataTraffic
    steps: StepWriter
    _gathered: dict[str, str] = field(default_factory=dict)  # unit -> event of its gather
    _resident: set[str] = field(default_factory=set)
    _with_gradient: set[str] = field(default_factory=set)
    _accumulated: set[str] = field(default_factory=set)
    _reducing: str = ""  # the buffer of a reduction that may still be under way
    _inner: str = ""  # event of the gathers beside a collapsed unit
    _turn: int = 0

    def before(self, unit: Unit, following: Unit | None, *, reducing: bool = False) -> None:
        """Have `unit` gathered, and the gather of `following` under way, before `unit` computes.

        `reducing`: the compute to come is a backward whose gradients will be sent on their way.
        """
        t = self.traffic
        inner = 1 - 1 / unit.pieces
        if t.fully_sharded:
            fresh = unit.name not in self._resident
            self._gather(unit, 1 - inner)
            if unit.name in self._gathered:
                self.code.wait(COMPUTE, self._gathered.pop(unit.name))
            if fresh:
                self._resident.add(unit.name)
                if t.copies:
                    self._copy(f"copy_out {unit.name}", 2 * unit.elements * t.compute_bytes)
            if following is not None or inner:
                # The next gather may fill its buffer once the last one has been copied out.
                self.code.after(STREAM, COMPUTE)
            if fresh and inner:
                self._send("all_gather", "fsdp", inner * unit.shared * t.compute_bytes, t.shard_ranks)
                self._send("all_gather", "expert_fsdp", inner * unit.experts * t.compute_bytes, t.expert_shard_ranks)
                self._inner = self.code.record(STREAM)
            if following is not None:
                self._gather(following, 1 / following.pieces)
        if reducing and inner and self._reduces_behind_compute:
            self._reduce(unit, inner)

    def join(self) -> None:
        """End the compute of a collapsed unit no sooner than the gathers that ran beside it."""
        if self._inner:
            self.code.wait(COMPUTE, self._inner)
            self._inner = ""

    def after(self, unit: Unit, *, last_use: bool) -> None:
        """Let go of a unit's gathered parameters unless the plan keeps them for later."""
        if self.traffic.fully_sharded and unit.name in self._resident and (last_use or not self.traffic.keeps_gathered):
            self._resident.discard(unit.name)
            self.code.free(f"gathered {unit.name}", stream=COMPUTE)

    def turned(self, unit: Unit, *, reducing: bool) -> None:
        """A backward of `unit` has run: add its gradients to those of micro batches before, or send them off."""
        t = self.traffic
        further = unit.name in self._accumulated
        self._accumulated.add(unit.name)
        if t.fully_sharded and not t.every_micro_batch:
            # Without a reduction in between, whole gradients add up in the type they are reduced in.
            if not further:
                self.code.alloc(
                    f"accumulated {unit.name}",
                    round(unit.elements * t.reduce_bytes),
                    "gradient_buffers",
                    stream=COMPUTE,
                )
            if t.adds_up:
                self._copy("accumulate", unit.elements * (t.compute_bytes + 2 * t.reduce_bytes))
        elif further and t.adds_up and not t.fully_sharded:
            self._copy("accumulate", 3 * unit.elements * t.gradient_bytes)
        if reducing:
            self._send_off(unit)

    def reduces(self, *, last_micro_batch: bool) -> bool:
        """Whether gradients go out after this micro batch's backward."""
        t = self.traffic
        return t.every_micro_batch or last_micro_batch or (t.gradients_sharded and t.scatters_each)

    def settle(self) -> None:
        """End a backward pass: FSDP2 waits there for all reductions (`_root_post_backward_final_callback`), and so does
        DDP (`Reducer::finalize_backward`).
        """
        if self.traffic.fully_sharded or self._reduces_behind_compute:
            self.code.after(COMPUTE, STREAM)
            if self.traffic.replicated_sharding:
                self.code.after(COMPUTE, REPLICAS)
            self._release()

    def finish(self, units: list[Unit]) -> None:
        """Reduce what has not been reduced yet and join the compute stream, before the optimizer."""
        t = self.traffic
        shared, experts = sum(u.shared for u in units), sum(u.experts for u in units)
        late = t.optimizer_sharded or not t.overlap
        if not t.fully_sharded and late and not t.gradients_sharded:
            self.code.after(STREAM, COMPUTE)
            op = "reduce_scatter" if t.optimizer_sharded else "all_reduce"
            self._send(op, "dp", shared * t.reduce_bytes, t.dp_ranks)
            self._send(op, "expert_dp", experts * t.reduce_bytes, t.expert_dp_ranks)
        self.code.after(COMPUTE, STREAM)
        if t.replicated_sharding:
            self.code.after(COMPUTE, REPLICAS)
        self._release()

    def redistribute(self, units: list[Unit]) -> None:
        """Gather parameters that a sharded optimizer has updated."""
        t = self.traffic
        if t.optimizer_sharded and not t.fully_sharded:
            self.code.after(STREAM, COMPUTE)
            self._send("all_gather", "dp", sum(u.shared for u in units) * t.compute_bytes, t.dp_ranks)
            self._send("all_gather", "expert_dp", sum(u.experts for u in units) * t.compute_bytes, t.expert_dp_ranks)
            self.code.after(COMPUTE, STREAM)

    # --- parts --------------------------------------------------------------------------------------------------

    @property
    def _reduces_behind_compute(self) -> bool:
        t = self.traffic
        return t.fully_sharded or (t.overlap and not t.optimizer_sharded)

    def _send_off(self, unit: Unit) -> None:
        t = self.traffic
        if t.fully_sharded:
            width = t.reduce_bytes if not t.every_micro_batch else t.unsharded_gradient_bytes
            if t.copies:
                self._copy(f"copy_in {unit.name}", unit.elements * (width + t.reduce_bytes))
            # The buffer of the reduction before is let go when the next one has one of its own.
            self._turn += 1
            name = f"reduction {unit.name} {self._turn}"
            self.code.alloc(
                name,
                round(unit.in_use * t.reduce_bytes),
                "gradient_buffers",
                stream=COMPUTE,
                pool=REDUCE_POOL,
            )
            self._release()
            self._reducing = name
            if not t.every_micro_batch:
                self.code.free(f"accumulated {unit.name}", stream=COMPUTE)
                self._accumulated.discard(unit.name)
        if t.gradients_appear and unit.name not in self._with_gradient:
            self._with_gradient.add(unit.name)
            elements = unit.shared / t.shard_ranks + unit.experts / t.expert_shard_ranks
            nbytes = round(elements * t.gradient_bytes)
            self.code.alloc(f"gradient {unit.name}", nbytes, "gradients", filled=True, stream=COMPUTE, pool=REDUCE_POOL)
        if self._reduces_behind_compute or t.gradients_sharded:
            self.code.after(STREAM, COMPUTE)
            self._reduce(unit, 1 / unit.pieces if self._reduces_behind_compute else 1.0)
            if not t.overlap:
                self.code.after(COMPUTE, STREAM)

    def _release(self) -> None:
        if self._reducing:
            self.code.free(self._reducing, stream=COMPUTE)
            self._reducing = ""

    def _reduce(self, unit: Unit, share: float) -> None:
        t = self.traffic
        shared, experts = share * unit.shared * t.reduce_bytes, share * unit.experts * t.reduce_bytes
        if t.fully_sharded:
            if t.replicated_sharding and unit.pieces > 1:
                self.code.after(REPLICAS, STREAM)  # the pieces of a stage follow each other through both
            self._send("reduce_scatter", "fsdp", shared, t.shard_ranks)
            self._send("reduce_scatter", "expert_fsdp", experts, t.expert_shard_ranks)
            if t.replicated_sharding:
                if unit.pieces == 1:
                    self.code.after(REPLICAS, STREAM)
                shard = shared / t.shard_ranks + experts / t.expert_shard_ranks
                self.code.collective("all_reduce", "replicate", max(1, round(shard)), stream=REPLICAS)
        elif t.gradients_sharded:
            self._send("reduce_scatter", "dp", shared, t.dp_ranks)
            self._send("reduce_scatter", "expert_dp", experts, t.expert_dp_ranks)
        else:
            buckets = math.ceil((shared + experts) / t.bucket_bytes) if t.bucket_bytes else 1
            for _ in range(max(1, buckets)):
                self._send("all_reduce", "dp", shared / buckets, t.dp_ranks)
                self._send("all_reduce", "expert_dp", experts / buckets, t.expert_dp_ranks)

    def _gather(self, unit: Unit, share: float) -> None:
        if unit.name in self._resident or unit.name in self._gathered:
            return
        t = self.traffic
        elements = unit.elements if t.keeps_gathered else unit.in_use
        nbytes = round(elements * t.compute_bytes)
        self.code.alloc(f"gathered {unit.name}", nbytes, "gathered_parameters", stream=COMPUTE, pool=GATHER_POOL)
        self._send("all_gather", "fsdp", share * unit.shared * t.compute_bytes, t.shard_ranks)
        self._send("all_gather", "expert_fsdp", share * unit.experts * t.compute_bytes, t.expert_shard_ranks)
        self._gathered[unit.name] = self.code.record(STREAM)

    def _send(self, op: str, group: str, nbytes: float, ranks: int) -> None:
        if ranks > 1 and nbytes > 0:
            self.code.collective(op, group, round(nbytes), stream=STREAM)

    def _copy(self, name: str, moved_bytes: float) -> None:
        packs = name.startswith("copy_")
        rate = self.traffic.packing_bytes_per_s if packs else self.traffic.hbm_bytes_per_s
        cost = Cost(seconds=moved_bytes / rate, sms=0.0, hbm_bytes_per_s=rate)
        self.steps.launch(self.code, KernelStep(key=(name, (round(moved_bytes),), "copy"), cost=cost, host_s=0.0))
