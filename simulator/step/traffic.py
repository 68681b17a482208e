"""Data-parallel traffic of a step: full sharding with prefetch, or reduction of whole gradients.

Fully sharded (FSDP2, torch.distributed.fsdp `fully_shard`): every unit's parameters are gathered just before use, the
next unit's while this one computes; its gradients are scattered when its backward pass ends, and with hybrid sharding
summed over replicas on a stream of their own. Gathers and scatters share one communicator and therefore one stream
here. Copies into and out of flat buffers run on the compute stream.

Otherwise gradients stay whole: reduced in buckets during the backward pass that computes them (DDP) or after the last
one, or scattered to a sharded optimizer (ZeRO-1), also during that backward pass if the runtime overlaps (then updated
parameters are gathered during the next step's first forward pass), and, with sharded gradients (ZeRO-2), after each
micro batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from simulator.collectives.pushed import PUSHED, SUM_PASSES
from simulator.columns.plan_table import Floats, PlanTable
from simulator.program.program import COMPUTE
from simulator.step.context import CostContext
from simulator.step.held import State
from simulator.step.muon import Orthogonal
from simulator.step.offload import ADD_PASSES, OFFLOAD, host_gradient_bytes, offloaded
from simulator.step.rank import Rank, Value
from simulator.step.units import Unit
from simulator.step.zero import adding_bytes, bucket_copies_bytes, sums_wide

STREAM = "fsdp comm"
REPLICAS = "replicate comm"
DATA_FAMILIES = ("fsdp", "expert_fsdp", "replicate", "dp", "expert_dp")  # groups that carry it
BLOCKS = ("dense", "moe")  # units that are layers
DATA_OPS = ("all_gather", "reduce_scatter", "all_reduce")
WIRES = (STREAM, REPLICAS, OFFLOAD)  # all streams of data-parallel traffic


def has_replicas(table: PlanTable) -> NDArray[np.bool_]:
    """Return for each plan whether shards of parameters have copies on other ranks."""
    return np.asarray(table["dp"] * table["cp"] > table["sharded_over"])


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTraffic:
    """Data-parallel communication of plans that run the same operations; amounts have shape (plans,)."""

    fully_sharded: bool
    pushed: bool  # copy engines exchange the blocks
    keeps_gathered: bool
    optimizer_sharded: bool
    sharded_overlap: bool  # whether gradients are reduced during backward passes
    gathers_overlap: bool  # whether parameters are gathered during forward passes
    scattered_by: str  # the collective that reduces gradients for a sharded optimizer
    broadcasts: bool  # whether updated parameters go out in a broadcast for each rank that owns some
    gradients_sharded: bool
    overlap: bool
    replicated_sharding: bool  # shards are summed over replicas too (HSDP)
    shard_ranks: Floats
    expert_shard_ranks: Floats
    every_micro_batch: bool
    scatters_each: bool  # sharded gradients (ZeRO-2) are reduced after every micro batch
    compute_bytes: float
    reduce_bytes: float
    copies: bool
    gradient_bytes: float
    host_gradient_bytes: float
    unsharded_gradient_bytes: float
    has_buckets: bool  # gradients go through ZeRO's buckets
    adds_up: bool  # separate kernels add the gradients of further micro batches
    adding_bytes: tuple[
        float, float
    ]  # moved for each gradient that is not sharded, in the first micro batch and others
    bucket_bytes: float
    bucket_elements: Floats  # least elements that a sharded optimizer's ranks exchange at once
    updates_on_host: bool
    from_host: bool  # shards of parameters are copied from the host before each gather
    sends: bool  # shards of gradients are copied to the host after the reduction
    param_bytes: float
    bucket_bytes_moved: Floats  # moved within the GPU for each gradient that goes through ZeRO's buckets
    # Gradients are copied into DDP's buckets, and sums out of them (reducer.cpp: `mark_variable_ready_dense`,
    # `copy_bucket_to_grad`).
    copies_buckets: bool

    def exchange(self, op: str, unit: Unit) -> str:
        """Return what runs for a collective of a fully sharded unit: only blocks are pushed."""
        return f"pushed_{op}" if self.pushed and unit.block in BLOCKS else op

    @property
    def reduces_behind_compute(self) -> bool:
        return self.fully_sharded or (self.sharded_overlap if self.optimizer_sharded else self.overlap)

    @property
    def fetches(self) -> bool:
        """Whether parameters updated by a sharded optimizer are gathered during the first forward pass."""
        return self.optimizer_sharded and self.gathers_overlap

    @property
    def gathers_before_use(self) -> bool:
        return self.fully_sharded or self.fetches

    def reduces(self, *, last_micro_batch: bool) -> bool:
        """Whether gradients are reduced after this micro batch's backward pass."""
        return self.every_micro_batch or last_micro_batch or (self.gradients_sharded and self.scatters_each)


