"""The operators of a serving decoder, other than matmuls: Triton kernels on a GPU, torch's own elsewhere.

A step that is not captured launches them one by one, and the host is then no faster than the device. So they use
`PreparedKernel`: Triton's own launch takes the host longer than many of these kernels run.

Shapes in comments: T tokens, B sequences, h hidden, a query heads and k key/value heads of this rank, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from executor.gpu.device import processors
from executor.kernels import on_demand as kernels
from executor.kernels.prepared_kernel import PreparedKernel

HEADS_AT_ONCE = 8
GATED_AT_ONCE = 1024
SMALLEST_DOT = 16  # rows of a product on tensor cores
MAX_SPLITS = 64
PROGRAMS_PER_SM = 8
HALVES = (torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes: Triton compiles accesses of this size if all addresses are aligned to it

_prepared: dict[tuple[Any, ...], PreparedKernel] = {}


def _launch(
    kernel: Any, programs: tuple[int, ...], tensors: tuple[Tensor, ...], constants: tuple[Any, ...], **options: int
) -> None:
    """Launch `kernel` on the current stream; its first arguments are `tensors`, the others `constants`."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    device = tensors[0].device.index
    aligned = tuple([address % ALIGNMENT == 0 for address in addresses])
    key = (id(kernel), device, aligned, constants, tuple([tensor.dtype for tensor in tensors]))
    ready = _prepared.get(key)
    if ready is None:
        ready = PreparedKernel(kernel, programs, (*tensors, *constants), changing=range(len(tensors)), **options)
        _prepared[key] = ready
    ready.over(programs, torch._C._cuda_getCurrentRawStream(device), *addresses)  # noqa: SLF001 - its public face makes an object each time


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of heads of this rank, and their width."""

    queries: int
    kv: int
    width: int


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values of one layer, (pages, k, page, d) each."""

    keys: Tensor
    values: Tensor

    @property
    def tokens(self) -> int:
        """Tokens per page."""
        return self.keys.shape[2]


