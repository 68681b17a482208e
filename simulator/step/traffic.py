"""Data-parallel traffic of a step: full sharding with prefetch, or reduction of whole gradients.

Fully sharded (FSDP2, torch.distributed.fsdp `fully_shard`): every unit's parameters are gathered just before use, the
next unit's while this one computes; its gradients are scattered when its backward pass ends, and with hybrid sharding
summed over replicas on a stream of their own. Gathers and scatters share one communicator and therefore one stream
here. Copies around them: `simulator.step.fsdp_copies`.

Otherwise gradients stay whole: reduced in buckets during the backward pass that computes them (DDP) or after the last
one, or scattered to a sharded optimizer (ZeRO-1), also during that backward pass if the runtime overlaps (then updated
parameters are gathered during the next step's first forward pass), and, with sharded gradients (ZeRO-2), after each
micro batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_table import Floats, PlanTable
from simulator.step.context import CostContext
from simulator.step.fsdp_copies import FsdpCopies, Move, fsdp_copies
from simulator.step.host import accumulate_host_s
from simulator.step.offload import OFFLOAD, host_gradient_bytes, offloaded
from simulator.step.units import Elements, Unit
from simulator.step.zero import adding_bytes, bucket_copies_bytes, sums_wide

STREAM = "fsdp comm"
COPIES, SUMS = "fsdp copies", "fsdp sums"  # within the GPU, before gathers and after reductions
REPLICAS = "replicate comm"
DATA_FAMILIES = ("fsdp", "expert_fsdp", "replicate", "dp", "expert_dp")  # groups that carry it
BLOCKS = ("dense", "moe")  # units that are layers
DATA_OPS = ("all_gather", "reduce_scatter", "all_reduce")
WIRES = (COPIES, STREAM, REPLICAS, SUMS, OFFLOAD)  # all streams of data-parallel traffic


def has_replicas(table: PlanTable) -> NDArray[np.bool_]:
    """Return for each plan whether shards of parameters have copies on other ranks."""
    return np.asarray(table["dp"] * table["cp"] > table["sharded_over"])


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTraffic:
    """Data-parallel communication of plans that run the same operations; amounts have shape (plans,)."""

    fully_sharded: bool
    pushed: bool  # copy engines exchange the blocks
    casts_own: bool  # one rank casts its parameters and gradients itself
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
    copies: FsdpCopies
    # Found so far for units by what they share with others, which is kept so that its id stays unique: those of
    # `copies`, bytes of elements, and the host's seconds for tiles of gradients.
    moves: dict[tuple[str, int, int, bool], tuple[Move, Unit]] = field(default_factory=dict)
    amounts: dict[tuple[int, float], tuple[Floats, Floats]] = field(default_factory=dict)
    tiles_s: dict[int, tuple[Floats, Elements]] = field(default_factory=dict)
    lists_tiles: bool  # the host lists tiles of the gradients that are packed (FSDP2)
    keeps_memory: bool  # of these lists
    gradient_bytes: float
    host_gradient_bytes: float
    unsharded_gradient_bytes: float
    has_buckets: bool  # gradients go through ZeRO's buckets
    adds_up: bool  # separate kernels add the gradients of further micro batches
    adding_bytes: tuple[
        float, float
    ]  # moved for each gradient that is not sharded, in the first micro batch and others
    adding_host_s: Floats  # the host's, for each tensor that is added
    adds_on_host: bool  # it has any
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

    def bytes_of(self, elements: Floats, width: float) -> Floats:
        """Return the bytes of some elements of a width: the same array for the same elements, by which a rank knows
        again what it has found for them.
        """
        key = id(elements), width
        if key not in self.amounts:
            self.amounts[key] = elements * width, elements
        return self.amounts[key][0]

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
        table.casts_own,
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
    adding_host_s = accumulate_host_s(context, 1)
    return DataTraffic(
        fully_sharded=full,
        pushed=full and bool(table.pushed[0]),
        casts_own=bool(table.casts_own[0]),
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
        copies=fsdp_copies(context),
        lists_tiles=spec.fsdp.copy_in_copy_out and not spec.fsdp.flat_parameters and not bool(table.casts_own[0]),
        keeps_memory=spec.host.keeps_memory,
        gradient_bytes=bytes_of(spec.state.gradient_dtype),
        host_gradient_bytes=host_gradient_bytes(context),
        unsharded_gradient_bytes=bytes_of(spec.state.unsharded_gradient_dtype),
        has_buckets=spec.zero is not None,
        adds_up=spec.state.gradient_dtype != "reduce",
        adding_bytes=adding_bytes(context),
        adding_host_s=adding_host_s,
        adds_on_host=bool(np.any(adding_host_s)),
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
