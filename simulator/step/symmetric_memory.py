"""What the overlap modes hold on to: symmetric memory, which lies alongside the caching allocator's for as long as a
run.

Modes that push (`PUSHED_MODES`) keep, for each tensor-parallel group, one buffer for all-gathers and one for
reduce-scatters, which every layer shares. Each holds two sets in turn of what one collective moves in all, the tokens
of a micro batch by the width of the model, and a page of flags (executor/gpu/symmetric_memory.py). Both are there
wherever one site of a block pushes: a site's backward pass runs the other collective. What NCCL's modes hold is NCCL's.
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
FLAG_BYTES = 4096
# Memory that peers map comes in pages of 2 MiB (cuMemGetAllocationGranularity on Hopper; torch rounds up to it).
PAGE_BYTES = 2 * MIB


def buffer_bytes(moved_bytes: Value) -> Value:
    """Return the bytes of one buffer for collectives that move so many bytes in all, in pages."""
    return _pages(SETS * moved_bytes) + _pages(FLAG_BYTES)


def symmetric_bytes(context: CostContext, dense: NDArray[np.int64], moe: NDArray[np.int64]) -> Floats:
    """Return the bytes that ranks with `dense` and `moe` layers hold; all are of shape (plans, pipeline ranks)."""
    table = context.table
    pushing = np.zeros(dense.shape, dtype=bool)
    if not set(table.overlap_modes) & set(PUSHED_MODES):
        return np.zeros(dense.shape)
    for site in SITES:
        layers = dense if site.startswith("mlp") else dense + moe  # only a dense feed-forward has sites
        pushing |= np.isin(table.overlap_at(site), PUSHED_MODES)[:, None] & (layers > 0)
    pushing &= (table["tp"] > 1)[:, None]
    tokens = tensor_bytes("t h", context.sizes, context.dtype_bytes)[:, None]
    return np.where(pushing, 2 * buffer_bytes(tokens), 0.0)


def _pages(nbytes: Value) -> Value:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
