"""torch's asynchronous tensor parallelism: the time of a product and its collective together.

A pass over the compiled graph finds the pairs: a gather with the products that read it (except weight gradients), and a
reduce-scatter with the one product that it reads. Where several products are added first (backward of queries, keys and
values) nothing is hidden. Each product is divided into as many pieces as there are ranks; copy engines move shards over
symmetric memory, the first piece is the rank's own and waits for none. Partial results of a reduce-scatter are summed
in a pass of its own.

Moving shards takes memory bandwidth and power from the product: each second of moving costs the product
`PRODUCT_SLOWDOWN` seconds.

Modes that our own executor runs are in `simulator.overlap.modes`.

Sources: Wang et al., ASPLOS 2023 (decomposition); discuss.pytorch.org/t/209487 and torch 2.11's
_inductor/fx_passes/micro_pipeline_tp.py.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

# Source: yifuwang/symm-mem-recipes README, nine all-gather products on 8 H100, shards moved by copy engines: what the
# fused kernel takes longer than the same product alone, over the seconds copied, is 0.35 at the median (0.24 to 0.55).
# torch 2.11's fused operators on 4 H200 agree: over 18 products with 4k to 16k rows the predicted gain over NCCL and
# then cuBLAS is 6 % too large without this and right at the median with it.
PRODUCT_SLOWDOWN = 0.35

Value = TypeVar("Value", float, NDArray[np.float64])


def partials_bytes(op: str, nbytes: Value, ranks: Value) -> Value:
    """Return the bytes of memory read and written to add up the peers' results for one shard of `nbytes` / ranks."""
    return nbytes * (1 + 1 / ranks) if op == "reduce_scatter" else 0.0 * nbytes


def extra_calls(ranks: Value) -> Value:
    """Return how many collectives and messages the host issues besides the one collective that is divided.

    A copy between peers takes two calls per piece, the copy and its signals: torch 2.11's fused operators on 4 H200
    take 212 to 247 us with 2048 rows or fewer however small the product, which is 8 calls and 4 launches.
    """
    return 2 * ranks - 1


def launch_s(*, hop_s: Value, pieces_s: Value, ranks: Value) -> Value:
    """Return the seconds of one piece of the product while shards move."""
    piece = pieces_s / ranks
    return piece + PRODUCT_SLOWDOWN * _shorter(piece, hop_s) * (ranks - 1) / ranks


def together_s(*, hop_s: Value, pieces_s: Value, ranks: Value) -> Value:
    """Return seconds of the product and its collective: `hop_s` moves one shard, `pieces_s` is all pieces together."""
    launch = launch_s(hop_s=hop_s, pieces_s=pieces_s, ranks=ranks)
    return launch + (ranks - 1) * _longer(hop_s, launch)


def _longer(a: Value, b: Value) -> Value:
    """Return the larger value, element by element for columns."""
    if isinstance(a, float) and isinstance(b, float):
        return max(a, b)
    return np.maximum(a, b)


def _shorter(a: Value, b: Value) -> Value:
    if isinstance(a, float) and isinstance(b, float):
        return min(a, b)
    return np.minimum(a, b)
