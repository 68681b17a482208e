"""Shared by the persistent matmuls: the order in which they visit output tiles, and one step of a tile's matmul.

Tiles are ordered by shards of rows, one shard per rank, and inside a shard by groups of rows, so that operands stay in
the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_in_shard(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return (row of tiles, column of tiles) of the `tile`-th tile of a shard: down GROUP_M rows, then the next
    column.
    """
    per_group = GROUP_M * tiles_n
    first_m = (tile // per_group) * GROUP_M
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    inside = tile % per_group
    return first_m + inside % height, inside // height


@triton.jit
def first_at_or_after(start, program, programs):
    """Return the first number >= `start` that `program` gets when numbers are distributed round robin."""
    return start + (program - start % programs + programs) % programs


@triton.jit
def step(a, b, acc, row, column, depth, B_TRANSPOSED: tl.constexpr):
    """Return `acc` plus one step of a tile's product; `b` has shape (N, K) if B_TRANSPOSED, else (K, N)."""
    left = a.load([row, depth])
    if B_TRANSPOSED:
        right = b.load([column, depth]).T
    else:
        right = b.load([depth, column])
    return tl.dot(left, right, acc)


@triton.jit
def halves(tile):
    """Return the left and the right half of a tile; storing it in halves needs half the shared memory."""
    return tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()
