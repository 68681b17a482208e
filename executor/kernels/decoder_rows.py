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
