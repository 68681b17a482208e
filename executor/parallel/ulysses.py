"""Context parallelism by heads (DeepSpeed-Ulysses, arXiv 2309.14509): each rank attends with some heads to all tokens.

Communication: an all-to-all of queries, keys and values from token shards to head shards before attention, one of the
results back after it, and their mirror images in backward. The key heads must divide evenly over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.parallel.context_parallel import positions


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
