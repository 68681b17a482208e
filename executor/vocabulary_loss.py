"""The loss over a large vocabulary: cross-entropy in float32, of whole logits or of this rank's columns of them.

With 128,256 words logits are gigabytes, and in float32 several times over. Nothing of their size in float32 is ever in
memory: compiled, a few kernels read the logits in their own type; eagerly they are taken some tokens at a time, forward
and backward, and only the logits themselves are kept for the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

# Numbers of a piece, 256 MiB in float32: with 128,256 words 523 tokens, one block each, which fill a GPU's processors about
# twice; fewer would leave some idle.
PIECE = 1 << 26


class VocabularyLoss(nn.Module):
    """Takes logits (B, S, V), or this rank's columns of them, and targets (B, S); returns the sum over the tokens here.

    `mesh` cuts the vocabulary of `vocab` words as `torch.chunk` does. `tokens_first`: logits are (S, B, V).
    """

    def __init__(self, vocab: int, mesh: DeviceMesh | None, *, compiled: bool, tokens_first: bool = False) -> None:
        super().__init__()
        self.compiled, self.tokens_first = compiled, tokens_first
        self.cut = mesh is not None and mesh.size() > 1
        self.whole, self.top, self.sums, self.slope = (_Part(f) for f in (_whole, _top, _sums, _slope))
        self.first, self.group = 0, None
        if mesh is not None and self.cut:
            self.first, self.group = -(-vocab // mesh.size()) * mesh.get_local_rank(), mesh.get_group()
        if compiled:
            for part in (self.top, self.sums, self.slope) if self.cut else (self.whole,):
                part.compile()

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        flat, wanted = logits.flatten(0, 1), (targets.t() if self.tokens_first else targets).flatten()
        if not self.compiled:
            return _EagerLoss.apply(flat, wanted, self.first, self.group)
        return _CutLoss.apply(flat, wanted, self) if self.cut else self.whole(flat, wanted)


# --- eager ------------------------------------------------------------------------------------------------------------


class _EagerLoss(torch.autograd.Function):
    """Softmax by pieces of the tokens. Where columns are cut, each rank's own sums are scaled to those of all columns."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup | None) -> Tensor:
        mine = (targets >= first) & (targets < first + logits.shape[-1])
        column = torch.where(mine, targets - first, 0)[:, None]
        chosen = _wide(logits.gather(-1, column))
        # The logarithm of the target's probability among these columns alone, token by token.
        here = torch.empty_like(chosen)
        for rows in _pieces(logits):
            torch.gather(_wide(logits[rows]).log_softmax(-1), -1, column[rows], out=here[rows])
        share = torch.ones_like(here)
        if group is not None:
            own = chosen - here  # log of the sum of exponentials
            whole, chosen = _together(own, torch.where(mine[:, None], chosen, 0), group)
            share, here = (own - whole).exp(), chosen - whole
        ctx.save_for_backward(logits, column, mine, here, share)
        return -here.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        logits, column, mine, here, share = ctx.saved_tensors
        scale, slope = share * grad, torch.empty_like(logits)
        for rows in _pieces(logits):
            torch.mul(_wide(logits[rows]).softmax(-1), scale[rows], out=slope[rows])
        # Less one at the target: from the loss itself, since the share of a rank can be too small to divide by.
        places = torch.arange(len(slope), device=slope.device), column[:, 0]
        at_target = ((here.exp() - 1) * grad).to(slope.dtype)[:, 0]
        slope[places] = torch.where(mine, at_target, slope[places])
        return slope, None, None, None


def _pieces(logits: Tensor) -> Iterator[slice]:
    """Yield the tokens in pieces of PIECE logits at most, and one token at least."""
    tokens, words = logits.shape
    rows = max(1, PIECE // words)
    return (slice(first, first + rows) for first in range(0, tokens, rows))


def _together(own: Tensor, chosen: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return log of the sum of exponentials over all columns, and the target's logit: from those of each rank's columns."""
    top = own.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    sums = torch.stack(((own - top).exp(), chosen))
    dist.all_reduce(sums, group=group)
    return sums[0].log() + top, sums[1]


# --- compiled ---------------------------------------------------------------------------------------------------------


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
