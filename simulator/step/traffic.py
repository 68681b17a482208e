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

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_table import Floats, PlanTable
from simulator.step.context import CostContext
from simulator.step.fsdp_copies import FsdpCopies, Move
from simulator.step.host import accumulate_host_s
from simulator.step.offload import OFFLOAD, host_gradient_bytes, offloaded
from simulator.step.units import Elements, Unit
from simulator.step.zero import adding_bytes, bucket_copies_bytes, sums_wide

STREAM = "fsdp comm"
COPIES, SUMS = "fsdp copies", "fsdp sums"  # within the GPU, before gathers and after reductions
REPLICAS = "replicate comm"
DATA_FAMILIES = ("fsdp", "expert_fsdp", "replicate", "dp", "expert_dp")  # groups that carry it
DATA_OPS = ("all_gather", "reduce_scatter", "all_reduce")
WIRES = (COPIES, STREAM, REPLICAS, SUMS, OFFLOAD)  # all streams of data-parallel traffic


def has_replicas(table: PlanTable) -> NDArray[np.bool_]:
    """Return for each plan whether shards of parameters have copies on other ranks."""
    return np.asarray(table["dp"] * table["cp"] > table["sharded_over"])


class DataTraffic:
    """Data-parallel communication of the plans of a table, which must have the same `traffic_kinds`; amounts have shape
    (plans,).
    """

    def __init__(self, context: CostContext) -> None:
        table, spec, bytes_of = context.table, context.spec, context.dtype_bytes
        full, piped = bool(table.fully_sharded[0]), bool(table["pp"][0] > 1)
        scattered, in_shards = (bool(table.state_shard[kind][0] > 1) for kind in ("gradients", "optimizer"))
        behind = spec.ddp.sharded_overlap and not scattered
        self.fully_sharded = full
        self.pushed = full and bool(table.pushed[0])  # copy engines exchange the blocks
        self.casts_own = bool(table.casts_own[0])  # one rank casts its parameters and gradients itself
        self.keeps_gathered = bool(table.keeps_gathered[0])
        self.optimizer_sharded = not full and in_shards
        self.gradients_sharded = not full and scattered
        self.overlap = spec.fsdp.overlap if full else spec.ddp.overlap or (in_shards and spec.ddp.sharded_overlap)
        # Whether gradients are reduced during backward passes; and whether parameters updated by a sharded optimizer
        # are gathered during the first forward pass.
        self.reduces_behind_compute = full or (behind if in_shards else self.overlap)
        self.fetches = self.optimizer_sharded and behind and spec.ddp.gathers_overlap
        # The collective that reduces gradients for a sharded optimizer, and whether updated parameters go out in a
        # broadcast for each rank that owns some.
        self.scattered_by = "all_reduce" if spec.ddp.sums_whole or sums_wide(context) else "reduce_scatter"
        self.broadcasts = spec.ddp.broadcasts
        self.replicated_sharding = full and bool(has_replicas(table).any())  # shards are summed over replicas (HSDP)
        self.shard_ranks: Floats = context.groups.extent("fsdp")[0]
        self.expert_shard_ranks: Floats = context.groups.extent("expert_fsdp")[0]
        self.every_micro_batch = not piped and (full or spec.ddp.every_micro_batch)
        self.scatters_each = not piped and not full and scattered  # ZeRO-2 reduces after every micro batch
        self.param_bytes, self.compute_bytes, self.reduce_bytes = map(bytes_of, ("param", "gathered", "reduce"))
        self.gradient_bytes, self.unsharded_gradient_bytes = map(
            bytes_of, (spec.state.gradient_dtype, spec.state.unsharded_gradient_dtype)
        )
        self.host_gradient_bytes = host_gradient_bytes(context)
        self.copies = FsdpCopies(context)
        # Whether the host lists tiles of the gradients that are packed (FSDP2), and keeps the memory of these lists.
        self.lists_tiles = spec.fsdp.copy_in_copy_out and not spec.fsdp.flat_parameters and not self.casts_own
        self.keeps_memory = spec.host.keeps_memory
        self.has_buckets = spec.zero is not None  # gradients go through ZeRO's buckets
        self.adds_up = spec.state.gradient_dtype != "reduce"  # separate kernels add gradients of further micro batches
        # Moved for each gradient that is not sharded, in the first micro batch and others; and the host's seconds for
        # each tensor that is added.
        self.adding_bytes = adding_bytes(context)
        self.adding_host_s = accumulate_host_s(context, 1)
        self.adds_on_host = bool(np.any(self.adding_host_s))
        self.bucket_bytes = spec.ddp.bucket_bytes
        # Least elements that a sharded optimizer's ranks exchange at once.
        self.bucket_elements = np.maximum(
            spec.ddp.bucket_elements, spec.ddp.bucket_elements_per_rank * (table["dp"] * table["cp"])
        )
        # Moved within the GPU for each gradient that goes through ZeRO's buckets.
        self.bucket_bytes_moved = bucket_copies_bytes(context)
        # Gradients are copied into DDP's buckets, and sums out of them (reducer.cpp: `mark_variable_ready_dense`,
        # `copy_bucket_to_grad`).
        self.copies_buckets = not full and not in_shards and spec.ddp.bucket_copy and bool(table["dp_replicate"][0] > 1)
        self.updates_on_host = bool(table.offloaded["optimizer"][0])
        self.from_host = bool(table.offloaded["parameters"][0])  # shards are copied from the host before each gather
        self.sends = full and bool(offloaded(context, "gradients")[0])  # and those of gradients to it when reduced
        # Found so far for units by what they share with others, which is kept so that its id stays unique: those of
        # `copies`, bytes of elements, and the host's seconds for tiles of gradients.
        self.moves: dict[tuple[str, int, int, bool], tuple[Move, Unit]] = {}
        self.amounts: dict[tuple[int, float], tuple[Floats, Floats]] = {}
        self.tiles_s: dict[int, tuple[Floats, Elements]] = {}

    def exchange(self, op: str, unit: Unit) -> str:
        """Return what runs for a collective of a fully sharded unit: only blocks are pushed."""
        return f"pushed_{op}" if self.pushed and unit.is_layer else op

    def bytes_of(self, elements: Floats, width: float) -> Floats:
        """Return the bytes of some elements of a width: the same array for the same elements, by which a rank knows
        again what it has found for them.
        """
        key = id(elements), width
        if key not in self.amounts:
            self.amounts[key] = elements * width, elements
        return self.amounts[key][0]

    @property
    def gathers_before_use(self) -> bool:
        return self.fully_sharded or self.fetches

    def reduces(self, *, last_micro_batch: bool) -> bool:
        """Whether gradients are reduced after this micro batch's backward pass."""
        return self.every_micro_batch or last_micro_batch or self.scatters_each


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
            pushed = full & by_copies & (unit.is_layer and op != "all_reduce")
            yield op, family, np.where(full & ~pushed, nbytes, 0.0)
            if pushed.any():
                yield f"pushed_{op}", family, np.where(pushed, nbytes, 0.0)
