"""Permutation of rows with an efficient backward pass, for routing tokens to experts and back.

Autograd's backward of `x[index]` is an index-add into zeros, since it cannot know that no row is used twice; in half
precision that costs more than grouped expert matmuls save. The backward of a permutation is the inverse permutation;
where each row was copied k times, the gradients of its copies are adjacent and are summed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def inverse_of(order: Tensor) -> Tensor:
    """Return the permutation that undoes `order` (N,)."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def take(x: Tensor, order: Tensor, inverse: Tensor, *, copies: int = 1) -> Tensor:
    """Return rows of x (N / copies, h) in `order` (N,) of their copies; copy j of row i is number i * copies + j."""
    rows: Tensor = _Take.apply(x, order, inverse, copies)
    return rows


def weighted_sum(weights: Tensor, copies: Tensor) -> Tensor:
    """Return for each row (T, h) the sum of its copies (T, k, h) times weights (T, k)."""
    total: Tensor = _WeightedSum.apply(weights, copies)
    return total


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order if copies == 1 else order // copies]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        back = grad[inverse]
        if ctx.copies > 1:
            back = back.unflatten(0, (-1, ctx.copies)).sum(1)
        return back, None, None, None


class _WeightedSum(torch.autograd.Function):
    """A batched matmul of (1, k) and (k, h) for each row: no weighted copies are materialised.

    Its own backward would be outer products of depth one, for which cuBLAS has a kernel that takes 76 ps a token and
    column of h (H100 and H200, examples/validation/fresh.jsonl): twenty times what writing the result takes.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, copies: Tensor) -> Tensor:
        ctx.save_for_backward(weights, copies)
        return torch.bmm(weights[:, None], copies).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        weights, copies = ctx.saved_tensors
        return torch.bmm(copies, grad[..., None]).squeeze(-1), weights[..., None] * grad[:, None]
