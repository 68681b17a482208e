"""Matmul and reduce-scatter in one persistent kernel, (W·R, K) x (K, N) summed over ranks; each rank keeps R rows.

First every rank computes the shards of the other ranks (rank + 1, rank + 2, ...) and counts the finished tiles of each
piece; a copy engine waits for the count and copies the piece to its owner. Then the rank computes its own shard: the
end of each tile waits for the piece from every other rank and adds it to the accumulator, in float32 and in rank order.
The result is deterministic, and no pass over partial results follows.

A rank waits only after it has computed everything for the others, so there is no deadlock. That is why the two kinds of
tiles have separate loops.

Two alternatives were measured on two H200. Storing tiles directly in the peer's memory (TMA): 508 instead of 658
TFLOP/s at 8192 x 8192 x 4096, since the loads of the next tile queue behind a store that NVLink drains at 3 GB/s per
SM. Adding tiles to the peer's memory (TMA reductions): 522 instead of 496 us at 8192 x 8192 x 2048, 874 instead of 905
us at twice the depth, and not deterministic (examples/validation/overlap_2xH200.md).
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor.kernels.signals import bulk_stores_done, clear_flags_when_last, wait_for
from executor.kernels.tiles import first_at_or_after, halves, place_in_shard, step


@triton.jit
def _count(
    tile, per_shard, tiles_m, tiles_n, rows, piece_rows, pieces, done, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr
):
    """Count a finished tile for every piece that it is part of; `done` is (W - 1 shards from rank + 1 on, pieces)."""
    m, _ = place_in_shard(tile % per_shard, tiles_m, tiles_n, GROUP_M)
    first = m * BLOCK_M // piece_rows
    last = (tl.minimum(m * BLOCK_M + BLOCK_M, rows) - 1) // piece_rows
    for piece in range(first, last + 1):
        tl.atomic_add(done + tile // per_shard * pieces + piece, 1, sem="release", scope="sys")


@triton.jit
def _add_and_store(acc, slots, c, shard_numel, row, column, rows, columns, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Add the other ranks' partial results to a block of this rank's shard, and store the sum in `c`."""
    HEIGHT: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1]
    at_m, at_n = row + tl.arange(0, HEIGHT), column + tl.arange(0, WIDTH)
    where = slots + at_m[:, None] * columns.to(tl.int64) + at_n[None, :]
    inside = (at_m < rows)[:, None] & (at_n < columns)[None, :]
    if WORLD <= 4:  # all loads in flight at once; for more ranks they would not fit into registers
        for source in tl.static_range(WORLD):
            if source != RANK:
                acc += tl.load(where + source * shard_numel, mask=inside, other=0.0).to(acc.dtype)
    else:
        for source in range(WORLD):
            if source != RANK:
                acc += tl.load(where + source * shard_numel, mask=inside, other=0.0).to(acc.dtype)
    c.store([row, column], acc.to(c.dtype))


