"""Matrix product and reduce-scatter in one persistent kernel, (W·R, K) x (K, N) summed over ranks; each keeps R rows.

First every rank computes what others are waiting for, the shard of rank + 1, rank + 2, ..., and stores each tile by TMA
straight into a slot at its owner. Then it computes its own shard; the end of each tile waits for that tile from the
other ranks and adds them to the accumulator, in float32 and in the order of the ranks: the result is the same in every
run, and there is neither a pass over partial results nor a barrier.

Whoever waits has delivered everything already, and whoever is waited for waits for nobody before it delivers: no cycle.
That is why the two kinds of tiles have loops of their own.

A tile is announced at the end of the next one. By then it has long arrived, and making sure costs no time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor.kernels.signals import before_bulk_loads, bulk_stores_done, leave, publish, wait_for
from executor.kernels.tiles import first_at_or_after, place_in_shard


@triton.jit
def _announce(tile, per_shard, peer_flags, value, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Raise the flag of a tile at its owner. Flags are (W sources, tiles of a shard); `peer_flags` holds W addresses."""
    owner = (RANK + 1 + tile // per_shard) % WORLD
    flags = tl.load(peer_flags + owner).to(tl.pointer_type(tl.int32), bitcast=True)
    publish(flags + RANK * per_shard + tile % per_shard, value)


@triton.jit
def _add_and_store(acc, mine, c, half, slot_rows, row, column, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Add what the other ranks delivered for a piece of this rank's shard, and store the sum."""
    HEIGHT: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1] // 2
    one, two = acc.reshape(HEIGHT, 2, WIDTH).permute(0, 2, 1).split()
    for source in tl.static_range(WORLD):
        if source != RANK:
            slot_row = source * slot_rows + row
            one += mine.load([half, slot_row, column]).reshape(HEIGHT, WIDTH).to(tl.float32)
            two += mine.load([half, slot_row, column + WIDTH]).reshape(HEIGHT, WIDTH).to(tl.float32)
    c.store([row, column], one.to(c.dtype))
    c.store([row, column + WIDTH], two.to(c.dtype))


@triton.jit(do_not_specialize=["rows", "slot_rows", "columns", "depth"])
def matmul_scatter(
    a,
    b,
    slot_1,
    slot_2,
    slot_3,
    slot_4,
    slot_5,
    slot_6,
    slot_7,
    mine,
    c,
    flags,
    peer_flags,
    epoch,
    ticket,
    error,
    rows,
    slot_rows,
    columns,
    depth,
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
    """c = the sum over ranks of a[rows of this rank] @ b.

    Descriptors for TMA: `a` (W·rows, K) as (BLOCK_M, BLOCK_K); `b` (N, K) as (BLOCK_N, BLOCK_K) if B_TURNED, else (K, N)
    as (BLOCK_K, BLOCK_N); `slot_i` of peer rank + i (any, from W on), two sets (2, W·slot_rows, N) as
    (1, BLOCK_M, BLOCK_N); `mine`, this rank's, (1, BLOCK_M, BLOCK_N / 4); `c` (rows, N) as (BLOCK_M, BLOCK_N / 4).
    `slot_rows` is `rows` rounded up to BLOCK_M. `flags` (W, tiles of a shard) is this rank's, `peer_flags` (W) holds
    the addresses of all ranks' flags (int64).
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    per_shard = tiles_m * tiles_n
    slots = (slot_1, slot_2, slot_3, slot_4, slot_5, slot_6, slot_7)  # triton 3.6 takes no tuple of descriptors
    call = tl.load(epoch, volatile=True)
    half = call % 2
    others = (WORLD - 1) * per_shard

    # Tiles and steps in one loop by hand: the compiler declines to flatten loops with waits or branches at their end.
    steps = tl.cdiv(depth, BLOCK_K)
    tile = program - programs
    k = -1
    m, n, step = 0, 0, 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in tl.range(0, steps * tl.maximum(tl.cdiv(others - program, programs), 0)):
        k = tl.where(k == steps - 1, 0, k + 1)
        if k == 0:
            tile += programs
            step = 1 + tile // per_shard
            m, n = place_in_shard(tile % per_shard, tiles_m, tiles_n, GROUP_M)
        left = a.load([(RANK + step) % WORLD * rows + m * BLOCK_M, k * BLOCK_K])
        if B_TURNED:
            right = b.load([n * BLOCK_N, k * BLOCK_K]).T
        else:
            right = b.load([k * BLOCK_K, n * BLOCK_N])
        acc = tl.dot(left, right, acc)
        if k == steps - 1:
            partial = acc.to(c.dtype).reshape(1, BLOCK_M, BLOCK_N)
            for peer in tl.static_range(1, WORLD):
                if step == peer:
                    slots[peer - 1].store([half, RANK * slot_rows + m * BLOCK_M, n * BLOCK_N], partial)
            if tile >= programs:
                bulk_stores_done(1, ASM)
                _announce(tile - programs, per_shard, peer_flags, call + 1, RANK, WORLD)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if program < others:
        bulk_stores_done(0, ASM)
        _announce(tile, per_shard, peer_flags, call + 1, RANK, WORLD)

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
        left = a.load([RANK * rows + m * BLOCK_M, k * BLOCK_K])
        if B_TURNED:
            right = b.load([n * BLOCK_N, k * BLOCK_K]).T
        else:
            right = b.load([k * BLOCK_K, n * BLOCK_N])
        acc = tl.dot(left, right, acc)
        if k == steps - 1:
            for source in tl.static_range(WORLD):
                if source != RANK:
                    wait_for(flags + source * per_shard + inside, call + 1, error, 1 + source, LIMIT)
            before_bulk_loads(ASM)
            # A quarter at a time: more would fit neither registers nor the shared memory beside the operands.
            one, two = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
            _add_and_store(one, mine, c, half, slot_rows, m * BLOCK_M, n * BLOCK_N, RANK, WORLD)
            second = n * BLOCK_N + BLOCK_N // 2
            _add_and_store(two, mine, c, half, slot_rows, m * BLOCK_M, second, RANK, WORLD)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    leave(epoch, ticket, programs)
