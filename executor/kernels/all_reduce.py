"""All-reduce in one kernel for small messages, optionally fused with the following residual and RMSNorm.

A tensor is treated as rows of at most BLOCK numbers; each program takes every P-th row and waits only for the same
program of the other ranks. Sums are float32, of float64 tensors float64, in rank order, so all ranks get bitwise equal
results.

flagged words: as one shot, but each 32-bit word is stored with the call's number as a 64-bit word, as in NCCL's LL
    protocol: no separate flag and no wait for stores to complete. Sends 2·(W - 1)·n bytes.
one shot: each rank sends all data to all others, then adds. One exchange, sends (W - 1)·n bytes.
two shot: rank r adds the r-th share of the rows and sends the sums to all. Two exchanges, sends 2·(W - 1)/W·n bytes.

Data are pushed to peers, since a store does not wait for a round trip and a load does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor.kernels.signals import advance_epoch_when_last, publish_to, wait_for_all


@triton.jit
def _address(table, peer, like):
    """Return the peer's address in a table of int64 as a pointer like `like`."""
    address = tl.load(table + peer).to(like.dtype, bitcast=True)
    return tl.multiple_of(address, 16)


@triton.jit
def _exchange(
    flags,
    peer_flags,
    first,
    value,
    epoch,
    ticket,
    error,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    STRIDE: tl.constexpr,
    LIMIT: tl.constexpr,
    LEAVE: tl.constexpr,
):
    """Signal to the same program of all peers that this program's stores are done, and wait for their signals. Flags:
    (2, W, STRIDE).

    All peers are signalled at once, since one after the other would cost a round trip over NVLink each. With LEAVE the
    program also counts as having read the epoch.
    """
    program = tl.program_id(0)
    peers = tl.arange(0, triton.next_power_of_2(WORLD))
    others = (peers < WORLD) & (peers != RANK)
    theirs = tl.load(peer_flags + peers, mask=others, other=0).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.debug_barrier()  # a few threads signal for the whole program
    publish_to(theirs + first + RANK * STRIDE + program, value, others)
    if LEAVE:
        advance_epoch_when_last(epoch, ticket, tl.num_programs(0))
    wait_for_all(flags + first + peers * STRIDE + program, value, others, peers, error, LIMIT)
    tl.debug_barrier()


@triton.jit
def _finish(
    total, row, at, inside, out, residual, residual_out, weight, columns, EPS: tl.constexpr, NORM: tl.constexpr
):
    """Store a row of sums; with NORM, first add the residual (stored as well), then normalize and scale."""
    where = row * columns + at
    if NORM:
        total += tl.load(residual + where, mask=inside, other=0.0).to(total.dtype)
        tl.store(residual_out + where, total.to(residual_out.dtype.element_ty), mask=inside)
        scale = tl.rsqrt(tl.sum(total * total, 0) / columns + EPS)
        total = total * scale * tl.load(weight + at, mask=inside, other=0.0).to(total.dtype)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["quads"])
