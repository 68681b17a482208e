"""Read every SM's cycle counter and the GPU's global timer."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def stamp(words):
    """Store (cycles, nanoseconds) of the SM that runs this program in that SM's row of `words` (SMs, 2)."""
    processor = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    cycles = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(words + 2 * processor, cycles)
    tl.store(words + 2 * processor + 1, now)
