"""Cross-entropy over a large vocabulary, computed in float32, of whole logits or of this rank's columns of them.

With a vocabulary of 128,256 the logits take gigabytes, and several times that in float32. They are never materialised
in float32: compiled, a few kernels read them in their own type; eagerly they are processed some tokens at a time,
forward and backward, and only the logits themselves are saved for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

# Logits per piece, 256 MiB in float32: 523 tokens of 128,256 logits, one thread block each, about two per SM; smaller
# pieces would leave SMs idle.
PIECE_LOGITS = 1 << 26
# Logits per piece of a head in pieces, 256 MiB in 16 bits. Each piece reads the whole gradient of the head, and nothing
# hides that: 10 % of head and loss with a vocabulary of 128,256, and 5 % in pieces twice as long, which need half a GiB
# more (examples/validation/savers.md).
HEAD_LOGITS = 2 * PIECE_LOGITS


class VocabularyLoss(nn.Module):
    """Takes logits (B, S, V), or this rank's columns of them, and targets (B, S); returns the sum over the tokens here.

    `mesh` shards the vocabulary of size `vocab` as `torch.chunk` does. `tokens_first`: logits are (S, B, V).
    """

    def __init__(self, vocab: int, mesh: DeviceMesh | None, *, compiled: bool, tokens_first: bool = False) -> None:
        super().__init__()
        self.compiled, self.tokens_first = compiled, tokens_first
        self.sharded = mesh is not None and mesh.size() > 1
        self.full_loss, self.row_max, self.exp_sums, self.logits_grad = (
            _CompilablePart(f) for f in (_full_loss, _row_max, _exp_sums, _logits_grad)
        )
        self.first_column, self.group = 0, None
        if mesh is not None and self.sharded:
            self.first_column, self.group = -(-vocab // mesh.size()) * mesh.get_local_rank(), mesh.get_group()
        if compiled:
            for part in (self.row_max, self.exp_sums, self.logits_grad) if self.sharded else (self.full_loss,):
                part.compile()

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.of_rows(logits.flatten(0, 1), (targets.t() if self.tokens_first else targets).flatten())

    def of_rows(self, flat: Tensor, wanted: Tensor) -> Tensor:
        """Return the sum over tokens whose logits are rows of `flat`."""
        loss: Tensor
        if not self.compiled:
            loss = _EagerLoss.apply(flat, wanted, self.first_column, self.group)
        else:
            loss = _ShardedLoss.apply(flat, wanted, self) if self.sharded else self.full_loss(flat, wanted)
        return loss


class HeadInPieces(nn.Linear):
    """The head with its loss, for HEAD_LOGITS logits at a time, so that never more are in memory."""

    loss: VocabularyLoss

    @classmethod
    def of(cls, head: nn.Linear, loss: VocabularyLoss) -> HeadInPieces:
        """Return the head with its loss, which uses the parameters of `head`."""
        made = cls(head.in_features, head.out_features, bias=False, device="meta")
        made.weight, made.loss = head.weight, loss
        return made

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the sum of the loss of tokens (B, S, h), or without targets their logits."""
        if targets is None:
            return super().forward(x)
        total: Tensor = _HeadLoss.apply(x.flatten(0, 1), self.weight, targets.flatten(), self.loss)
        return total


