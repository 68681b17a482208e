"""Context parallelism: each rank holds a part of every sequence, and keys and values go round a ring.

Attention over all keys is put together from attention over parts, each with its log-sum-exp (arXiv 1805.02867; ring:
arXiv 2310.01889). A sequence is cut into 2 W chunks and rank r holds chunks r and 2W - 1 - r ("head and tail"), so
that under a causal mask every rank has the same work in every round (ring-flash-attention's zigzag):
    own keys          causal over both chunks
    keys of a rank before    all queries see its head chunk, none its tail
    keys of a rank behind    the tail queries see both its chunks, the head queries none

What moves: forward, keys and values W - 1 times to the next rank, while the part at hand is computed; backward, the
same again, and their gradients W times, which brings them home.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# --- who holds what ---------------------------------------------------------------------------------------------------


def positions(seq_len: int, rank: int, world: int, device: torch.device) -> Tensor:
    """Return the positions (S,) of the tokens that `rank` holds: its head chunk, then its tail chunk."""
    if world == 1:
        return torch.arange(seq_len, device=device)
    chunks = torch.arange(seq_len, device=device).chunk(2 * world)
    return torch.cat((chunks[rank], chunks[2 * world - 1 - rank]))


# --- attention over one part of the keys ------------------------------------------------------------------------------


def part_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention (B, a, Sq, d) over these keys alone, in float32 or wider, and its log-sum-exp (B, a, Sq)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if _flash(q):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]  # noqa: SLF001 - the only operator that returns the log-sum-exp
        return out.float(), lse
    scores = _scores(q, k, causal=causal)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v.to(scores.dtype), lse


def part_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this part's gradients of q, k and v; `out` and `lse` are those of attention over all keys."""
    groups = q.shape[1] // k.shape[1]
    k_wide, v_wide = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if _flash(q):
        # The random state is for dropout, of which there is none.
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(  # noqa: SLF001 - as above
            grad, q, k_wide, v_wide, out.to(q.dtype), lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none
        )
    else:
        scores = _scores(q, k_wide, causal=causal)
        weights = (scores - lse[..., None]).exp()
        wide = scores.dtype
        grad_wide, scale = grad.to(wide), q.shape[-1] ** -0.5
        dv = weights.transpose(-2, -1) @ grad_wide
        inner = grad_wide @ v_wide.to(wide).transpose(-2, -1) - (grad_wide * out).sum(-1, keepdim=True)
        d_scores = weights * inner * scale
        dq = d_scores @ k_wide.to(wide)
        dk = d_scores.transpose(-2, -1) @ q.to(wide)
    # Query heads that share a key head share its gradient.
    dk, dv = (t.unflatten(1, (-1, groups)).sum(2) for t in (dk, dv))
    return dq, dk, dv


def _flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in {torch.bfloat16, torch.float16}


def _scores(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over the keys of both, given attention over each."""
    both = torch.logaddexp(lse, part_lse)
    return out * (lse - both).exp()[..., None] + part * (part_lse - both).exp()[..., None], both


# --- the ring ---------------------------------------------------------------------------------------------------------


class _Ring:
    """Neighbours of this rank in the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.next = dist.get_global_rank(group, (self.rank + 1) % self.world)
        self.before = dist.get_global_rank(group, (self.rank - 1) % self.world)

    def start(self, sent: Tensor) -> tuple[Tensor, list[Any]]:
        """Begin to pass a tensor on; return where the one from before arrives, and what to wait for."""
        arriving = torch.empty_like(sent)
        operations = [
            dist.P2POp(dist.isend, sent, self.next, self.group),
            dist.P2POp(dist.irecv, arriving, self.before, self.group),
        ]
        return arriving, dist.batch_isend_irecv(operations)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _halves(source: int, rank: int, half: int) -> tuple[slice, slice]:
    """Return which queries here see which keys of `source` (not this rank)."""
    whole = slice(None)
    return (whole, slice(0, half)) if source < rank else (slice(half, None), whole)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        half = q.shape[2] // 2
        keys = torch.stack((k, v))
        out = lse = torch.empty(0)
        for turn in range(ring.world):
            arriving, works = ring.start(keys) if turn < ring.world - 1 else (keys, [])
            source = (ring.rank - turn) % ring.world
            if turn == 0:
                out, lse = part_forward(q, keys[0], keys[1], causal=True)
            else:
                queries, seen = _halves(source, ring.rank, half)
                part, part_lse = part_forward(q[:, :, queries], keys[0][:, :, seen], keys[1][:, :, seen], causal=False)
                merged = merge(out[:, :, queries], lse[:, :, queries], part, part_lse)
                out[:, :, queries], lse[:, :, queries] = merged
            _wait(works)
            keys = arriving
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        half, wide = q.shape[2] // 2, out.dtype
        keys = torch.stack((k, v))
        dq = torch.zeros_like(q, dtype=wide)
        d_keys = torch.zeros_like(keys, dtype=wide)
        coming: list[Any] = []
        for turn in range(ring.world):
            arriving, works = ring.start(keys) if turn < ring.world - 1 else (keys, [])
            source = (ring.rank - turn) % ring.world
            queries, seen = (slice(None),) * 2 if turn == 0 else _halves(source, ring.rank, half)
            parts = part_backward(
                grad[:, :, queries].contiguous(),
                q[:, :, queries],
                keys[0][:, :, seen],
                keys[1][:, :, seen],
                out[:, :, queries],
                lse[:, :, queries].contiguous(),
                causal=turn == 0,
            )
            dq[:, :, queries] += parts[0]
            _wait(coming)  # the gradients of these keys, from the rank that had them before us
            d_keys[0][:, :, seen] += parts[1]
            d_keys[1][:, :, seen] += parts[2]
            _wait(works)
            keys = arriving
            d_keys, coming = ring.start(d_keys)
        _wait(coming)
        return dq.to(q.dtype), d_keys[0].to(k.dtype), d_keys[1].to(v.dtype), None


class RingAttention(nn.Module):
    """Takes the place of `CausalAttention` where a sequence is spread over `group`, head and tail."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.ring = _Ring(group)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _RingAttention.apply(q, k, v, self.ring)
