"""Small kernels of a serving decoder, each one pass over rows of tokens: positions, residual and norm, activation."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_and_store(
    qkv,
    cos,
    sin,
    positions,
    slots,
    keys,
    values,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Rotate queries and keys of qkv (tokens, (HEADS + 2 KV) 2 HALF) in place, and store keys and values in their
    slots.

    cos, sin (positions, HALF) float32; slots (tokens,) int64 of page x PAGE + place in it; keys, values
    (pages, KV, PAGE, 2 HALF). Programs: (tokens, (HEADS + 2 KV) / AT_ONCE rounded up).
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    lane = tl.arange(0, HALF)
    inside = (head < HEADS + 2 * KV)[:, None]
    begin = (token * (HEADS + 2 * KV) + head)[:, None] * (2 * HALF) + lane[None, :]
    a = tl.load(qkv + begin, mask=inside, other=0.0)
    b = tl.load(qkv + begin + HALF, mask=inside, other=0.0)
    angle = tl.load(positions + token) * HALF + lane
    c, s = tl.load(cos + angle)[None, :], tl.load(sin + angle)[None, :]
    rotated = (head < HEADS + KV)[:, None]
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    a = tl.where(rotated, wide_a * c - wide_b * s, wide_a).to(qkv.dtype.element_ty)
    b = tl.where(rotated, wide_b * c + wide_a * s, wide_b).to(qkv.dtype.element_ty)
    tl.store(qkv + begin, a, mask=inside & rotated)
    tl.store(qkv + begin + HALF, b, mask=inside & rotated)

    slot = tl.load(slots + token)
    is_key = (head >= HEADS) & (head < HEADS + KV)
    is_value = (head >= HEADS + KV) & (head < HEADS + 2 * KV)
    kv = tl.where(is_key, head - HEADS, head - HEADS - KV)
    place = (((slot // PAGE) * KV + kv) * PAGE + slot % PAGE)[:, None] * (2 * HALF) + lane[None, :]
    tl.store(keys + place, a, mask=is_key[:, None])
    tl.store(keys + place + HALF, b, mask=is_key[:, None])
    tl.store(values + place, a, mask=is_value[:, None])
    tl.store(values + place + HALF, b, mask=is_value[:, None])


@triton.jit
def add_norm(x, residual, weight, out, residual_out, columns, eps, BLOCK: tl.constexpr):
    """residual_out = residual + x; out = residual_out normalized by RMS and scaled by `weight`. Programs: (rows,)."""
    at = tl.arange(0, BLOCK)
    inside = at < columns
    where = tl.program_id(0).to(tl.int64) * columns + at
    total = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual_out + where, total.to(residual_out.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(total * total, 0) / columns + eps)
    total = total * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated(both, out, width, BLOCK: tl.constexpr):
    """Out (rows, width) = silu of the first half of both (rows, 2 width) times the second. Programs: (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(both + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


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