def rotate_and_store(
    qkv: Tensor, angles: tuple[Tensor, Tensor], positions: Tensor, slots: Tensor, pages: Pages, heads: Heads
) -> None:
    """Rotate queries and keys of qkv (T, (a + 2 k) d) in place; store keys and values at `slots` (T,) of the cache.

    `angles` are cosines and sines (positions, d / 2) in float32; a slot is page x tokens of a page + place in it.
    """
    cos, sin = angles
    if qkv.is_cuda:
        blocks = -(-(heads.queries + 2 * heads.kv) // HEADS_AT_ONCE)
        tensors = (qkv, cos, sin, positions, slots, pages.keys, pages.values)
        constants = (heads.queries, heads.kv, heads.width // 2, pages.tokens, HEADS_AT_ONCE)
        _launch(kernels.rotate_and_store, (qkv.shape[0], blocks), tensors, constants)
        return
    split = qkv.view(qkv.shape[0], -1, heads.width)
    rotated = split[:, : heads.queries + heads.kv]
    a, b = rotated.float().chunk(2, dim=-1)
    c, s = cos[positions][:, None], sin[positions][:, None]
    rotated.copy_(torch.cat((a * c - b * s, b * c + a * s), dim=-1))
    page, place = slots // pages.tokens, slots % pages.tokens
    pages.keys[page, :, place] = split[:, heads.queries : heads.queries + heads.kv]
    pages.values[page, :, place] = split[:, heads.queries + heads.kv :]


def attend_pages(qkv: Tensor, pages: Pages, tables: Tensor, lengths: Tensor, heads: Heads) -> Tensor:
    """Return attention (B, a d) of the queries in qkv (B, (a + 2 k) d), one a sequence, over its first `lengths` keys.

    `tables` (B, ..) are the numbers of each sequence's pages, in order.
    """
    if not qkv.is_cuda:
        return _attend_gathered(qkv, pages, tables, lengths, heads)
    batch, group = qkv.shape[0], heads.queries // heads.kv
    splits = splits_for(batch * heads.kv, processors(qkv.device))
    parts = qkv.new_empty((batch, heads.queries, splits, heads.width), dtype=torch.float32)
    maxima, sums = qkv.new_empty((2, batch, heads.queries, splits), dtype=torch.float32)
    out = qkv.new_empty((batch, heads.queries * heads.width))
    rows = max(SMALLEST_DOT, 1 << (group - 1).bit_length())
    strides, shape = (qkv.stride(0), tables.stride(0)), (heads.queries, group, rows, heads.width, pages.tokens)
    tensors = (qkv, pages.keys, pages.values, tables, lengths, parts, maxima, sums)
    constants = (*strides, heads.width**-0.5, *shape, splits, "ieee")
    _launch(kernels.attend_pages, (batch, heads.kv, splits), tensors, constants, num_warps=4, num_stages=3)
    _launch(kernels.merge_shares, (batch * heads.queries,), (parts, maxima, sums, out), (heads.width, splits))
    return out


def splits_for(programs: int, processors: int) -> int:
    """Return the number of programs per sequence over which its keys are split: a power of two that fills the GPU."""
    wanted = -(-PROGRAMS_PER_SM * processors // programs)
    return min(MAX_SPLITS, 1 << max(0, wanted - 1).bit_length())


def _attend_gathered(qkv: Tensor, pages: Pages, tables: Tensor, lengths: Tensor, heads: Heads) -> Tensor:
    """As `attend_pages`, on a contiguous copy of the pages."""
    longest = int(lengths.max())
    keys, values = (
        part[tables[:, : -(-longest // pages.tokens)].long()].transpose(1, 2).flatten(2, 3)[:, :, :longest]
        for part in (pages.keys, pages.values)
    )  # (B, k, longest, d)
    q = qkv[:, : heads.queries * heads.width].view(-1, heads.queries, 1, heads.width)
    seen = (torch.arange(longest, device=qkv.device)[None, :] < lengths[:, None])[:, None, None, :]
    out = functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
    return out.flatten(1)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Parts of prompts that one step reads, each a range of rows.

    `query_ends` and `key_ends` (parts + 1,) int32 are the rows between the parts, of queries and of keys; queries are
    the last of their keys. `cached` (K,) are the slots of all keys, or None if no prompt has earlier tokens: then keys
    are in the same rows as queries. `longest` are the tokens of the longest part, and of the longest with its earlier
    ones, or more.
    """

    longest: tuple[int, int]
    cached: Tensor | None
    query_ends: Tensor
    key_ends: Tensor


def attend_prompts(qkv: Tensor, chunks: Chunks, pages: Pages, heads: Heads) -> Tensor:
    """Return causal attention (T, a d) within each prompt of qkv (T, (a + 2 k) d), including its cached tokens. Rows
    of no prompt are undefined.
    """
    q, k, v = qkv.view(qkv.shape[0], -1, heads.width).split((heads.queries, heads.kv, heads.kv), dim=1)
    if chunks.cached is not None:
        page, place = chunks.cached // pages.tokens, chunks.cached % pages.tokens
        k, v = pages.keys[page, :, place], pages.values[page, :, place]  # (K, k, d)
    if qkv.is_cuda and qkv.dtype in HALVES:
        # Not scaled_dot_product_attention: if that prefers cuDNN, each new length takes tens of milliseconds to build a
        # graph. Here all prompts are one launch of one kernel; queries are the last of their keys, as FlashAttention
        # counts.
        out: Tensor = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 - an operator of torch, whose name begins so
            q, k, v, chunks.query_ends, chunks.key_ends, *chunks.longest, 0.0, True, False
        )[0]  # fmt: skip
        return out.reshape(qkv.shape[0], -1)
    out = torch.zeros_like(q)
    ranges = zip(pairwise(chunks.query_ends.tolist()), pairwise(chunks.key_ends.tolist()), strict=True)
    for (begin, end), (first, last) in ranges:
        out[begin:end] = _attend_prompt(q[begin:end], k[first:last], v[first:last])
    return out.flatten(1)


def _attend_prompt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention (tokens, a, d) of q (tokens, a, d) over k (keys, k, d); q has the last tokens of k."""
    seen = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).tril(k.shape[0] - q.shape[0])
    queries, keys, values = (part.transpose(0, 1)[None] for part in (q, k, v))
    out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)
    return out[0].transpose(0, 1)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (normalized, sum) of x and residual (T, h), with the normalized sum scaled by `weight` (h,)."""
    if not x.is_cuda:
        total = residual + x
        return functional.rms_norm(total, weight.shape, weight, eps), total
    rows, columns = x.shape
    out, total = torch.empty_like(x), torch.empty_like(x)
    block = 1 << (columns - 1).bit_length()
    warps = min(16, max(4, block // 512))
    _launch(kernels.add_norm, (rows,), (x, residual, weight, out, total), (columns, eps, block), num_warps=warps)
    return out, total


def gated(both: Tensor) -> Tensor:
    """Return silu(gate) x up (T, f) of both (T, 2 f), gates first."""
    width = both.shape[1] // 2
    if not both.is_cuda:
        return functional.silu(both[:, :width]) * both[:, width:]
    out = both.new_empty((both.shape[0], width))
    _launch(kernels.gated, (both.shape[0], -(-width // GATED_AT_ONCE)), (both, out), (width, GATED_AT_ONCE))
    return out
