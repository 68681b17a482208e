"""Rotary position embedding in one pass: every number is read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_pairs(
    x,
    out,
    cos,
    sin,
    rows,
    positions,
    heads,
    stride_0,
    stride_1,
    stride_2,
    BACK: tl.constexpr,
    POSITIONS_FIRST: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rotate the pairs (i, i + HALF) of rows of x by the angles of their positions, in float32; with BACK by the
    negative angles.

    Rows have three dimensions, the last of them `heads`; positions are the first or the second. x is read by its
    strides, `out` is contiguous. cos and sin are (positions, 2 HALF).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    outer, head = row // heads, row % heads
    if POSITIONS_FIRST:  # (positions, others, heads)
        others = (rows // heads) // positions
        first, second = outer // others, outer % others
        position = first
    else:
        first, second = outer // positions, outer % positions
        position = second
    lane = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (lane < HALF)[None, :]
    begin = (first * stride_0 + second * stride_1 + head * stride_2)[:, None] + lane[None, :]
    angle = position[:, None] * (2 * HALF) + lane[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    if BACK:
        s = -s
    a = tl.load(x + begin, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + begin + HALF, mask=inside, other=0.0).to(tl.float32)
    at = row[:, None] * (2 * HALF) + lane[None, :]
    tl.store(out + at, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + HALF, (b * c + a * s).to(out.dtype.element_ty), mask=inside)