@triton.jit
def _other_shards(
    a,
    b,
    parts,
    c,
    done,
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
    ASM: tl.constexpr,
):
    """Compute the shards of the other ranks into `parts`, and count the finished tiles of each piece in `done`."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    per_shard = tiles_m * tiles_n
    others = (WORLD - 1) * per_shard
    steps = tl.cdiv(depth, BLOCK_K)
    HALF: tl.constexpr = BLOCK_N // 2

    # Tiles and steps in one flat loop: the compiler does not flatten loops that end in a wait or a branch.
    tile = program - programs
    k = -1
    m, n, offset = 0, 0, 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in tl.range(0, steps * tl.maximum(tl.cdiv(others - program, programs), 0)):
        k = tl.where(k == steps - 1, 0, k + 1)
        if k == 0:
            tile += programs
            offset = 1 + tile // per_shard
            m, n = place_in_shard(tile % per_shard, tiles_m, tiles_n, GROUP_M)
        row = (RANK + offset) % WORLD * rows + m * BLOCK_M
        acc = step(a, b, acc, row, n * BLOCK_N, k * BLOCK_K, B_TRANSPOSED)
        if k == steps - 1:
            one, two = halves(acc)
            parts.store([offset - 1, m * BLOCK_M, n * BLOCK_N], one.to(c.dtype).reshape(1, BLOCK_M, HALF))
            parts.store([offset - 1, m * BLOCK_M, n * BLOCK_N + HALF], two.to(c.dtype).reshape(1, BLOCK_M, HALF))
            # Count the previous tile: its stores have finished by now, so that waiting for them costs no time.
            if tile >= programs:
                bulk_stores_done(2, ASM)
                _count(
                    tile - programs, per_shard, tiles_m, tiles_n, rows, piece_rows, pieces, done, BLOCK_M, GROUP_M
                )  # fmt: skip
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if program < others:
        bulk_stores_done(0, ASM)
        _count(tile, per_shard, tiles_m, tiles_n, rows, piece_rows, pieces, done, BLOCK_M, GROUP_M)


@triton.jit
def _own_shard(
    a,
    b,
    slots,
    c,
    flags,
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
    LIMIT: tl.constexpr,
):
    """Compute this rank's shard, adding the other ranks' pieces from `slots` to each tile once they have arrived."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    per_shard = tiles_m * tiles_n
    others = (WORLD - 1) * per_shard
    steps = tl.cdiv(depth, BLOCK_K)
    HALF: tl.constexpr = BLOCK_N // 2

    first = first_at_or_after(others, program, programs) - others
    inside = first - programs
    k = -1
    m, n = 0, 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in tl.range(0, steps * tl.maximum(tl.cdiv(per_shard - first, programs), 0)):
        k = tl.where(k == steps - 1, 0, k + 1)
        if k == 0:
            inside += programs
            m, n = place_in_shard(inside, tiles_m, tiles_n, GROUP_M)
        acc = step(a, b, acc, RANK * rows + m * BLOCK_M, n * BLOCK_N, k * BLOCK_K, B_TRANSPOSED)
        if k == steps - 1:
            # Pieces arrive in order, and a flag stays set until the end, so several tiles can wait for one piece.
            piece = (tl.minimum(m * BLOCK_M + BLOCK_M, rows) - 1) // piece_rows
            for source in tl.static_range(WORLD):
                if source != RANK:
                    wait_for(flags + source * pieces + piece, 1, error, 1 + source, LIMIT)
            # Half a tile at a time: a whole tile and the operands do not fit into shared memory.
            one, two = halves(acc)
            numel = rows.to(tl.int64) * columns
            _add_and_store(one, slots, c, numel, m * BLOCK_M, n * BLOCK_N, rows, columns, RANK, WORLD)
            _add_and_store(two, slots, c, numel, m * BLOCK_M, n * BLOCK_N + HALF, rows, columns, RANK, WORLD)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)


@triton.jit(do_not_specialize=["rows", "eighth", "depth", "piece_rows", "pieces"])
def matmul_scatter(
    a,
    b,
    parts,
    slots,
    c,
    done,
    flags,
    ticket,
    error,
    rows,
    eighth,
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
    LIMIT: tl.constexpr,
    ASM: tl.constexpr,
):
    """C = the sum over ranks of a[rows of this rank] @ b.

    TMA descriptors: `a` (W·rows, K) in blocks (BLOCK_M, BLOCK_K); `b` (N, K) in blocks (BLOCK_N, BLOCK_K) if
    B_TRANSPOSED, else (K, N) in blocks (BLOCK_K, BLOCK_N); `parts` (W - 1, rows, N), the shards for rank + 1, ..., in
    blocks (1, BLOCK_M, BLOCK_N / 2); `c` (rows, N) in blocks (BLOCK_M, BLOCK_N / 2). The shards of the other ranks
    arrive in `slots` (W, rows, N). `done` (W - 1, pieces) counts finished tiles from zero. `eighth` is N / 8. `flags`
    (W, pieces) are set when a piece has arrived, and cleared at the end.
    """
    columns = eighth * 8  # so that the compiler knows that rows begin at multiples of 16 bytes
    _other_shards(
        a, b, parts, c, done, rows, columns, depth, piece_rows, pieces,
        RANK, WORLD, B_TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, ASM,
    )  # fmt: skip
    _own_shard(
        a, b, slots, c, flags, error, rows, columns, depth, piece_rows, pieces,
        RANK, WORLD, B_TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, LIMIT,
    )  # fmt: skip
    clear_flags_when_last(ticket, flags, WORLD * pieces)
