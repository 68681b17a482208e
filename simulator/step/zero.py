"""The gradient buckets of DeepSpeed's ZeRO, memory besides parameters, gradients and optimizer state.

A gradient is copied to a contiguous bucket when it is computed. A full bucket is flattened and cast to the type of the
reduction on a stream of its own, whose blocks the compute stream cannot reuse; the rank's shard of it is kept there.
The optimizer updates float32 copies, for which float32 gradients are made (deepspeed/runtime/zero/stage_1_and_2.py,
stage3.py; runtime/fp16/unfused_optimizer.py without ZeRO).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_table import Floats
from simulator.step.context import CostContext
from simulator.step.held import state_bytes
from simulator.step.update import update_copies


def bucket_copies_bytes(context: CostContext) -> Floats:
    """Return the bytes moved within the GPU for every reduced gradient, shape (plans,): into the bucket, for its mean,
    flattened, cast, and the rank's shard to its final place. ZeRO-3 casts first and takes the mean while it sums.
    """
    table = context.table
    if context.spec.zero is None:
        return np.zeros(len(table))
    param, reduce = context.dtype_bytes("param"), context.dtype_bytes("reduce")
    cast = param + reduce if reduce != param else 0.0
    kept = (reduce + 3 * param) / np.maximum(table["sharded_over"], 1.0)
    flattened = np.where(table.fully_sharded, 2 * reduce, 4 * param)
    return np.where(table.state_shard["optimizer"] > 1, 2 * param + flattened + cast + kept, 0.0)


def sums_wide(context: CostContext) -> bool:
    """Return whether gradients are added to float32 sums after every micro batch."""
    return context.runtime.param_dtype in context.spec.state.wide_sums


def adding_bytes(context: CostContext) -> tuple[float, float]:
    """Return the bytes moved to add up one gradient of an unsharded plan after a backward pass: in the first micro
    batch, and in each further one. For a float32 sum, autograd adds to zeros, and a cast copy of that is added.
    """
    if context.spec.state.gradient_dtype == "reduce":
        return 0.0, 0.0
    gradient = context.dtype_bytes(context.spec.state.gradient_dtype)
    if sums_wide(context):
        every = gradient + 3 * gradient + (gradient + 4.0) + 3 * 4.0
        return every, every
    return 0.0, 3 * gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroBuffers:
    """Bytes on a rank: throughout the step, with float32 sums of gradients, while gradients are computed, on the stream
    of reductions, and during an update.
    """

    standing: Floats
    buckets: Floats
    reducing: Floats
    update: Floats


def zero_buffers(context: CostContext, elements: Floats, owned: Floats) -> ZeroBuffers:
    """Return the bytes on ranks with `elements` of parameters before data-parallel sharding, of which they update
    `owned`; both have shape (plans, ...), like the results. Runtimes without such buckets have only the temporaries of
    the update.
    """
    zero, table = context.spec.zero, context.table
    nothing = np.zeros_like(elements)

    def column(of: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(of).reshape((-1,) + (1,) * (np.ndim(elements) - 1))

    param, reduce = context.dtype_bytes("param"), context.dtype_bytes("reduce")
    away = column(table.offloaded["optimizer"])
    if zero is None:
        made = owned * context.dtype_bytes("trained") * update_copies(context.runtime)
        return ZeroBuffers(
            standing=elements * (4.0 if sums_wide(context) else 0.0),
            buckets=nothing,
            reducing=nothing,
            update=np.where(away, 0.0, made) + nothing,
        )
    full = column(table.fully_sharded)
    scattered = column(~table.fully_sharded & (table.state_shard["gradients"] > 1))
    sharded = column(~table.fully_sharded & (table.state_shard["optimizer"] > 1))
    cast = reduce if reduce != param else 0.0
    bucket = np.minimum(zero.bucket_elements, elements)
    # A rank copies its shard out of the bucket and adds it to the gradients of earlier micro batches.
    kept = np.where(scattered & (column(table.micro_batches) <= 1), 0.0, owned * context.dtype_bytes("param"))
    out = reduce / column(np.maximum(table["sharded_over"], 1.0))
    copies = np.where(full, bucket * (cast + reduce + out), np.where(sharded, bucket * (param + cast) + kept, 0.0))
    at_once = np.where(full, np.minimum(owned, zero.update_elements), owned)
    widened = state_bytes(context)["optimizer"] > 0 and param < 4
    return ZeroBuffers(
        standing=np.where(full, zero.bucket_elements * reduce, nothing),
        buckets=np.where(sharded, zero.buckets * zero.bucket_elements * param, nothing),
        reducing=np.asarray(copies + nothing),
        update=np.where(away, 0.0, at_once * (4.0 if widened else 0.0)) + nothing,
    )
