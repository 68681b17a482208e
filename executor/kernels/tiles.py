"""The order in which a persistent product visits its output tiles.

Tiles come in shards of rows, one shard for each rank, and inside a shard in groups of rows (so that operands stay in
the L2 cache). All functions are integer arithmetic and run in triton's interpreter as they run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_in_shard(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return (row of tiles, column of tiles) of the `tile`-th of a shard: down GROUP_M rows, then one column on."""
    per_group = GROUP_M * tiles_n
    first_m = (tile // per_group) * GROUP_M
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    inside = tile % per_group
    return first_m + inside % height, inside // height


@triton.jit
def first_at_or_after(start, program, programs):
    """Return the first number >= `start` that belongs to `program` when they are dealt round robin."""
    return start + (program - start % programs + programs) % programs
