"""Context parallelism: each rank holds a part of every sequence and attends to the keys and values of all ranks.

Attention over all keys is combined from attention over parts, each with its log-sum-exp (arXiv 1805.02867; ring:
arXiv 2310.01889). A sequence is split into 2 W chunks and rank r holds chunks r and 2W - 1 - r ("zigzag"), so
that under a causal mask every rank has the same work in every round, as in ring-flash-attention:
    own keys                   causal over both chunks
    keys of an earlier rank    all queries attend to its early chunk, none to its late one
    keys of a later rank       the late queries attend to both its chunks, the early queries to none

The plan's `cp_method` says how keys and values are communicated:
    ring         forward, W - 1 hops to the next rank, overlapped with the current part; backward the same, and their
                 gradients W hops, back to the owner
    all_gather   all at once, overlapped with the rank's own part; gradients are reduce-scattered at the end
    all_to_all   by heads (DeepSpeed-Ulysses, arXiv 2309.14509): each rank attends with some heads to all tokens;
                 queries, keys and values go from token shards to head shards before attention, results back after it,
                 and their mirror images in backward. The key heads must divide evenly over the ranks

Grouped queries: each key head serves several query heads, and is sent and read once (the kernels support groups). Parts
are combined once, at the end, with weights from the log-sum-exp of all: updating the result after each part would cost
as much memory traffic as the attention of two short parts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.model.saved_results import save_or_replay

HALF_PRECISION = frozenset({torch.bfloat16, torch.float16})
Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values
CAUSAL, ALL = "causal", "all"  # values of `_Ring.rows`: the sequence is split in rank order
MIN_CUDNN_TOKENS = 128  # shorter parts do not use cuDNN, which is not faster for them

# --- who holds what ---------------------------------------------------------------------------------------------------


def positions(seq_len: int, rank: int, world: int, device: torch.device) -> Tensor:
    """Return the positions (S,) of the tokens that `rank` holds: its early chunk, then its late chunk."""
    if world == 1:
        return torch.arange(seq_len, device=device)
    chunks = torch.arange(seq_len, device=device).chunk(2 * world)
    return torch.cat((chunks[rank], chunks[2 * world - 1 - rank]))


# --- attention over one part of the keys ------------------------------------------------------------------------------


def part_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention (B, a, Sq, d) over these keys alone, and its log-sum-exp (B, a, Sq) in float32 or wider."""
    if _is_half_precision(q):
        if _cudnn_takes(q, k):
            out, lse = _cudnn_forward(q, k, v, causal)
            return out, lse
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]  # noqa: SLF001 - the only operators that return the log-sum-exp
        return out, lse
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = _scores(q, k, causal=causal)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v.to(scores.dtype), lse


def part_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> Gradients:
    """Return this part's gradients of q, k and v; `out` and `lse` are those of attention over all keys."""
    if _is_half_precision(q):
        if _cudnn_takes(q, k):
            return _cudnn_backward(grad, q, k, v, out, lse, causal)
        # Placeholder for dropout's random state; dropout is 0.
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)
        flash: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(  # noqa: SLF001 - as above
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none
        )
        return flash
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = _scores(q, k, causal=causal)
    weights = (scores - lse[..., None]).exp()
    wide = scores.dtype
    grad_wide, scale = grad.to(wide), q.shape[-1] ** -0.5
    dv = weights.transpose(-2, -1) @ grad_wide
    inner = grad_wide @ v.to(wide).transpose(-2, -1) - (grad_wide * out).sum(-1, keepdim=True)
    d_scores = weights * inner * scale
    dk = d_scores.transpose(-2, -1) @ q.to(wide)
    # Query heads that share a key head share its gradient.
    dk, dv = (t.unflatten(1, (-1, groups)).sum(2) for t in (dk, dv))
    return d_scores @ k.to(wide), dk, dv


