"""Writes the data-parallel traffic of a step to a pipeline rank: what `simulator.step.traffic` describes, around the
compute that `simulator.step.walk` issues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from simulator.collectives.pushed import PUSHED, SUM_PASSES
from simulator.columns.plan_table import Floats
from simulator.program.program import COMPUTE
from simulator.step.fsdp_copies import FsdpCopies, Move
from simulator.step.held import State
from simulator.step.host import tiles_host_s
from simulator.step.muon import Orthogonal
from simulator.step.offload import ADD_PASSES, OFFLOAD
from simulator.step.rank import Rank, Value
from simulator.step.traffic import COPIES, REPLICAS, STREAM, SUMS, DataTraffic
from simulator.step.units import Unit

# Copies around FSDP's collectives, by name; see `FsdpCopies`.
MOVES: dict[str, Callable[[FsdpCopies, Unit, bool], Move]] = {
    "gathering": lambda copies, unit, _: copies.before_gather(unit.shared, unit.experts),
    "copy_out": lambda copies, unit, _: copies.after_gather(unit.shared, unit.experts),
    "copy_in": lambda copies, unit, further: copies.before_reduction(
        unit.trained.shared, unit.trained.experts, further=further
    ),
    "reduced": lambda copies, unit, further: copies.after_reduction(
        unit.trained.shared, unit.trained.experts, further=further
    ),
}


@dataclass(slots=True)
class DataWriter:
    """Issues traffic to a pipeline rank around the compute that `simulator.step.walk` issues."""

    rank: Rank
    traffic: DataTraffic
    _gathered: dict[str, str] = field(default_factory=dict)  # unit -> event of its gather
    # unit -> event of its gather after the update; "" after waiting for it
    _fetched: dict[str, str] = field(default_factory=dict)
    _resident: set[str] = field(default_factory=set)
    _with_gradient: set[str] = field(default_factory=set)
    _accumulated: set[str] = field(default_factory=set)
    _in_buckets: bool = False  # gradients of this backward pass have gone through ZeRO's buckets
    # Elements of gradients that go through DDP's buckets in a backward pass: of its last unit, and of those before.
    _last: Value = 0.0
    _summed: Value = 0.0
    _sums_ready: str = ""  # event of the sums before the last unit's

    def before(self, unit: Unit, following: Unit | None) -> None:
        """Gather `unit` before it computes, and start the gather of `following`."""
        t = self.traffic
        if t.fully_sharded:
            fresh = unit.name not in self._resident
            self._gather(unit)
            if unit.name in self._gathered:
                self.rank.wait(COMPUTE, self._gathered.pop(unit.name))
            if fresh:
                self._resident.add(unit.name)
                self._move("copy_out", unit)
            if following is not None:
                # The next gather may fill its buffer once the last one has been copied out.
                self.rank.after(COPIES, COMPUTE)
                self.rank.after(STREAM, COMPUTE)
                self._gather(following)
        if t.fetches:
            self._fetch(unit, following)

    def have_gathered(self, units: Sequence[Unit], wanted: Sequence[Unit]) -> None:
        """Set the gathered ones among some units to those that are `wanted`, as earlier passes would have left them."""
        names = {unit.name for unit in wanted}
        for unit in units if self.traffic.fully_sharded else ():
            if unit.name in self._resident and unit.name not in names:
                self._resident.discard(unit.name)
            elif unit.name not in self._resident and unit.name in names:
                self._gather(unit)
                self.rank.wait(STREAM, self._gathered.pop(unit.name))
                self._resident.add(unit.name)

    def begin_pass(self) -> None:
        """Set ZeRO's buckets to be empty."""
        self._in_buckets = False

    def after(self, unit: Unit, *, last_use: bool) -> None:
        """Free a unit's gathered parameters unless the plan keeps them for later."""
        if self.traffic.fully_sharded and unit.name in self._resident and (last_use or not self.traffic.keeps_gathered):
            self._resident.discard(unit.name)

    def before_gradients(self, unit: Unit, *, reducing: bool) -> None:
        """All-reduce the buckets of a unit that fill up while it computes: DDP sends a bucket as soon as it is full,
        and gradients come about evenly over a backward pass.
        """
        t = self.traffic
        if reducing and t.overlap and not (t.fully_sharded or t.gradients_sharded or t.optimizer_sharded):
            self.rank.after(STREAM, COMPUTE)
            self._all_reduce(unit, early=True)

    def after_backward(self, unit: Unit, *, reducing: bool, ends_pass: bool) -> None:
        """After a backward pass of `unit`, with which the rank's pass may end: add its gradients to those of earlier
        micro batches, or reduce them.
        """
        t = self.traffic
        further = unit.name in self._accumulated
        self._accumulated.add(unit.name)
        if t.fully_sharded and not t.every_micro_batch:
            # Without a reduction in between, unsharded gradients are added in the type of the reduction.
            if t.adds_up:
                self._accumulate(unit, t.compute_bytes + 2 * t.reduce_bytes)
        elif not t.fully_sharded and (nbytes := t.adding_bytes[further]):
            self._accumulate(unit, nbytes)
        if reducing and unit.trained.some:
            self._send_off(unit, ends_pass=ends_pass)

    def _accumulate(self, unit: Unit, nbytes: float) -> None:
        """Add a unit's gradients to earlier ones, moving `nbytes` for each number."""
        if self.traffic.adds_on_host:
            self.rank.host_work("accumulate", unit.tensors * self.traffic.adding_host_s)
        self.rank.copy("accumulate", self.traffic.bytes_of(unit.trained.all, nbytes))

    def wait_for_reductions(self) -> None:
        """End a backward pass: FSDP2 waits for all reductions here (`_root_post_backward_final_callback`), as do DDP
        (`Reducer::finalize_backward`) and ZeRO (`independent_gradient_partition_epilogue`).
        """
        if self._sums_ready:  # a bucket is copied out once it is summed, while the next are under way
            self.rank.wait(COMPUTE, self._sums_ready)
            self._copy_out(self._summed)
            self._summed, self._sums_ready = 0.0, ""
        if self.traffic.reduces_behind_compute or self._in_buckets:
            self._after_reductions()
            self._in_buckets = False
        if np.any(self._last):
            self._copy_out(self._last)
            self._last = 0.0
        if self.traffic.sends:  # `finalize_backward` makes the host wait for copies of gradients to it
            self.rank.on_host("wait", 0.0, after=OFFLOAD)

    def finish(self, units: Sequence[Unit]) -> None:
        """Before the optimizer: reduce what has not been reduced yet, and let the compute stream wait for all
        reductions.
        """
        t = self.traffic
        if not t.fully_sharded and not t.reduces_behind_compute and not t.gradients_sharded:
            self.rank.after(STREAM, COMPUTE)
            op = t.scattered_by if t.optimizer_sharded else "all_reduce"
            self._send(op, "dp", _sum(u.repeats * u.trained.shared for u in units) * t.reduce_bytes)
            self._send(op, "expert_dp", _sum(u.repeats * u.trained.experts for u in units) * t.reduce_bytes)
        self._after_reductions()

    def redistribute(self, units: Sequence[Unit]) -> None:
        """Gather parameters updated by a sharded optimizer, unless the next step gathers them during its
        forward pass.
        """
        t = self.traffic
        if t.optimizer_sharded and not t.fully_sharded and not t.fetches:
            op, owners = "all_gather", np.ones_like(t.shard_ranks)
            if t.broadcasts:
                op, owners = "broadcast", np.clip(_sum(u.repeats * u.tensors for u in units), 1.0, t.shard_ranks)
            shared = _sum(u.repeats * u.trained.shared for u in units) * t.compute_bytes
            experts = _sum(u.repeats * u.trained.experts for u in units) * t.compute_bytes
            self.rank.after(STREAM, COMPUTE)
            self._send(op, "fsdp", shared / owners, owners)
            self._send(op, "expert_fsdp", experts / owners, owners)
            self.rank.after(COMPUTE, STREAM)

    def gather_matrices(self, orthogonal: Orthogonal, layers: float) -> None:
        """Gather and sum what the hidden matrices of `layers` layers need, between the compute before and after."""
        self.rank.after(STREAM, COMPUTE)
        for op, family, nbytes, count in orthogonal.gathers:
            self._send(op, family, nbytes, count * layers)
        self.rank.after(COMPUTE, STREAM)

    def update_on_host(self, owned: Floats, moved_bytes: Value) -> None:
        """Let the host update the `owned` elements of parameters, which moves bytes of its memory."""
        t = self.traffic
        self.rank.after(OFFLOAD, COMPUTE)
        if not t.sends:
            self.rank.host_copy("d2h gradients", owned * t.host_gradient_bytes, stream=OFFLOAD)
        self.rank.on_host("optimizer", moved_bytes, after=OFFLOAD)
        if not t.from_host:
            self.rank.host_copy("h2d parameters", owned * t.param_bytes, stream=OFFLOAD)
            self.rank.after(COMPUTE, OFFLOAD)

    # --- parts --------------------------------------------------------------------------------------------------

    def _after_reductions(self) -> None:
        """Let the compute stream wait for all reductions."""
        self.rank.after(COMPUTE, STREAM)
        if self.traffic.replicated_sharding:
            self.rank.after(COMPUTE, REPLICAS)
        if self.traffic.fully_sharded:
            self.rank.after(COMPUTE, SUMS)

    def _send_off(self, unit: Unit, *, ends_pass: bool) -> None:
        t, elements = self.traffic, unit.trained.all
        if t.has_buckets:
            self._in_buckets = True
            self.rank.copy(f"copy_in {unit.name}", elements * t.bucket_bytes_moved)
        elif t.copies_buckets:
            self.rank.copy(f"copy_in {unit.name}", t.bytes_of(elements, 2 * t.reduce_bytes))
            self._summed = self._summed + self._last
            self._last = unit.repeats * elements
        if t.fully_sharded:
            if not t.has_buckets:
                if t.lists_tiles:
                    self.rank.host_work(f"tiles {unit.name}", self._tiles_s(unit))
                self._move("copy_in", unit, further=unit.name in self._with_gradient)
            if not t.every_micro_batch:
                self._accumulated.discard(unit.name)
        fresh = unit.name not in self._with_gradient
        self._with_gradient.add(unit.name)
        if t.reduces_behind_compute or t.gradients_sharded:
            if t.copies_buckets and ends_pass:
                self._sums_ready = self.rank.record(STREAM)
            self.rank.after(STREAM, COMPUTE)
            self._reduce(unit)
            if t.fully_sharded and not t.has_buckets:
                self.rank.after(SUMS, STREAM)  # with replicas, next to their sum instead of after it
                self._move("reduced", unit, further=not fresh, stream=SUMS)
            if not t.overlap:
                self.rank.after(COMPUTE, SUMS if t.fully_sharded and not t.has_buckets else STREAM)
        if t.sends:
            self.rank.after(OFFLOAD, REPLICAS if t.replicated_sharding else STREAM)
            self.rank.after(OFFLOAD, SUMS)
            moved = self._shard(unit, "gradients") * t.host_gradient_bytes
            self.rank.host_copy(f"d2h {unit.name}", moved, stream=OFFLOAD)
            if not fresh and t.every_micro_batch:
                self.rank.on_host("accumulate", ADD_PASSES * moved, after=OFFLOAD)

    def _tiles_s(self, unit: Unit) -> Floats:
        """Return the host seconds to list the tiles of a unit's gradients; experts on ranks of their own are reduced
        apart.
        """
        t, own = self.traffic, unit.trained
        if (known := t.tiles_s.get(id(own))) is not None:
            return known[0]
        shared = own.shared * t.reduce_bytes / t.shard_ranks
        experts = own.experts * t.reduce_bytes / t.expert_shard_ranks
        parts = [tiles_host_s(nbytes, keeps_memory=t.keeps_memory) for nbytes in (shared, experts, shared + experts)]
        found = np.where(t.shard_ranks == t.expert_shard_ranks, parts[2], parts[0] + parts[1])
        t.tiles_s[id(own)] = found, own
        return found

    def _move(self, name: str, unit: Unit, *, further: bool = False, stream: str = COMPUTE) -> None:
        """Copy what FSDP does around a unit's collectives: `MOVES`."""
        known, key = self.traffic.moves, (name, id(unit.shared), id(unit.trained), further)
        if key not in known:
            known[key] = MOVES[name](self.traffic.copies, unit, further), unit
        if (move := known[key][0]).some:
            self.rank.copy(f"{name} {unit.name}", move.nbytes, packing=move.packing, stream=stream)

    def _copy_out(self, elements: Value) -> None:
        self.rank.copy("copy_out", 2 * elements * self.traffic.reduce_bytes)

    def _shard(self, unit: Unit, kind: State) -> Floats:
        """Return the elements of a unit for which the rank itself has a kind of state."""
        own, t = unit.of(kind), self.traffic
        return np.asarray(own.shared / t.shard_ranks + own.experts / t.expert_shard_ranks)

    def _reduce(self, unit: Unit) -> None:
        t = self.traffic
        shared, experts = (t.bytes_of(each, t.reduce_bytes) for each in (unit.trained.shared, unit.trained.experts))
        if t.fully_sharded:
            op = t.exchange("reduce_scatter", unit)
            self._send(op, "fsdp", shared)
            self._send(op, "expert_fsdp", experts)
            if op in PUSHED:  # its sums run next to passes, on a stream of their own, and take as long from them
                part = shared / t.shard_ranks + experts / t.expert_shard_ranks
                self.rank.copy("accumulate", SUM_PASSES * (t.shard_ranks - 1) * part)
            if t.replicated_sharding:
                self.rank.after(REPLICAS, STREAM)
                shard = shared / t.shard_ranks + experts / t.expert_shard_ranks
                self.rank.collective("all_reduce", "replicate", shard, stream=REPLICAS)
        elif t.gradients_sharded:
            self._send(t.scattered_by, "dp", shared)
            self._send(t.scattered_by, "expert_dp", experts)
        elif t.optimizer_sharded:
            self._send_buckets(t.scattered_by, "dp", unit, t.reduce_bytes)
        else:
            self._all_reduce(unit, early=False)

    def _all_reduce(self, unit: Unit, *, early: bool) -> None:
        """All-reduce a unit's gradients in buckets: those that are full before its last gradients, or the others."""
        t = self.traffic
        buckets, last = buckets_of(unit, t.bucket_bytes, t.reduce_bytes)
        times = buckets - last if early else last
        if np.any(times):
            self._send("all_reduce", "dp", unit.trained.shared * t.reduce_bytes / buckets, times)
            self._send("all_reduce", "expert_dp", unit.trained.experts * t.reduce_bytes / buckets, times)

    def _gather(self, unit: Unit) -> None:
        if unit.name in self._resident or unit.name in self._gathered:
            return
        t = self.traffic
        if t.from_host:  # in the stream of copies, which gathers wait for
            self.rank.host_copy(f"h2d {unit.name}", self._shard(unit, "parameters") * t.param_bytes, stream=COPIES)
        self._move("gathering", unit, stream=COPIES)
        self.rank.after(STREAM, COPIES)
        op = t.exchange("all_gather", unit)
        self._send(op, "fsdp", t.bytes_of(unit.shared, t.compute_bytes))
        self._send(op, "expert_fsdp", t.bytes_of(unit.experts, t.compute_bytes))
        self._gathered[unit.name] = self.rank.record(STREAM)

    def _fetch(self, unit: Unit, following: Unit | None) -> None:
        """Before a unit computes, gather those of its parameters that a sharded optimizer has updated, and start the
        gather of the next unit.
        """
        self._fetch_unit(unit)
        if self._fetched[unit.name]:
            self.rank.wait(COMPUTE, self._fetched[unit.name])
            self._fetched[unit.name] = ""
        if following is not None:
            self._fetch_unit(following)

    def _fetch_unit(self, unit: Unit) -> None:
        if unit.name not in self._fetched:
            self._send_buckets("all_gather", "fsdp", unit, self.traffic.compute_bytes)
            self._fetched[unit.name] = self.rank.record(STREAM)

    def _send_buckets(self, op: str, family: str, unit: Unit, width: float) -> None:
        """Exchange the gradients or parameters of a unit: all at once, or as part of a larger bucket."""
        size = self.traffic.bucket_elements
        own = unit.trained
        elements = np.where(own.all > 0, own.all, 1.0)
        times = np.minimum(elements / np.maximum(size, 1.0), 1.0)
        self._send(op, family, own.shared * width / times, times)
        self._send(op, f"expert_{family}", own.experts * width / times, times)

    def _send(self, op: str, family: str, nbytes: Value, times: Value = 1.0) -> None:
        self.rank.collective(op, family, nbytes, stream=STREAM, times=times)


def buckets_of(unit: Unit, bucket_bytes: float, reduce_bytes: float) -> tuple[Value, Value]:
    """Return the number of buckets that a unit's gradients fill, 1 without a size, and how many of them wait for its
    last tensor: of an embedding all, as its lookups come last.
    """
    if not bucket_bytes:
        return 1.0, 1.0
    buckets = np.maximum(np.ceil(unit.trained.all * reduce_bytes / bucket_bytes), 1.0)
    return buckets, buckets if unit.block == "embedding" else np.ceil(buckets / max(unit.tensors, 1))


def _sum(columns: object) -> Value:
    return sum(columns, 0.0)  # type: ignore[call-overload, no-any-return]  # columns of one length
