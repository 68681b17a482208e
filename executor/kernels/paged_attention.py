"""Attention of one new query a sequence over a paged KV cache, split along the keys so that few sequences fill the GPU.

Flash-decoding (Dao et al., "Flash-Decoding for long-context inference", 2023): every program attends one group of query
heads over a share of a sequence's pages and keeps the maximum and the sum of its exponentials; a second kernel merges
the shares. Shares follow from lengths in device memory, so that a captured CUDA graph serves sequences of any length.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_pages(
    q,
    keys,
    values,
    tables,
    lengths,
    parts,
    maxima,
    sums,
    q_stride,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend a share of the pages of one sequence with GROUP query heads, those of one key/value head.

    q (B, HEADS, WIDTH) with `q_stride` between sequences; keys, values (pages, kv heads, PAGE, WIDTH); tables (B, ..)
    of page numbers; lengths (B,) of keys, at least 1. parts (B, HEADS, SPLITS, WIDTH), maxima and sums (B, HEADS,
    SPLITS) are float32; a share without pages leaves its maximum at minus infinity and its part unwritten. ROWS is
    GROUP or more, at least 16. Programs: (B, kv heads, SPLITS).
    """
    sequence, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = HEADS // GROUP
    length = tl.load(lengths + sequence)
    pages = tl.cdiv(length, PAGE)
    share = tl.cdiv(pages, SPLITS)
    first = split * share
    last = tl.minimum(first + share, pages)
    row, at, lane = tl.arange(0, ROWS), tl.arange(0, PAGE), tl.arange(0, WIDTH)
    head = kv * GROUP + row
    query = tl.load(
        q + sequence.to(tl.int64) * q_stride + head[:, None] * WIDTH + lane[None, :],
        mask=(row < GROUP)[:, None],
        other=0.0,
    )
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, WIDTH), tl.float32)
    for number in range(first, last):
        page = tl.load(tables + sequence * table_stride + number).to(tl.int64)
        begin = (page * kv_heads + kv) * PAGE * WIDTH
        block = begin + at[:, None] * WIDTH + lane[None, :]
        key = tl.load(keys + block)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        score = tl.where((number * PAGE + at < length)[None, :], score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        shrink = tl.exp(most - higher)
        total = total * shrink + tl.sum(weight, 1)
        value = tl.load(values + block)
        out = out * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        most = higher
    place = (sequence * HEADS + head) * SPLITS + split
    tl.store(maxima + place, most, mask=row < GROUP)
    tl.store(sums + place, total, mask=row < GROUP)
    if first < last:
        where = place.to(tl.int64)[:, None] * WIDTH + lane[None, :]
        tl.store(parts + where, out, mask=(row < GROUP)[:, None])


@triton.jit
def merge_shares(parts, maxima, sums, out, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """Merge the shares of one head of one sequence into out (B, heads, WIDTH). Programs: (B x heads,)."""
    place = tl.program_id(0).to(tl.int64)
    split, lane = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    most = tl.load(maxima + place * SPLITS + split)
    there = most > float("-inf")
    weight = tl.where(there, tl.exp(most - tl.max(most, 0)), 0.0)
    total = tl.sum(weight * tl.load(sums + place * SPLITS + split), 0)
    where = (place * SPLITS + split)[:, None] * WIDTH + lane[None, :]
    part = tl.load(parts + where, mask=there[:, None], other=0.0)
    merged = tl.sum(part * weight[:, None], 0) / total
    tl.store(out + place * WIDTH + lane, merged.to(out.dtype.element_ty))
