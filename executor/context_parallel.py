"""Context parallelism: each rank holds a part of every sequence, and sees the others' keys and values.

Attention over all keys is put together from attention over parts, each with its log-sum-exp (arXiv 1805.02867; ring:
arXiv 2310.01889). A sequence is cut into 2 W chunks and rank r holds chunks r and 2W - 1 - r ("head and tail"), so
that under a causal mask every rank has the same work in every round (ring-flash-attention's zigzag):
    own keys          causal over both chunks
    keys of a rank before    all queries see its head chunk, none its tail
    keys of a rank behind    the tail queries see both its chunks, the head queries none

How keys and values travel is the plan's `cp_method`:
    ring         forward, W - 1 times to the next rank, beside the part at hand; backward the same again, and their
                 gradients W times, which brings them home
    all_gather   all at once, beside the rank's own part; gradients are reduce-scattered at the end

Grouped queries: each key head serves several query heads, and is moved and read once (the kernels know groups).
Parts are put together once, at the end, with weights from the log-sum-exp of all: rewriting the result after each part
costs as much memory traffic as the attention of two short parts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.kept import kept

NARROW = frozenset({torch.bfloat16, torch.float16})
LEAST_TOKENS = 128  # of a part that is given to cuDNN: in shorter ones there is nothing to gain

# --- who holds what ---------------------------------------------------------------------------------------------------


def positions(seq_len: int, rank: int, world: int, device: torch.device) -> Tensor:
    """Return the positions (S,) of the tokens that `rank` holds: its head chunk, then its tail chunk."""
    if world == 1:
        return torch.arange(seq_len, device=device)
    chunks = torch.arange(seq_len, device=device).chunk(2 * world)
    return torch.cat((chunks[rank], chunks[2 * world - 1 - rank]))


# --- attention over one part of the keys ------------------------------------------------------------------------------


def part_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention (B, a, Sq, d) over these keys alone, and its log-sum-exp (B, a, Sq) in float32 or wider."""
    if _narrow(q):
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this part's gradients of q, k and v; `out` and `lse` are those of attention over all keys."""
    if _narrow(q):
        if _cudnn_takes(q, k):
            return _cudnn_backward(grad, q, k, v, out, lse, causal)
        # The random state is for dropout, of which there is none.
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(  # noqa: SLF001 - as above
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none
        )
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