def traffic_kinds(table: PlanTable) -> NDArray[np.int64]:
    """Return a number for each plan, equal for plans whose traffic has the same operations."""
    full = table.fully_sharded
    flags = (
        full,
        full & table.pushed,
        full & table.keeps_gathered,
        ~full & (table.state_shard["optimizer"] > 1),
        ~full & (table.state_shard["gradients"] > 1),
        ~full & (table["dp_replicate"] > 1),
        table["pp"] > 1,
        table.offloaded["optimizer"],
        table.offloaded["parameters"],
        table.offloaded["gradients"],
    )
    return np.asarray(np.stack(flags).T @ (1 << np.arange(len(flags))), dtype=np.int64)


def data_traffic(context: CostContext) -> DataTraffic:
    """Return the traffic of the plans of a table, which must have the same `traffic_kinds`."""
    table, spec, bytes_of = context.table, context.spec, context.dtype_bytes
    full, piped = bool(table.fully_sharded[0]), bool(table["pp"][0] > 1)
    scattered, in_shards = (bool(table.state_shard[kind][0] > 1) for kind in ("gradients", "optimizer"))
    behind = spec.ddp.sharded_overlap and not scattered
    return DataTraffic(
        fully_sharded=full,
        pushed=full and bool(table.pushed[0]),
        keeps_gathered=bool(table.keeps_gathered[0]),
        optimizer_sharded=not full and in_shards,
        sharded_overlap=behind,
        gathers_overlap=behind and spec.ddp.gathers_overlap,
        scattered_by="all_reduce" if spec.ddp.sums_whole or sums_wide(context) else "reduce_scatter",
        broadcasts=spec.ddp.broadcasts,
        gradients_sharded=not full and scattered,
        overlap=spec.fsdp.overlap if full else spec.ddp.overlap or (in_shards and spec.ddp.sharded_overlap),
        replicated_sharding=full and bool(has_replicas(table).any()),
        shard_ranks=context.groups.extent("fsdp")[0],
        expert_shard_ranks=context.groups.extent("expert_fsdp")[0],
        every_micro_batch=not piped and (full or spec.ddp.every_micro_batch),
        scatters_each=not piped,
        compute_bytes=bytes_of("gathered"),
        reduce_bytes=bytes_of("reduce"),
        copies=spec.fsdp.copy_in_copy_out,
        gradient_bytes=bytes_of(spec.state.gradient_dtype),
        host_gradient_bytes=host_gradient_bytes(context),
        unsharded_gradient_bytes=bytes_of(spec.state.unsharded_gradient_dtype),
        has_buckets=spec.zero is not None,
        adds_up=spec.state.gradient_dtype != "reduce",
        adding_bytes=adding_bytes(context),
        bucket_bytes=spec.ddp.bucket_bytes,
        bucket_elements=bucket_elements(context),
        updates_on_host=bool(table.offloaded["optimizer"][0]),
        from_host=bool(table.offloaded["parameters"][0]),
        sends=full and bool(offloaded(context, "gradients")[0]),
        param_bytes=bytes_of("param"),
        bucket_bytes_moved=bucket_copies_bytes(context),
        copies_buckets=not full and not in_shards and spec.ddp.bucket_copy and bool(table["dp_replicate"][0] > 1),
    )


def sharded_sends(context: CostContext, units: Iterable[Unit]) -> Iterator[tuple[str, str, Floats]]:
    """Yield the collectives of units whose parameters are fully sharded: (op, family, bytes of each plan), no bytes of
    other plans.
    """
    full, by_copies = context.table.fully_sharded, context.table.pushed
    compute, reduce = context.dtype_bytes("gathered"), context.dtype_bytes("reduce")
    for unit in units:
        shared, experts = unit.trained.shared * reduce, unit.trained.experts * reduce
        shard = shared / context.groups.extent("fsdp")[0] + experts / context.groups.extent("expert_fsdp")[0]
        for op, family, nbytes in (
            ("all_gather", "fsdp", unit.shared * compute),
            ("all_gather", "expert_fsdp", unit.experts * compute),
            ("reduce_scatter", "fsdp", shared),
            ("reduce_scatter", "expert_fsdp", experts),
            ("all_reduce", "replicate", shard),
        ):
            pushed = full & by_copies & (unit.block in BLOCKS and op != "all_reduce")
            yield op, family, np.where(full & ~pushed, nbytes, 0.0)
            if pushed.any():
                yield f"pushed_{op}", family, np.where(pushed, nbytes, 0.0)


