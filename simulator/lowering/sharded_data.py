"""Data-parallel traffic of a step as instructions: full sharding with prefetch, or reduction of whole gradients.

Fully sharded (FSDP2, torch.distributed.fsdp `fully_shard`): every unit's parameters are gathered just before use, the
next unit's while this one computes; its gradients are scattered when its backward ends. Gathers and scatters share one
communicator and so one stream here. What is copied in and out of flat buffers runs on the compute stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.costs import Cost
from simulator.lowering.block_code import KernelKey, KernelStep
from simulator.program import COMPUTE, CodeWriter

STREAM = "fsdp comm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One wrapped module: elements of its parameters on this rank before sharding, routed experts apart.

    A collapsed stage stands for `pieces` modules in a row: only the first one's gather and the last one's reduction
    have nothing to hide behind, the others run beside the stage's compute.
    """

    name: str
    shared: float
    experts: float = 0.0
    pieces: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTraffic:
    """How a plan keeps data-parallel ranks in step. Group names are families of the program."""

    fully_sharded: bool
    keeps_gathered: bool
    optimizer_sharded: bool
    overlap: bool
    replicated_sharding: bool  # shards are summed over replicas too (HSDP)
    shard_ranks: int
    expert_shard_ranks: int
    every_micro_batch: bool
    compute_bytes: float
    reduce_bytes: float
    copies: bool
    gradient_bytes: float
    gradients_appear: bool  # a shard of each unit's gradient is allocated when it is first reduced
    hbm_bytes_per_s: float
    dp_ranks: int
    expert_dp_ranks: int


@dataclass(slots=True)
class DataWriter:
    """Writes the traffic of one pipeline rank around the compute that `training` writes."""

    code: CodeWriter
    traffic: DataTraffic
    kernels: dict[KernelKey, tuple[Cost, float]]
    _gathered: dict[str, str] = field(default_factory=dict)  # unit -> event of its gather
    _resident: set[str] = field(default_factory=set)
    _with_gradient: set[str] = field(default_factory=set)

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
                self._copy(f"copy_out {unit.name}", 2 * (unit.shared + unit.experts) * t.compute_bytes)
            if following is not None or inner:
                # The next gather may fill its buffer once the last one has been copied out.
                self.code.after(STREAM, COMPUTE)
            if fresh and inner:
                self._send("all_gather", "fsdp", inner * unit.shared * t.compute_bytes, t.shard_ranks)
                self._send("all_gather", "expert_fsdp", inner * unit.experts * t.compute_bytes, t.expert_shard_ranks)
            if following is not None:
                self._gather(following, 1 / following.pieces)
        if reducing and inner:
            self._reduce(unit, inner)

    def after(self, unit: Unit, *, last_use: bool) -> None:
        """Let go of a unit's gathered parameters unless the plan keeps them for later."""
        if self.traffic.fully_sharded and unit.name in self._resident and (last_use or not self.traffic.keeps_gathered):
            self._resident.discard(unit.name)
            self.code.free(f"gathered {unit.name}")

    def reduce(self, unit: Unit) -> None:
        """Send a unit's gradients on their way as its backward ends."""
        t = self.traffic
        if t.fully_sharded:
            self._copy(f"copy_in {unit.name}", (unit.shared + unit.experts) * (t.compute_bytes + t.reduce_bytes))
        if t.gradients_appear and unit.name not in self._with_gradient:
            self._with_gradient.add(unit.name)
            elements = unit.shared / t.shard_ranks + unit.experts / t.expert_shard_ranks
            self.code.alloc(f"gradient {unit.name}", round(elements * t.gradient_bytes), "gradients", filled=True)
        self.code.after(STREAM, COMPUTE)
        self._reduce(unit, 1 / unit.pieces)

    def reduces(self, *, last_micro_batch: bool) -> bool:
        """Whether gradients go out after this micro batch's backward."""
        return self.traffic.every_micro_batch or last_micro_batch

    def _reduce(self, unit: Unit, share: float) -> None:
        t = self.traffic
        shared, experts = share * unit.shared * t.reduce_bytes, share * unit.experts * t.reduce_bytes
        if t.fully_sharded:
            self._send("reduce_scatter", "fsdp", shared, t.shard_ranks)
            self._send("reduce_scatter", "expert_fsdp", experts, t.expert_shard_ranks)
            if t.replicated_sharding:
                self.code.collective(
                    "all_reduce", "replicate", round((shared + experts) / t.shard_ranks), stream=STREAM
                )
        elif t.overlap and not t.optimizer_sharded:
            self._send("all_reduce", "dp", shared, t.dp_ranks)
            self._send("all_reduce", "expert_dp", experts, t.expert_dp_ranks)

    def finish(self, units: list[Unit]) -> None:
        """Reduce what has not been reduced yet and join the compute stream, before the optimizer."""
        t = self.traffic
        shared, experts = sum(u.shared for u in units), sum(u.experts for u in units)
        if not t.fully_sharded and (t.optimizer_sharded or not t.overlap):
            self.code.after(STREAM, COMPUTE)
            op = "reduce_scatter" if t.optimizer_sharded else "all_reduce"
            self._send(op, "dp", shared * t.reduce_bytes, t.dp_ranks)
            self._send(op, "expert_dp", experts * t.reduce_bytes, t.expert_dp_ranks)
        self.code.after(COMPUTE, STREAM)

    def redistribute(self, units: list[Unit]) -> None:
        """Gather parameters that a sharded optimizer has updated."""
        t = self.traffic
        if t.optimizer_sharded and not t.fully_sharded:
            self.code.after(STREAM, COMPUTE)
            self._send("all_gather", "dp", sum(u.shared for u in units) * t.compute_bytes, t.dp_ranks)
            self._send("all_gather", "expert_dp", sum(u.experts for u in units) * t.compute_bytes, t.expert_dp_ranks)
            self.code.after(COMPUTE, STREAM)

    def _gather(self, unit: Unit, share: float) -> None:
        if unit.name in self._resident or unit.name in self._gathered:
            return
        t = self.traffic
        nbytes = (unit.shared + unit.experts) / unit.pieces * t.compute_bytes
        self.code.alloc(f"gathered {unit.name}", round(nbytes), "gathered_parameters")
        self._send("all_gather", "fsdp", share * unit.shared * t.compute_bytes, t.shard_ranks)
        self._send("all_gather", "expert_fsdp", share * unit.experts * t.compute_bytes, t.expert_shard_ranks)
        self._gathered[unit.name] = self.code.record(STREAM)

    def _send(self, op: str, group: str, nbytes: float, ranks: int) -> None:
        if ranks > 1 and nbytes > 0:
            self.code.collective(op, group, round(nbytes), stream=STREAM)

    def _copy(self, name: str, moved_bytes: float) -> None:
        if not self.traffic.copies:
            return
        step = KernelStep(
            key=(name, (round(moved_bytes),), "copy"),
            cost=Cost(
                seconds=moved_bytes / self.traffic.hbm_bytes_per_s,
                sms=0.0,
                hbm_bytes_per_s=self.traffic.hbm_bytes_per_s,
            ),
            host_s=0.0,
        )
        self.kernels[step.key] = (step.cost, step.host_s)
        self.code.launch(*step.key)
