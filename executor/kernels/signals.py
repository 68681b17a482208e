"""Flags by which ranks signal each other from inside a kernel that data have arrived. All waits are bounded.

A flag is an int32 in symmetric memory that one rank writes and one rank reads. What a writer stores before `publish_to`
is visible to a reader after `wait_for`: release and acquire at system scope, so across NVLink as well.

Flags hold the number of the call (the epoch) instead of 0 or 1, so they need no reset, and a flag whose writer is
already one call ahead still means "ready". The epoch is in device memory, is read by every program of a kernel and
advanced by the last one that read it, so a captured CUDA graph counts like an eager program. It also selects one of two
sets of buffers. Two suffice where a call cannot end before every peer has taken part in it: a rank that writes to a set
for call n + 2 has finished call n + 1, so its peer has finished call n.

A wait that exceeds its limit of polls sets an error word and continues: the kernel ends, the host sees the word at its
next check, and no GPU spins forever.

Assembly is behind constexpr switches, since Triton's interpreter does not support it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for(flag, expected, error, code, LIMIT: tl.constexpr):
    """Wait until the int32 at `flag` has reached `expected`, at most LIMIT polls; else write `code` to `error`."""
    polls = 0
    while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") - expected < 0) & (polls < LIMIT):
        polls += 1
    if polls == LIMIT:
        tl.atomic_max(error, code, sem="relaxed", scope="sys")


@triton.jit
def wait_for_all(flags, expected, wanted, sources, error, LIMIT: tl.constexpr):
    """As `wait_for`, for those flags of a block that are `wanted`; their round trips overlap."""
    polls, late = 0, 1
    while (late > 0) & (polls < LIMIT):
        behind = wanted & (tl.atomic_add(flags, 0, mask=wanted, sem="acquire", scope="sys") - expected < 0)
        late = tl.max(behind.to(tl.int32) * (1 + sources))
        polls += 1
    if late > 0:
        tl.atomic_max(error, late, sem="relaxed", scope="sys")


@triton.jit
def publish_to(flags, value, wanted):
    """Set the `wanted` flags of a block of int32 flags, usually a peer's, after all stores of this program."""
    tl.atomic_xchg(flags, value, mask=wanted, sem="release", scope="sys")


@triton.jit
def bulk_stores_done(LATEST: tl.constexpr, ASM: tl.constexpr):
    """Wait until the bulk (TMA) stores of this program, except the LATEST (0 to 2), are in memory.

    `desc.store` alone waits only until shared memory may be reused, and a release after it would publish data that are
    not there yet. Several warps issue one store and one thread releases; hence the barrier.
    """
    if ASM:
        if LATEST == 0:
            _assembly("cp.async.bulk.wait_group 0;\n\tfence.proxy.async;\n\tbar.sync 0;\n\tmov.u32 $0, 0;")
        elif LATEST == 1:
            _assembly("cp.async.bulk.wait_group 1;\n\tfence.proxy.async;\n\tbar.sync 0;\n\tmov.u32 $0, 0;")
        else:
            _assembly("cp.async.bulk.wait_group 2;\n\tfence.proxy.async;\n\tbar.sync 0;\n\tmov.u32 $0, 0;")


@triton.jit
def before_bulk_loads(ASM: tl.constexpr):
    """Order bulk (TMA) loads after an acquire: they belong to another proxy, which an acquire alone does not bind."""
    if ASM:
        _assembly("fence.proxy.async;\n\tmov.u32 $0, 0;")


@triton.jit
def _assembly(TEXT: tl.constexpr):
    tl.inline_asm_elementwise(TEXT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def advance_epoch_when_last(epoch, ticket, programs):
    """Count a program that has read the epoch; the last one advances the epoch for the next launch and resets the
    ticket.
    """
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.atomic_xchg(ticket, 0, sem="relaxed", scope="gpu")
        tl.atomic_add(epoch, 1, sem="relaxed", scope="gpu")


@triton.jit
def clear_flags_when_last(ticket, flags, count):
    """Count a program that has finished all its waits; the last one sets `count` flags to zero for the next call."""
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.atomic_xchg(ticket, 0, sem="relaxed", scope="gpu")
        for index in range(count):
            tl.atomic_xchg(flags + index, 0, sem="relaxed", scope="sys")
