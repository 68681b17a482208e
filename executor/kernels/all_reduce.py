"""Sums over ranks in one kernel, small ones for latency, optionally with the residual and RMSNorm that follow.

A tensor is seen as rows of at most BLOCK numbers; each program takes every P-th row and waits only for the same program
of the other ranks. Sums are float32 in the order of ranks, so all ranks hold the same bits.

one shot: everybody sends everything to everybody, then adds. One exchange, (W - 1)·n bytes out.
two shot: rank r adds the r-th share of the rows and sends the sums around. Two exchanges, 2·(W - 1)/W·n bytes out.

Data are pushed: stores need no answer, loads from a peer would wait for one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor.kernels.signals import leave, publish, wait_for


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
    """Tell this program's counterparts that its stores are done, and wait until theirs are. Flags: (2, W, STRIDE).

    With LEAVE the program is counted out meanwhile: whoever counts has read the epoch, and only that matters.
    """
    program = tl.program_id(0)
    tl.debug_barrier()  # one thread speaks for all
    for step in tl.static_range(1, WORLD):
        theirs = tl.load(peer_flags + (RANK + step) % WORLD).to(tl.pointer_type(tl.int32), bitcast=True)
        publish(theirs + first + RANK * STRIDE + program, value)
    if LEAVE:
        leave(epoch, ticket, tl.num_programs(0))
    for step in tl.static_range(1, WORLD):
        source = (RANK + step) % WORLD
        wait_for(flags + first + source * STRIDE + program, value, error, 1 + source, LIMIT)
    tl.debug_barrier()


@triton.jit
def _finish(total, row, at, inside, out, residual, residual_out, weight, columns, eps, NORM: tl.constexpr):
    """Store a row of sums; with NORM, first add the residual (stored as well), then normalize and scale."""
    where = row * columns + at
    if NORM:
        total += tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_out + where, total.to(residual_out.dtype.element_ty), mask=inside)
        scale = tl.rsqrt(tl.sum(total * total, 0) / columns + eps)
        total = total * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=inside)


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
    eps,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Out = sum over ranks of x, each (rows, `columns` <= BLOCK) with `numel` numbers (the last row may be short).

    `slots` (2 sets, W sources, numel) at a distance of `set_numel` between sets, `flags` (2, W, STRIDE programs).
    """
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
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for source in tl.static_range(WORLD):
            if source == RANK:
                total += tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
            else:
                mine = slots + base + source * numel
                total += tl.load(mine + where, mask=inside, other=0.0).to(tl.float32)
        _finish(total, row, at, inside, out, residual, residual_out, weight, columns, eps, NORM)


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
    eps,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """As `one_shot`; `slots` holds per set (W sources, share of rows) for parts and then (rows) for the sums."""
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
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for source in tl.static_range(WORLD):
            if source == RANK:
                total += tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
            else:
                total += tl.load(slots + base + source * part + here, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(x.dtype.element_ty)
        for step in tl.static_range(1, WORLD):
            tl.store(_address(peer_slots, (RANK + step) % WORLD, x) + sums + where, rounded, mask=inside)
        total = rounded.to(tl.float32)  # as the others see it
        _finish(total, RANK * share + row, at, inside, out, residual, residual_out, weight, columns, eps, NORM)
    _exchange(flags, peer_flags, WORLD * STRIDE, call + 1, epoch, ticket, error, RANK, WORLD, STRIDE, LIMIT, False)
    for row in range(program, share, programs):
        for step in tl.static_range(1, WORLD):
            owner = (RANK + step) % WORLD
            where = owner * part + row * columns + at
            inside = (at < columns) & (where < numel)
            total = tl.load(slots + sums + where, mask=inside, other=0.0).to(tl.float32)
            _finish(total, owner * share + row, at, inside, out, residual, residual_out, weight, columns, eps, NORM)