def bucket_elements(context: CostContext) -> Floats:
    """Return the least elements that a sharded optimizer's ranks exchange at once, shape (plans,)."""
    ddp, ranks = context.spec.ddp, context.table["dp"] * context.table["cp"]
    return np.asarray(np.maximum(ddp.bucket_elements, ddp.bucket_elements_per_rank * ranks))


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
                if t.copies:
                    nbytes = unit.elements * t.compute_bytes
                    self.rank.copy(f"copy_out {unit.name}", 2 * nbytes, module_bytes=nbytes)
            if following is not None:
                # The next gather may fill its buffer once the last one has been copied out.
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
                self.rank.copy("accumulate", unit.trained.all * (t.compute_bytes + 2 * t.reduce_bytes))
        elif not t.fully_sharded and (nbytes := t.adding_bytes[further]):
            self.rank.copy("accumulate", unit.trained.all * nbytes)
        if reducing and np.any(unit.trained.all):
            self._send_off(unit, ends_pass=ends_pass)

    def wait_for_reductions(self) -> None:
        """End a backward pass: FSDP2 waits for all reductions here (`_root_post_backward_final_callback`), as do DDP
        (`Reducer::finalize_backward`) and ZeRO (`independent_gradient_partition_epilogue`).
        """
        if self._sums_ready:  # a bucket is copied out once it is summed, while the next are under way
            self.rank.wait(COMPUTE, self._sums_ready)
            self._copy_out(self._summed)
            self._summed, self._sums_ready = 0.0, ""
        if self.traffic.reduces_behind_compute or self._in_buckets:
            self.rank.after(COMPUTE, STREAM)
            if self.traffic.replicated_sharding:
                self.rank.after(COMPUTE, REPLICAS)
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
        self.rank.after(COMPUTE, STREAM)
        if t.replicated_sharding:
            self.rank.after(COMPUTE, REPLICAS)

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

    def _send_off(self, unit: Unit, *, ends_pass: bool) -> None:
        t, elements = self.traffic, unit.trained.all
        if t.has_buckets:
            self._in_buckets = True
            self.rank.copy(f"copy_in {unit.name}", elements * t.bucket_bytes_moved)
        elif t.copies_buckets:
            self.rank.copy(f"copy_in {unit.name}", 2 * elements * t.reduce_bytes)
            self._summed = self._summed + self._last
            self._last = unit.repeats * elements
        if t.fully_sharded:
            width = t.reduce_bytes if not t.every_micro_batch else t.unsharded_gradient_bytes
            if t.copies and not t.has_buckets:
                moved = elements * (width + t.reduce_bytes)
                self.rank.copy(f"copy_in {unit.name}", moved, module_bytes=elements * t.compute_bytes)
            if not t.every_micro_batch:
                self._accumulated.discard(unit.name)
        fresh = unit.name not in self._with_gradient
        self._with_gradient.add(unit.name)
        if t.reduces_behind_compute or t.gradients_sharded:
            if t.copies_buckets and ends_pass:
                self._sums_ready = self.rank.record(STREAM)
            self.rank.after(STREAM, COMPUTE)
            self._reduce(unit)
            if not t.overlap:
                self.rank.after(COMPUTE, STREAM)
        if t.sends:
            last = REPLICAS if t.replicated_sharding else STREAM
            self.rank.after(OFFLOAD, last)
            moved = self._shard(unit, "gradients") * t.host_gradient_bytes
            self.rank.host_copy(f"d2h {unit.name}", moved, stream=OFFLOAD)
            if not fresh and t.every_micro_batch:
                self.rank.on_host("accumulate", ADD_PASSES * moved, after=OFFLOAD)

    def _copy_out(self, elements: Value) -> None:
        self.rank.copy("copy_out", 2 * elements * self.traffic.reduce_bytes)

    def _shard(self, unit: Unit, kind: State) -> Floats:
        """Return the elements of a unit for which the rank itself has a kind of state."""
        own, t = unit.of(kind), self.traffic
        return np.asarray(own.shared / t.shard_ranks + own.experts / t.expert_shard_ranks)

    def _reduce(self, unit: Unit) -> None:
        t = self.traffic
        shared, experts = unit.trained.shared * t.reduce_bytes, unit.trained.experts * t.reduce_bytes
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
        if t.from_host:  # in the stream of gathers, which wait for it
            self.rank.host_copy(f"h2d {unit.name}", self._shard(unit, "parameters") * t.param_bytes, stream=STREAM)
        op = t.exchange("all_gather", unit)
        self._send(op, "fsdp", unit.shared * t.compute_bytes)
        self._send(op, "expert_fsdp", unit.experts * t.compute_bytes)
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
