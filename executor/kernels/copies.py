"""A small kernel next to copies by copy engines: add up received data."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_slots(own, slots, numel, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """Own += all other ranks' slots (W, numel), in rank order, in float32 (float64 if the slots are)."""
    wide: tl.constexpr = tl.float64 if own.dtype.element_ty == tl.float64 else tl.float32
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    total = tl.zeros((BLOCK,), dtype=wide)
    for source in tl.static_range(WORLD):
        if source == RANK:
            total += tl.load(own + at, mask=inside, other=0.0).to(wide)
        else:
            total += tl.load(slots + source * numel.to(tl.int64) + at, mask=inside, other=0.0).to(wide)
    tl.store(own + at, total.to(own.dtype.element_ty), mask=inside)
