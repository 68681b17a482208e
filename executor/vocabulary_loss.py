"""The loss over a large vocabulary: cross-entropy in float32, of whole logits or of this rank's columns of them.

Compiled, a few kernels read the logits in their own type and nothing of their size in float32 is ever in memory: with
128,256 words that is gigabytes, several times over. Eagerly the same functions run operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional


class VocabularyLoss(nn.Module):
    """Takes logits (B, S, V), or this rank's columns of them, and targets (B, S); returns the sum over the tokens here.

    `mesh` cuts the vocabulary of `vocab` words as `torch.chunk` does. `tokens_first`: logits are (S, B, V).
    """

    def __init__(self, vocab: int, mesh: DeviceMesh | None, *, compiled: bool, tokens_first: bool = False) -> None:
        super().__init__()
        self.tokens_first = tokens_first
        self.cut = mesh is not None and mesh.size() > 1
        self.whole, self.top, self.sums, self.slope = (_Part(f) for f in (_whole, _top, _sums, _slope))
        if mesh is not None and self.cut:
            self.first, self.group = -(-vocab // mesh.size()) * mesh.get_local_rank(), mesh.get_group()
        if compiled:
            for part in (self.top, self.sums, self.slope) if self.cut else (self.whole,):
                part.compile()

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        flat, wanted = logits.flatten(0, 1), (targets.t() if self.tokens_first else targets).flatten()
        if self.cut:
            return _CutLoss.apply(flat, wanted, self)
        return self.whole(flat, wanted)


class _Part(nn.Module):
    """One function, which can be compiled by itself: messages lie between them."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *arguments: Tensor) -> Any:
        return self.call(*arguments)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _whole(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(_wide(logits), targets, reduction="sum")


def _top(logits: Tensor) -> Tensor:
    return _wide(logits).amax(-1)


def _sums(logits: Tensor, top: Tensor, column: Tensor, mine: Tensor) -> Tensor:
    """Return, token by token, the columns' share of the softmax's sum, and the target's exponent where it is here."""
    wide = _wide(logits)
    chosen = torch.where(mine, wide.gather(-1, column[:, None])[:, 0] - top, 0)
    return torch.stack(((wide - top[:, None]).exp().sum(-1), chosen))


def _slope(logits: Tensor, top: Tensor, total: Tensor, column: Tensor, mine: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of these columns: softmax, less one at the target."""
    weights = (_wide(logits) - top[:, None]).exp() / total[:, None]
    here = (torch.arange(logits.shape[-1], device=logits.device) == column[:, None]) & mine[:, None]
    return (torch.where(here, weights - 1, weights) * grad).to(logits.dtype)


class _CutLoss(torch.autograd.Function):
    """Each rank has some columns of the logits: three numbers per token travel, not V of them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, loss: VocabularyLoss) -> Tensor:
        top = loss.top(logits)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=loss.group)
        mine = (targets >= loss.first) & (targets < loss.first + logits.shape[-1])
        column = torch.where(mine, targets - loss.first, 0)
        sums = loss.sums(logits, top, column, mine)
        dist.all_reduce(sums, group=loss.group)
        ctx.save_for_backward(logits, top, sums[0], column, mine)
        ctx.slope = loss.slope
        return (sums[0].log() - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.slope(*ctx.saved_tensors, grad), None, None