def flagged_words(
    x,
    out,
    inbox,
    peer_inboxes,
    epochs,
    error,
    quads,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Out = sum over ranks of x, both 4 x `quads` words of 32 bits: pairs of half-precision numbers, or single float32.

    `inbox` is int64 (2 sets, W sources, STRIDE programs, BLOCK). Every program has its own epoch and its own part of
    each set, which only the same program of the peers reads. Why two sets suffice: see `executor.kernels.signals`.
    """
    program = tl.program_id(0)
    call = tl.load(epochs + program, volatile=True)
    at = tl.arange(0, BLOCK)
    where = program * BLOCK + at
    inside = where < quads * 4  # a multiple of 4, so that the compiler vectorises accesses
    own = tl.load(x.to(tl.pointer_type(tl.int32), bitcast=True) + where, mask=inside, other=0)
    flagged = ((call + 1).to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    half_set = (call % 2) * WORLD * STRIDE * BLOCK + program * BLOCK
    for step in tl.static_range(1, WORLD):
        theirs = tl.load(peer_inboxes + (RANK + step) % WORLD).to(tl.pointer_type(tl.int64), bitcast=True)
        theirs = tl.multiple_of(theirs, 16)
        tl.store(theirs + half_set + RANK * STRIDE * BLOCK + at, flagged, mask=inside)

    sources = tl.arange(0, triton.next_power_of_2(WORLD))
    mine = inbox + half_set + sources[:, None] * STRIDE * BLOCK + at[None, :]
    awaited = inside[None, :] & ((sources < WORLD) & (sources != RANK))[:, None]
    polls, late = 0, 1
    arrived = tl.zeros(mine.shape, dtype=tl.int64)
    while (late > 0) & (polls < LIMIT):
        arrived = tl.load(mine, mask=awaited, other=0, volatile=True)
        behind = awaited & ((arrived >> 32) != call + 1)
        late = tl.max(behind.to(tl.int32) * (1 + sources)[:, None])
        polls += 1
    if late > 0:
        tl.atomic_max(error, late, sem="relaxed", scope="sys")
    tl.store(epochs + program, call + 1)

    word = tl.where((sources == RANK)[:, None], own[None, :], arrived.to(tl.int32))
    number: tl.constexpr = x.dtype.element_ty
    if number == tl.float32:
        total = tl.sum(word.to(tl.float32, bitcast=True), 0).to(tl.int32, bitcast=True)
    else:
        low = word.to(tl.int16).to(number, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(number, bitcast=True).to(tl.float32)
        low, high = tl.sum(low, 0).to(number), tl.sum(high, 0).to(number)
        total = (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (
            high.to(tl.int16, bitcast=True).to(tl.int32) << 16
        )
    tl.store(out.to(tl.pointer_type(tl.int32), bitcast=True) + where, total, mask=inside)


@triton.jit
def one_shot(
    x,
    out,
    residual,
    residual_out,
    weight,
    slots,
    peer_slots,
    flags,
    peer_flags,
    epoch,
    ticket,
    error,
    numel,
    columns,
    set_numel,
    EPS: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Out = sum over ranks of x, each (rows, `columns` <= BLOCK) with `numel` numbers (the last row may be short).

    `slots` is (2 sets, W sources, numel) with `set_numel` numbers between sets, `flags` (2, W, STRIDE programs).
    """
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    program, programs = tl.program_id(0), tl.num_programs(0)
    call = tl.load(epoch, volatile=True)
    base = (call % 2) * set_numel
    rows = tl.cdiv(numel, columns)
    at = tl.arange(0, BLOCK)
    for row in range(program, rows, programs):
        where = row * columns + at
        inside = (at < columns) & (where < numel)
        value = tl.load(x + where, mask=inside)
        for step in tl.static_range(1, WORLD):
            theirs = _address(peer_slots, (RANK + step) % WORLD, x)
            tl.store(theirs + base + RANK * numel + where, value, mask=inside)
    _exchange(flags, peer_flags, 0, call + 1, epoch, ticket, error, RANK, WORLD, STRIDE, LIMIT, True)
    for row in range(program, rows, programs):
        where = row * columns + at
        inside = (at < columns) & (where < numel)
        total = tl.zeros((BLOCK,), dtype=wide)
        for source in tl.static_range(WORLD):
            if source == RANK:
                total += tl.load(x + where, mask=inside, other=0.0).to(wide)
            else:
                mine = slots + base + source * numel
                total += tl.load(mine + where, mask=inside, other=0.0).to(wide)
        _finish(total, row, at, inside, out, residual, residual_out, weight, columns, EPS, NORM)


@triton.jit
def two_shot(
    x,
    out,
    residual,
    residual_out,
    weight,
    slots,
    peer_slots,
    flags,
    peer_flags,
    epoch,
    ticket,
    error,
    numel,
    columns,
    set_numel,
    EPS: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """As `one_shot`; `slots` holds per set (W sources, share of rows) for parts and then (rows) for the sums."""
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    program, programs = tl.program_id(0), tl.num_programs(0)
    call = tl.load(epoch, volatile=True)
    base = (call % 2) * set_numel
    rows = tl.cdiv(numel, columns)
    share = tl.cdiv(rows, WORLD)
    part = share * columns
    sums = base + WORLD * part
    at = tl.arange(0, BLOCK)
    for row in range(program, share, programs):
        here = row * columns + at
        for step in tl.static_range(1, WORLD):
            owner = (RANK + step) % WORLD
            where = owner * part + here
            inside = (at < columns) & (where < numel)
            theirs = _address(peer_slots, owner, x) + base + RANK * part
            tl.store(theirs + here, tl.load(x + where, mask=inside), mask=inside)
    _exchange(flags, peer_flags, 0, call + 1, epoch, ticket, error, RANK, WORLD, STRIDE, LIMIT, True)
    for row in range(program, share, programs):
        here = row * columns + at
        where = RANK * part + here
        inside = (at < columns) & (where < numel)
        total = tl.zeros((BLOCK,), dtype=wide)
        for source in tl.static_range(WORLD):
            if source == RANK:
                total += tl.load(x + where, mask=inside, other=0.0).to(wide)
            else:
                total += tl.load(slots + base + source * part + here, mask=inside, other=0.0).to(wide)
        rounded = total.to(x.dtype.element_ty)
        for step in tl.static_range(1, WORLD):
            tl.store(_address(peer_slots, (RANK + step) % WORLD, x) + sums + where, rounded, mask=inside)
        total = rounded.to(wide)  # the value as the peers receive it
        _finish(total, RANK * share + row, at, inside, out, residual, residual_out, weight, columns, EPS, NORM)
    _exchange(flags, peer_flags, WORLD * STRIDE, call + 1, epoch, ticket, error, RANK, WORLD, STRIDE, LIMIT, False)
    for row in range(program, share, programs):
        for step in tl.static_range(1, WORLD):
            owner = (RANK + step) % WORLD
            where = owner * part + row * columns + at
            inside = (at < columns) & (where < numel)
            total = tl.load(slots + sums + where, mask=inside, other=0.0).to(wide)
            _finish(total, owner * share + row, at, inside, out, residual, residual_out, weight, columns, EPS, NORM)
