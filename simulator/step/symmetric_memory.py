"""Symmetric memory of the overlap modes and of FSDP's exchanges by copy engines, which exists outside the caching
allocator for the whole run.

Modes that push (`PUSHED_MODES`) have, for each tensor-parallel group, one buffer for all-gathers and one for
reduce-scatters, shared by all layers. Each holds two sets of what one collective moves in total (the tokens of a micro
batch times the width of the model), used in turn, and a page of flags (executor/gpu/symmetric_memory.py). Both buffers
exist if one site of a block pushes, since a site's backward pass runs the other collective. Buffers of NCCL's modes
belong to NCCL.

FSDP's exchanges have sets for a gather and for a reduction of the largest block (executor/overlap/fsdp_exchange.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_table import Floats
from simulator.config.overlap_sites import SITES
from simulator.kernels.operators import tensor_bytes
from simulator.overlap.site_costs import PUSHED_MODES
from simulator.step.context import CostContext
from topology.units import MIB

Value = Any  # a number, or a column (numpy array) of them

SETS = 2
GATHER_SETS, SCATTER_SETS = 3, 2  # of FSDP's exchanges by copy engines
FLAG_BYTES = 4096
# Memory that peers map comes in pages of 2 MiB (cuMemGetAllocationGranularity on Hopper; torch rounds up to it).
PAGE_BYTES = 2 * MIB


def buffer_bytes(moved_bytes: Value) -> Value:
    """Return the bytes, in whole pages, of one buffer for collectives that move `moved_bytes` in total."""
    return _pages(SETS * moved_bytes) + _pages(FLAG_BYTES)


def symmetric_bytes(context: CostContext, dense: NDArray[np.int64], moe: NDArray[np.int64]) -> Floats:
    """Return the bytes on ranks with `dense` and `moe` layers; all have shape (plans, pipeline ranks)."""
    table = context.table
    if not set(table.overlap_modes) & set(PUSHED_MODES):
        return np.zeros_like(dense, dtype=np.float64)
    pushing = np.zeros_like(dense, dtype=np.bool_)
    for site in SITES:
        layers = dense if site.startswith("mlp") else dense + moe  # only a dense feed-forward has sites
        pushing |= np.isin(table.overlap_at(site), PUSHED_MODES)[:, None] & (layers > 0)
    pushing &= (table["tp"] > 1)[:, None]
    tokens = tensor_bytes("t h", context.sizes, context.dtype_bytes)[:, None]
    return np.where(pushing, 2 * buffer_bytes(tokens), 0.0)


def exchange_bytes(context: CostContext, block: Floats) -> Floats:
    """Return the bytes of FSDP's exchanges on ranks whose largest block has so many elements, shape (plans, pipeline
    ranks) like the result.
    """
    pushed = (context.table.fully_sharded & context.table.pushed)[:, None] & (block > 0)
    moved = GATHER_SETS * context.dtype_bytes("gathered"), SCATTER_SETS * context.dtype_bytes("reduce")
    return np.where(pushed, sum(_pages(each * block) + _pages(FLAG_BYTES) for each in moved), 0.0)


def _pages(nbytes: Value) -> Value:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
