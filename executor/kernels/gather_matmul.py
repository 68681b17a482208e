"""All-gather and matmul in one persistent kernel, (W·R, K) x (K, N).

Each rank has R rows of the left operand. Copy engines copy the other ranks' rows into `gathered` while the kernel
computes, and set a flag for every piece. The kernel starts with its own rows, in place and without waiting, and takes
the shards in the order in which they arrive: rank + 1, rank + 2, ...

The wait is in the outer loop, which computes the coordinates of the loads. This keeps the compiler's software pipeliner
from moving loads above the wait; a test checks the compiled code for that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor.kernels.signals import before_bulk_loads, clear_flags_when_last, wait_for
from executor.kernels.tiles import first_at_or_after, halves, place_in_shard, step


@triton.jit
def _piece_of(
    tile, per_shard, tiles_m, tiles_n, rows, piece_rows, pieces, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr
):
    """Return the index, in order of arrival, of the last piece that a tile reads; earlier pieces have arrived by
    then.
    """
    m, _ = place_in_shard(tile % per_shard, tiles_m, tiles_n, GROUP_M)
    return tile // per_shard * pieces + tl.minimum(m * BLOCK_M + BLOCK_M - 1, rows - 1) // piece_rows


@triton.jit
def _shards(
    a,
    b,
    c,
    flags,
    error,
    first,
    last,
    rows,
    columns,
    depth,
    piece_rows,
    pieces,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    WAIT: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HALVES: tl.constexpr,
    LIMIT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Compute the tiles `first` <= t < `last` of this program; with WAIT, each after its rows have arrived."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    per_shard = tiles_m * tiles_n
    for tile in tl.range(first_at_or_after(first, program, programs), last, programs, flatten=True):
        shard = (RANK + tile // per_shard) % WORLD
        m, n = place_in_shard(tile % per_shard, tiles_m, tiles_n, GROUP_M)
        row = m * BLOCK_M
        if WAIT:
            number = _piece_of(tile, per_shard, tiles_m, tiles_n, rows, piece_rows, pieces, BLOCK_M, GROUP_M)
            # A tile does not wait again for a piece that an earlier tile of this program has waited for. This is
            # recomputed from the tile index: a value carried between iterations would make the loads depend on the tile
            # before.
            before = _piece_of(tile - programs, per_shard, tiles_m, tiles_n, rows, piece_rows, pieces, BLOCK_M, GROUP_M)
            if (tile - programs < first) | (number > before):
                wait_for(flags + shard * pieces + number % pieces, 1, error, 1 + shard, LIMIT)
                before_bulk_loads(ASM)
            a_row = shard * rows + row
        else:
            a_row = row
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(tl.cdiv(depth, BLOCK_K)):
            acc = step(a, b, acc, a_row, n * BLOCK_N, k * BLOCK_K, B_TRANSPOSED)
        # Three dimensions, so that rows beyond the end of a shard are cut off instead of written into the next one.
        if HALVES:
            one, two = halves(acc)
            c.store([shard, row, n * BLOCK_N], one.to(c.dtype).reshape(1, BLOCK_M, BLOCK_N // 2))
            c.store([shard, row, n * BLOCK_N + BLOCK_N // 2], two.to(c.dtype).reshape(1, BLOCK_M, BLOCK_N // 2))
        else:
            c.store([shard, row, n * BLOCK_N], acc.to(c.dtype).reshape(1, BLOCK_M, BLOCK_N))


@triton.jit(do_not_specialize=["rows", "columns", "depth", "piece_rows", "pieces"])
def gather_matmul(
    own,
    gathered,
    b,
    c,
    flags,
    ticket,
    error,
    rows,
    columns,
    depth,
    piece_rows,
    pieces,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HALVES: tl.constexpr,
    LIMIT: tl.constexpr,
    ASM: tl.constexpr,
):
    """c[s] = x_s @ b for all shards s: `own` (rows, K) is this rank's, `gathered` (W·rows, K) receives the others'.

    TMA descriptors: own, gathered (BLOCK_M, BLOCK_K); b (N, K) as (BLOCK_N, BLOCK_K) if B_TRANSPOSED, else (K, N)
    as (BLOCK_K, BLOCK_N); c (W, rows, N) as (1, BLOCK_M, BLOCK_N), half as wide with HALVES.
    `flags` (W, pieces), zero before the call, becomes zero again.
    """
    per_shard = tl.cdiv(rows, BLOCK_M) * tl.cdiv(columns, BLOCK_N)
    _shards(
        own, b, c, flags, error, 0, per_shard, rows, columns, depth, piece_rows, pieces,
        RANK, WORLD, False, B_TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, HALVES, LIMIT, ASM,
    )  # fmt: skip
    _shards(
        gathered, b, c, flags, error, per_shard, WORLD * per_shard, rows, columns, depth, piece_rows, pieces,
        RANK, WORLD, True, B_TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, HALVES, LIMIT, ASM,
    )  # fmt: skip
    clear_flags_when_last(ticket, flags, WORLD * pieces)