class _HeadLoss(torch.autograd.Function):
    """Head and loss, one group of tokens at a time. Each group computes its gradients at once, so logits are neither
    saved nor recomputed. The products themselves accumulate the head's gradient in float32 (or wider).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, loss: VocabularyLoss) -> Tensor:
        device = x.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        head, rows = weight.to(kind), max(1, HEAD_LOGITS // len(weight))
        of_x, of_head = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x) if of_x else None
        grad_head = torch.zeros_like(weight, dtype=torch.promote_types(kind, torch.float32)) if of_head else None
        total = torch.zeros((), dtype=torch.promote_types(kind, torch.float32), device=x.device)
        with torch.autocast(device, enabled=False):
            for first in range(0, len(x), rows):
                here = slice(first, first + rows)
                some = x[here].to(kind)
                part, slope = _loss_and_slope(some @ head.t(), targets[here], loss, slope=of_x or of_head)
                total += part
                if grad_x is not None:
                    grad_x[here] = slope @ head
                if grad_head is not None:
                    _add_product(grad_head, slope.t(), some)
                del slope  # freed before the next logits are allocated
        ctx.save_for_backward(grad_x, grad_head)
        ctx.kind = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_x, grad_head = ctx.saved_tensors
        if grad_x is not None:
            grad_x = grad_x * grad.to(grad_x.dtype)
        return grad_x, None if grad_head is None else grad_head.mul_(grad).to(ctx.kind), None, None


def _loss_and_slope(logits: Tensor, targets: Tensor, loss: VocabularyLoss, *, slope: bool) -> tuple[Tensor, Any]:
    """Return the sum of the loss, and its gradient with respect to the logits (None without `slope`)."""
    with torch.enable_grad():
        total = loss.of_rows(logits.requires_grad_(slope), targets)
    return total.detach(), torch.autograd.grad(total, logits)[0] if slope else None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b, in the type of `total`."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


# --- eager ------------------------------------------------------------------------------------------------------------


class _EagerLoss(torch.autograd.Function):
    """Cross-entropy, computed in groups of tokens. With sharded columns, each rank's softmax is rescaled to all
    columns.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first_column: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        mine = (targets >= first_column) & (targets < first_column + logits.shape[-1])
        column = torch.where(mine, targets - first_column, 0)[:, None]
        chosen = _wide(logits.gather(-1, column))
        # Log-probability of the target among the local columns, token by token.
        here = torch.empty_like(chosen)
        for rows in _pieces(logits):
            torch.gather(_wide(logits[rows]).log_softmax(-1), -1, column[rows], out=here[rows])
        share = torch.ones_like(here)
        if group is not None:
            own = chosen - here  # log of the sum of exponentials
            whole, chosen = _combine_ranks(own, torch.where(mine[:, None], chosen, 0), group)
            share, here = (own - whole).exp(), chosen - whole
        ctx.save_for_backward(logits, column, mine, here, share)
        return -here.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, column, mine, here, share = ctx.saved_tensors
        scale, grad_logits = share * grad, torch.empty_like(logits)
        for rows in _pieces(logits):
            torch.mul(_wide(logits[rows]).softmax(-1), scale[rows], out=grad_logits[rows])
        # Minus one at the target, computed from the loss: a rank's share of the softmax can underflow.
        places = torch.arange(len(grad_logits), device=grad_logits.device), column[:, 0]
        at_target = ((here.exp() - 1) * grad).to(grad_logits.dtype)[:, 0]
        grad_logits[places] = torch.where(mine, at_target, grad_logits[places])
        return grad_logits, None, None, None


def _pieces(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the tokens with at most PIECE_LOGITS logits each, and at least one token."""
    tokens, words = logits.shape
    rows = max(1, PIECE_LOGITS // words)
    return (slice(first, first + rows) for first in range(0, tokens, rows))


def _combine_ranks(own: Tensor, chosen: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp over all columns and the target's logit, from those over each rank's columns."""
    row_max = own.clone()
    dist.all_reduce(row_max, dist.ReduceOp.MAX, group=group)
    sums = torch.stack(((own - row_max).exp(), chosen))
    dist.all_reduce(sums, group=group)
    return sums[0].log() + row_max, sums[1]


# --- compiled ---------------------------------------------------------------------------------------------------------


class _CompilablePart(nn.Module):
    """A function that is compiled separately, since collectives run between these functions."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *arguments: Tensor) -> Any:
        return self.call(*arguments)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _full_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(_wide(logits), targets, reduction="sum")


def _row_max(logits: Tensor) -> Tensor:
    return _wide(logits).amax(-1)


def _exp_sums(logits: Tensor, row_max: Tensor, column: Tensor, mine: Tensor) -> Tensor:
    """Return, per token, the sum of exponentials over the local columns, and the target's exponent if it is local."""
    wide = _wide(logits)
    chosen = torch.where(mine, wide.gather(-1, column[:, None])[:, 0] - row_max, 0)
    return torch.stack(((wide - row_max[:, None]).exp().sum(-1), chosen))


def _logits_grad(logits: Tensor, row_max: Tensor, total: Tensor, column: Tensor, mine: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the local logits: softmax, minus one at the target."""
    weights = (_wide(logits) - row_max[:, None]).exp() / total[:, None]
    here = (torch.arange(logits.shape[-1], device=logits.device) == column[:, None]) & mine[:, None]
    return (torch.where(here, weights - 1, weights) * grad).to(logits.dtype)


class _ShardedLoss(torch.autograd.Function):
    """Cross-entropy of sharded logits: three numbers per token are all-reduced instead of V logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, loss: VocabularyLoss) -> Tensor:
        row_max = loss.row_max(logits)
        dist.all_reduce(row_max, dist.ReduceOp.MAX, group=loss.group)
        mine = (targets >= loss.first_column) & (targets < loss.first_column + logits.shape[-1])
        column = torch.where(mine, targets - loss.first_column, 0)
        sums = loss.exp_sums(logits, row_max, column, mine)
        dist.all_reduce(sums, group=loss.group)
        ctx.save_for_backward(logits, row_max, sums[0], column, mine)
        ctx.logits_grad = loss.logits_grad
        total: Tensor = (sums[0].log() - sums[1]).sum()
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.logits_grad(*ctx.saved_tensors, grad), None, None
