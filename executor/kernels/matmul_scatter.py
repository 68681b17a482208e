"""Matrix product and reduce-scatter in one persistent kernel, (W·R, K) x (K, N) summed over ranks; each keeps R rows.

First every rank computes what others are waiting for, the shard of rank + 1, rank + 2, ..., and counts the tiles of a
piece that are done; a copy engine waits for the count and takes the piece to its owner. Then the rank computes its own
shard: the end of each tile waits for the piece from every other rank and adds it to the accumulator, in float32 and in
the order of ranks. The result is the same in every run, and no pass over partial results follows.

Whoever waits has computed for others already, and nobody waits before: no cycle. That is why the two kinds of tiles have
loops of their own.

Storing tiles straight into the peer's memory from here (TMA) was tried: 508 instead of 658 TFLOP/s on two H200 at
8192 x 8192 x 4096. The loads of the next tile queue behind a store that NVLink drains at 3 GB/s a multiprocessor. Adding tiles to the peer's
memory (TMA reductions) was tried, too: 522 instead of 496 us at 8192 x 8192 x 2048, 874 instead of 905 us at twice the
depth, and not deterministic (tests/bench/scatter_by_tma.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor.kernels.signals import bulk_stores_done, lower_when_last, wait_for
from executor.kernels.tiles import first_at_or_after, halves, place_in_shard, step


@triton.jit
def _count(
    tile, per_shard, tiles_m, tiles_n, rows, piece_rows, pieces, done, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr
):
    """Count a finished tile for every piece that it touches; `done` is (W - 1 shards in order of steps, pieces)."""
    m, _ = place_in_shard(tile % per_shard, tiles_m, tiles_n, GROUP_M)
    first = m * BLOCK_M // piece_rows
    last = (tl.minimum(m * BLOCK_M + BLOCK_M, rows) - 1) // piece_rows
    for piece in range(first, last + 1):
        tl.atomic_add(done + tile // per_shard * pieces + piece, 1, sem="release", scope="sys")


@triton.jit
def _add_and_store(acc, slots, c, shard_numel, row, column, rows, columns, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Add what the other ranks delivered for a piece of this rank's shard, and store the sum."""
    HEIGHT: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1]
    at_m, at_n = row + tl.arange(0, HEIGHT), column + tl.arange(0, WIDTH)
    where = slots + at_m[:, None] * columns.to(tl.int64) + at_n[None, :]
    inside = (at_m < rows)[:, None] & (at_n < columns)[None, :]
    if WORLD <= 4:  # all loads under way at once; for more ranks they would not fit the registers
        for source in tl.static_range(WORLD):
            if source != RANK:
                acc += tl.load(where + source * shard_numel, mask=inside, other=0.0).to(tl.float32)
    else:
        for source in range(WORLD):
            if source != RANK:
                acc += tl.load(where + source * shard_numel, mask=inside, other=0.0).to(tl.float32)
    c.store([row, column], acc.to(c.dtype))


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
    B_TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    LIMIT: tl.constexpr,
    ASM: tl.constexpr,
):
    """C = the sum over ranks of a[rows of this rank] @ b.

    Descriptors for TMA: `a` (W·rows, K) as (BLOCK_M, BLOCK_K); `b` (N, K) as (BLOCK_N, BLOCK_K) if B_TURNED, else (K, N)
    as (BLOCK_K, BLOCK_N); `parts` (W - 1, rows, N), what goes to rank + 1, ..., as (1, BLOCK_M, BLOCK_N / 2); `c`
    (rows, N) as (BLOCK_M, BLOCK_N / 2). `slots` (W, rows, N) is where the others' parts arrive. `done` (W - 1, pieces)
    counts tiles up from zero. `eighth` is N / 8. `flags` (W, pieces), raised when a piece has arrived, are lowered at the end.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = eighth * 8  # so that the compiler knows that rows begin at multiples of 16 bytes
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    per_shard = tiles_m * tiles_n
    others = (WORLD - 1) * per_shard
    steps = tl.cdiv(depth, BLOCK_K)
    HALF: tl.constexpr = BLOCK_N // 2

    # Tiles and steps in one loop by hand: the compiler declines to flatten loops with waits or branches at their end.
    tile = program - programs
    k = -1
    m, n, turn = 0, 0, 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in tl.range(0, steps * tl.maximum(tl.cdiv(others - program, programs), 0)):
        k = tl.where(k == steps - 1, 0, k + 1)
        if k == 0:
            tile += programs
            turn = 1 + tile // per_shard
            m, n = place_in_shard(tile % per_shard, tiles_m, tiles_n, GROUP_M)
        row = (RANK + turn) % WORLD * rows + m * BLOCK_M
        acc = step(a, b, acc, row, n * BLOCK_N, k * BLOCK_K, B_TURNED)
        if k == steps - 1:
            one, two = halves(acc)
            parts.store([turn - 1, m * BLOCK_M, n * BLOCK_N], one.to(c.dtype).reshape(1, BLOCK_M, HALF))
            parts.store([turn - 1, m * BLOCK_M, n * BLOCK_N + HALF], two.to(c.dtype).reshape(1, BLOCK_M, HALF))
            # A tile is counted at the end of the next: its stores are done by then, and making sure costs no time.
            if tile >= programs:
                bulk_stores_done(2, ASM)
                _count(
                    tile - programs, per_shard, tiles_m, tiles_n, rows, piece_rows, pieces, done, BLOCK_M, GROUP_M
                )  # fmt: skip
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if program < others:
        bulk_stores_done(0, ASM)
        _count(tile, per_shard, tiles_m, tiles_n, rows, piece_rows, pieces, done, BLOCK_M, GROUP_M)

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
        acc = step(a, b, acc, RANK * rows + m * BLOCK_M, n * BLOCK_N, k * BLOCK_K, B_TURNED)
        if k == steps - 1:
            # Pieces arrive in order; a second wait for one that is there finds its flag still raised.
            piece = (tl.minimum(m * BLOCK_M + BLOCK_M, rows) - 1) // piece_rows
            for source in tl.static_range(WORLD):
                if source != RANK:
                    wait_for(flags + source * pieces + piece, 1, error, 1 + source, LIMIT)
            # Half a tile at a time: the whole would not fit beside the operands in shared memory.
            one, two = halves(acc)
            numel = rows.to(tl.int64) * columns
            _add_and_store(one, slots, c, numel, m * BLOCK_M, n * BLOCK_N, rows, columns, RANK, WORLD)
            _add_and_store(two, slots, c, numel, m * BLOCK_M, n * BLOCK_N + HALF, rows, columns, RANK, WORLD)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)

    lower_when_last(ticket, flags, WORLD * pieces)