def _narrow(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in NARROW


def _cudnn_takes(q: Tensor, k: Tensor) -> bool:
    return min(q.shape[2], k.shape[2]) >= LEAST_TOKENS and _cudnn(q.device.index, q.shape[-1], q.dtype)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[:2]  # noqa: SLF001 - as above
    return out, lse.reshape(q.shape[:-1])  # cuDNN leaves a last dimension of one


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout's random state, and of no bias
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(  # noqa: SLF001 - as above
        grad, q, k, v, out, lse.unsqueeze(-1), none, none, None, None, None, q.shape[2], k.shape[2], 0.0, causal
    )


@cache
def _cudnn(device: int, width: int, dtype: torch.dtype) -> bool:
    """Return whether cuDNN's attention works here on parts of grouped keys.

    To be asked before the first step, outside of whatever watches operators: selective checkpointing keeps the results
    of attention in order, and would take the trial for one of the block's. On Hopper and later it is what `scaled_dot_product_attention` picks (TORCH_CUDNN_SDPA_PREFERRED=0 says otherwise, here
    too), and its kernels are the quicker ones; but which shapes it takes depends on its version. So a small part is
    tried, forward and backward; whether it computes rightly is checked with everything else (`executor.verify_kernels`).
    """
    if os.environ.get("TORCH_CUDNN_SDPA_PREFERRED") == "0" or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    q = torch.zeros((1, 4, 2 * LEAST_TOKENS, width), device=torch.device("cuda", device), dtype=dtype)
    k = torch.zeros((1, 2, LEAST_TOKENS, width), device=q.device, dtype=dtype)
    try:
        out, lse = _cudnn_forward(q, k, k, False)
        _cudnn_backward(q, q, k, k, out, lse, False)
    except (RuntimeError, TypeError):
        return False
    return True


def _scores(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


Part = tuple[slice, Tensor, Tensor]  # which queries, attention over some keys, its log-sum-exp


def combine(parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """Return attention over the keys of all parts, in float32 or wider, and its log-sum-exp.

    The first part is of all queries.
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
    """Neighbours of this rank in the group, and how keys come: by hops, or gathered at once."""

    def __init__(self, group: dist.ProcessGroup, method: str) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.gathers = method == "all_gather"
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

    def turns(self, keys: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank they are of, keys and values), one's own first; others travel while these are worked on."""
        if self.gathers:
            everyone = keys.new_empty((self.world, *keys.shape))
            # Flat: gloo joins tensors along the first dimension, and knows no stacks.
            work = dist.all_gather_into_tensor(everyone.view(-1), keys.view(-1), group=self.group, async_op=True)
            yield self.rank, keys
            work.wait()
            for turn in range(1, self.world):
                source = (self.rank - turn) % self.world
                yield source, everyone[source]
            return
        for turn in range(self.world):
            arriving, works = self.start(keys) if turn < self.world - 1 else (keys, [])
            yield (self.rank - turn) % self.world, keys
            _wait(works)
            keys = arriving

    def sees(self, source: int, half: int) -> tuple[slice, slice]:
        """Return which queries here see which keys of `source`."""
        whole = slice(None)
        if source == self.rank:
            return whole, whole
        return (whole, slice(0, half)) if source < self.rank else (slice(half, None), whole)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _attended(q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> tuple[Tensor, Tensor]:
    """Return attention to all keys, and its log-sum-exp."""
    half = q.shape[2] // 2
    parts: list[Part] = []
    for source, keys in ring.turns(torch.stack((k, v))):
        queries, seen = ring.sees(source, half)
        found = part_forward(q[:, :, queries], keys[0][:, :, seen], keys[1][:, :, seen], causal=source == ring.rank)
        parts.append((queries, *found))
    out, lse = combine(parts)
    # The kernels take the result of its forward pass, in its own type; plain arithmetic the exact one.
    return (out.to(q.dtype) if _narrow(q) else out), lse


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        out, lse = kept(lambda: _attended(q, k, v, ring))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        half, wide = q.shape[2] // 2, lse.dtype
        keys = torch.stack((k, v))
        dq = torch.zeros_like(q, dtype=wide)
        # Gathered keys leave their gradients in a row for each rank; those of a ring travel with them.
        rows = ring.world if ring.gathers else 1
        d_keys = torch.zeros((rows, *keys.shape), dtype=wide, device=keys.device)
        coming: list[Any] = []
        for source, held in ring.turns(keys):
            queries, seen = ring.sees(source, half)
            parts = part_backward(
                grad[:, :, queries],  # tokens before heads in memory, as the kernel wants it: not to be copied
                q[:, :, queries],
                held[0][:, :, seen],
                held[1][:, :, seen],
                out[:, :, queries],
                lse[:, :, queries].contiguous(),
                causal=source == ring.rank,
            )
            dq[:, :, queries].add_(parts[0])
            _wait(coming)  # the gradients of these keys, from the rank that had them before us
            mine = d_keys[source if ring.gathers else 0]
            mine[0][:, :, seen].add_(parts[1])
            mine[1][:, :, seen].add_(parts[2])
            if not ring.gathers:
                d_keys, coming = ring.start(d_keys)
        _wait(coming)
        home = d_keys[0]
        if ring.gathers:
            home = torch.empty_like(keys, dtype=wide)
            dist.reduce_scatter_tensor(home.view(-1), d_keys.view(-1), group=ring.group)
        return dq.to(q.dtype), home[0].to(k.dtype), home[1].to(v.dtype), None


class RingAttention(nn.Module):
    """Takes the place of `CausalAttention` where a sequence is spread over `group`, head and tail.

    `method` is `ring` or `all_gather`; `width` that of a head, and `dtype` the type of queries on `device`.
    """

    def __init__(
        self, group: dist.ProcessGroup, method: str, *, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        if device.type == "cuda" and dtype in NARROW:
            _cudnn(torch.device(device).index or 0, width, dtype)
        self.method = method
        self.ring = _Ring(group, method)

    # There is nothing to fuse in it, and the compiler's graphs around it must not reach into its messages.
    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _RingAttention.apply(q, k, v, self.ring)