def _is_half_precision(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in HALF_PRECISION


def _cudnn_takes(q: Tensor, k: Tensor) -> bool:
    return min(q.shape[2], k.shape[2]) >= MIN_CUDNN_TOKENS and _cudnn_works(q.device.index, q.shape[-1], q.dtype)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[:2]  # noqa: SLF001 - as above
    return out, lse.reshape(q.shape[:-1])  # cuDNN leaves a last dimension of one


def _cudnn_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Gradients:
    none = torch.zeros((), dtype=torch.int64, device=q.device)  # placeholder for dropout's random state and the bias
    gradients: Gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(  # noqa: SLF001 - as above
        grad, q, k, v, out, lse.unsqueeze(-1), none, none, None, None, None, q.shape[2], k.shape[2], 0.0, causal
    )
    return gradients


@cache
def _cudnn_works(device: int, width: int, dtype: torch.dtype) -> bool:
    """Return whether cuDNN's attention supports parts with grouped keys on this GPU.

    `scaled_dot_product_attention` prefers cuDNN on Hopper and later, unless TORCH_CUDNN_SDPA_PREFERRED=0, which is
    respected here. The supported shapes depend on cuDNN's version, so this tries a small part, forward and backward.
    Its results are checked by `executor.verify.kernels`. Must be called before the first step: inside a checkpointed
    block the trial would be recorded as the block's own attention.
    """
    if os.environ.get("TORCH_CUDNN_SDPA_PREFERRED") == "0" or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    q = torch.zeros((1, 4, 2 * MIN_CUDNN_TOKENS, width), device=torch.device("cuda", device), dtype=dtype)
    k = torch.zeros((1, 2, MIN_CUDNN_TOKENS, width), device=q.device, dtype=dtype)
    try:
        out, lse = _cudnn_forward(q, k, k, False)
        _cudnn_backward(q, q, k, k, out, lse, False)
    except (RuntimeError, TypeError):
        return False
    return True


def _scores(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores: Tensor = q.to(wide) @ k.to(wide).transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


Part = tuple[slice, Tensor, Tensor]  # queries, their attention over some keys, and its log-sum-exp


def combine(parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """Return attention over the keys of all parts, in float32 or wider, and its log-sum-exp.

    The first part must have all queries.
    """
    lse = parts[0][2].clone()
    for queries, _, some in parts[1:]:
        here = lse[:, :, queries]
        here.copy_(torch.logaddexp(here, some))
    whole = torch.mul(parts[0][1], (parts[0][2] - lse).exp()[..., None])
    for queries, out, some in parts[1:]:
        whole[:, :, queries].addcmul_(out, (some - lse[:, :, queries]).exp()[..., None])
    return whole, lse


# --- keys that travel -------------------------------------------------------------------------------------------------


class _Ring:
    """The context-parallel group, this rank's neighbours in it, and how keys are communicated.

    `rows` is CAUSAL (causal attention) or ALL (to all keys) for a sequence that is split in rank order, and empty for
    causal attention in zigzag.
    """

    def __init__(self, group: dist.ProcessGroup, method: str, rows: str = "") -> None:
        self.rows = rows
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.gathers = method == "all_gather"
        self.next, self.before = (self.rank + 1) % self.world, (self.rank - 1) % self.world

    def start(self, sent: Tensor) -> tuple[Tensor, dist.Work]:
        """Start to send a tensor to the next rank; return the buffer for the previous rank's tensor, and the work
        handle.

        It is an all-to-all in which each rank has one receiver. A send and a receive would mark their tensors as used
        on NCCL's stream (pytorch/pytorch#132292), so that the memory of each, once freed, were lost to the allocator
        until the device got there: a step that the host has issued far ahead would hold the keys of many layers.
        """
        arriving = torch.empty_like(sent)
        received, given = (
            [sent.numel() if rank == peer else 0 for rank in range(self.world)] for peer in (self.before, self.next)
        )
        work: dist.Work = dist.all_to_all_single(
            arriving.view(-1), sent.view(-1), received, given, group=self.group, async_op=True
        )
        return arriving, work

    def key_blocks(self, keys: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (owner, its keys and values), this rank's first; the next ones are sent meanwhile."""
        if self.gathers:
            everyone = keys.new_empty((self.world, *keys.shape))
            # Flat, because gloo concatenates along the first dimension and cannot stack.
            work = dist.all_gather_into_tensor(everyone.view(-1), keys.view(-1), group=self.group, async_op=True)
            yield self.rank, keys
            work.wait()
            for turn in range(1, self.world):
                source = (self.rank - turn) % self.world
                yield source, everyone[source]
            return
        for turn in range(self.world):
            arriving, work = self.start(keys) if turn < self.world - 1 else (keys, None)
            yield (self.rank - turn) % self.world, keys
            if work is not None:
                work.wait()
            keys = arriving

    def is_causal(self, source: int) -> bool:
        """Return whether, of the keys of rank `source`, each query sees those up to its own."""
        return source == self.rank and self.rows != ALL

    def visible_slices(self, source: int, half: int) -> tuple[slice, slice] | None:
        """Return (queries, keys): which local queries attend to which keys of rank `source`; None if none do."""
        whole = slice(None)
        if self.rows == CAUSAL and source > self.rank:
            return None
        if source == self.rank or self.rows:
            return whole, whole
        return (whole, slice(0, half)) if source < self.rank else (slice(half, None), whole)


def _attend(q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> tuple[Tensor, Tensor]:
    """Return attention to all keys, and its log-sum-exp."""
    half = q.shape[2] // 2
    parts: list[Part] = []
    for source, keys in ring.key_blocks(torch.stack((k, v))):
        if (visible := ring.visible_slices(source, half)) is not None:
            queries, seen = visible
            causal = ring.is_causal(source)
            found = part_forward(q[:, :, queries], keys[0][:, :, seen], keys[1][:, :, seen], causal=causal)
            parts.append((queries, *found))
    out, lse = combine(parts)
    # The backward kernels need the forward result in its own type; the plain backward uses the wider one.
    return (out.to(q.dtype) if _is_half_precision(q) else out), lse


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        out, lse = save_or_replay(lambda: _attend(q, k, v, ring))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        half, wide = q.shape[2] // 2, lse.dtype
        keys = torch.stack((k, v))
        dq = torch.zeros_like(q, dtype=wide)
        # With gathered keys there is a row of gradients per rank; in a ring the gradients travel with the keys.
        rows = ring.world if ring.gathers else 1
        d_keys = torch.zeros((rows, *keys.shape), dtype=wide, device=keys.device)
        pending: dist.Work | None = None
        for source, block_keys in ring.key_blocks(keys):
            visible = ring.visible_slices(source, half)
            parts = None
            if visible is not None:
                queries, seen = visible
                parts = part_backward(
                    grad[:, :, queries],  # already laid out as the kernel needs it (tokens before heads): do not copy
                    q[:, :, queries],
                    block_keys[0][:, :, seen],
                    block_keys[1][:, :, seen],
                    out[:, :, queries],
                    lse[:, :, queries].contiguous(),
                    causal=ring.is_causal(source),
                )
                dq[:, :, queries].add_(parts[0])
            if pending is not None:
                pending.wait()  # gradients of these keys from the rank that held them before
            if parts is not None:
                mine = d_keys[source if ring.gathers else 0]
                mine[0][:, :, seen].add_(parts[1])
                mine[1][:, :, seen].add_(parts[2])
            if not ring.gathers:
                d_keys, pending = ring.start(d_keys)
        if pending is not None:
            pending.wait()
        own_grads = d_keys[0]
        if ring.gathers:
            own_grads = torch.empty_like(keys, dtype=wide)
            dist.reduce_scatter_tensor(own_grads.view(-1), d_keys.view(-1), group=ring.group)
        return dq.to(q.dtype), own_grads[0].to(k.dtype), own_grads[1].to(v.dtype), None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, *, causal: bool) -> Tensor:
    """Return attention (B, a, S, d) of this rank's rows of a sequence to the rows of all ranks of `group`, around a
    ring. The sequence is split in rank order.
    """
    out: Tensor = _RingAttention.apply(q, k, v, _Ring(group, "ring", CAUSAL if causal else ALL))
    return out


class RingAttention(nn.Module):
    """Replaces `CausalAttention` if sequences are sharded over `group` in zigzag.

    `method` is `ring` or `all_gather`; `width` the head size, and `dtype` the type of queries on `device`.
    """

    def __init__(
        self, group: dist.ProcessGroup, method: str, *, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        if device.type == "cuda" and dtype in HALF_PRECISION:
            _cudnn_works(torch.device(device).index or 0, width, dtype)
        self.method = method
        self.ring = _Ring(group, method)

    # There is nothing to fuse here, and the compiler must not reorder its communication.
    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _RingAttention.apply(q, k, v, self.ring)
        return out


class _AllToAll(torch.autograd.Function):
    """All-to-all of slices of dimension 0; the backward pass is the same all-to-all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad, ctx.group), None


class UlyssesAttention(nn.Module):
    """Replaces `core` and calls it with all tokens and a share of the heads."""

    method = "all_to_all"

    def __init__(self, group: dist.ProcessGroup, core: nn.Module) -> None:
        super().__init__()
        self.group, self.core = group, core
        self.world = dist.get_world_size(group)

    @torch.compiler.disable  # as in executor.parallel.context_parallel
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Take q (B, a, S, d) and k, v (B, a_kv, S, d) of this rank's tokens; return (B, a, S, d)."""
        tokens = q.shape[2]
        # Ranks hold an early and a late chunk of each sequence; attention needs the tokens in order.
        rank_order = torch.cat([positions(self.world * tokens, r, self.world, q.device) for r in range(self.world)])
        order = rank_order.argsort()
        out = self.core(*(self._all_tokens(t)[:, :, order] for t in (q, k, v)))
        parts = out[:, :, rank_order].unflatten(2, (self.world, tokens)).movedim(2, 0)
        mine: Tensor = _AllToAll.apply(parts, self.group)
        return mine.transpose(0, 1).flatten(1, 2)

    def _all_tokens(self, x: Tensor) -> Tensor:
        """Return (B, heads / W, W S, d) of (B, heads, S, d): this rank's heads for all tokens, in rank order."""
        parts = x.unflatten(1, (self.world, -1)).transpose(0, 1)
        everyone: Tensor = _AllToAll.apply(parts, self.group)
        return everyone.movedim(0, 2).flatten(2, 3)
