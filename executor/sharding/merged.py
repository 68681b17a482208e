"""Operators whose ranks exchange statistics: a rank's statistics of its piece, and its result from the reduced ones.

Statistics are float32, or float64 where the operands are. A maximum is only subtracted before exponentials, so no
gradient passes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from executor.sharding.places import Context


def _exact(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _row_max(x: torch.Tensor, dim: int) -> torch.Tensor:
    return _exact(x).amax(dim, keepdim=True)


def _row_exp_sum(x: torch.Tensor, top: torch.Tensor, dim: int) -> torch.Tensor:
    return (_exact(x) - top).exp().sum(dim, keepdim=True)


def _softmax(x: torch.Tensor, top: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return ((_exact(x) - top).exp() / total).to(x.dtype)


def _log_softmax(x: torch.Tensor, top: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return (_exact(x) - top - total.log()).to(x.dtype)


def _row_squares(x: torch.Tensor) -> torch.Tensor:
    return _exact(x).square().sum(-1, keepdim=True)


def _row_sum(x: torch.Tensor) -> torch.Tensor:
    return _exact(x).sum(-1, keepdim=True)


def _rmsnorm(tensors: list[torch.Tensor], squares: torch.Tensor, size: int, eps: float | None) -> torch.Tensor:
    x, *weight = tensors
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y = _exact(x) * torch.rsqrt(squares / size + eps)
    return (y * weight[0] if weight else y).to(x.dtype)


def _layernorm(
    tensors: list[torch.Tensor],
    sums: torch.Tensor,
    squares: torch.Tensor,
    size: int,
    eps: float,
) -> torch.Tensor:
    x, *affine = tensors
    mean = sums / size
    y = (_exact(x) - mean) * torch.rsqrt(squares / size - mean.square() + eps)
    if affine:
        y = y * affine[0]
    return (y + affine[1] if len(affine) > 1 else y).to(x.dtype)


def _scores(context: Context, tensors: list[torch.Tensor], causal: bool, scale: float | None) -> torch.Tensor:
    """Scores of this rank's queries and keys, minus infinity for masked pairs."""
    q, k, _, *mask = tensors
    if q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = _exact(q) @ _exact(k).transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        # the piece of keys is the second distinct buffer that is read
        buffers = list(context.reads.values())
        q_at = context.place.indices(buffers[0], len(buffers[0].shape) - 2)
        k_at = context.place.indices(buffers[1], len(buffers[1].shape) - 2)
        scores = scores.masked_fill((q_at[:, None] < k_at[None, :]).to(q.device), -torch.inf)
    if mask:
        scores = scores.masked_fill(~mask[0], -torch.inf) if mask[0].dtype == torch.bool else scores + mask[0]
    return scores


def _attention_max(context: Context, tensors: Any, causal: bool, scale: float | None) -> torch.Tensor:
    # the maximum must be defined on a rank none of whose keys a query sees
    return _scores(context, tensors, causal, scale).amax(-1, keepdim=True).clamp_min(-1e30)


def _attention_sum(
    context: Context, tensors: Any, causal: bool, scale: float | None, top: torch.Tensor
) -> torch.Tensor:
    return (_scores(context, tensors, causal, scale) - top).exp().sum(-1, keepdim=True)


def _attention_values(
    context: Context, tensors: Any, causal: bool, scale: float | None, top: torch.Tensor
) -> torch.Tensor:
    weights = (_scores(context, tensors, causal, scale) - top).exp()
    v = _exact(tensors[2])
    return weights @ (
        v if v.shape[-3] == weights.shape[-3] else v.repeat_interleave(weights.shape[-3] // v.shape[-3], -3)
    )


def _attention_finish(context: Context, values: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return (values / total).to(context.dtype)


def _target_logit(context: Context, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The logit of each row's target if this rank has it, else 0."""
    buffer = next(b for b in context.reads.values() if context.place.shape(b) == tuple(logits.shape))
    here = context.place.indices(buffer, 1).to(logits.device)
    where = torch.full((buffer.shape[1],), -1, dtype=torch.long, device=logits.device)
    where[here] = torch.arange(len(here), device=logits.device)
    mine = where[targets.clamp_min(0)]
    found = _exact(logits).gather(1, mine.clamp_min(0).unsqueeze(1))
    return found * (mine >= 0).unsqueeze(1)


def _cross_entropy(
    top: torch.Tensor,
    total: torch.Tensor,
    hit: torch.Tensor,
    targets: torch.Tensor,
    ignored: int,
) -> torch.Tensor:
    rows = (total.log() + top - hit).squeeze(1)
    return torch.where(targets == ignored, 0.0, rows)


# Kernels that need values only, and kernels that need the rank's place.
PLAIN: dict[str, Callable[..., torch.Tensor]] = {
    "row_max": _row_max,
    "row_exp_sum": _row_exp_sum,
    "row_squares": _row_squares,
    "row_sum": _row_sum,
    "softmax.finish": _softmax,
    "log_softmax.finish": _log_softmax,
    "rmsnorm.finish": _rmsnorm,
    "layernorm.finish": _layernorm,
    "cross_entropy.finish": _cross_entropy,
}
PLACED: dict[str, Callable[..., torch.Tensor]] = {
    "attention.max": _attention_max,
    "attention.sum": _attention_sum,
    "attention.values": _attention_values,
    "attention.finish": _attention_finish,
    "target_logit": _target_logit,
}
