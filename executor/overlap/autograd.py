"""Autograd functions of the overlapped matmuls: the backward pass runs the mirrored collective in the same mode."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.overlap.mode import Mode


class AllGatherMatmul(torch.autograd.Function):
    """Y_i = gather(x) @ w_i^T. Only the shard of x is saved: backward gathers it again, overlapped with dx."""

    @staticmethod
    def forward(ctx: Any, mode: Mode, group: dist.ProcessGroup, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.mode, ctx.group = mode, group
        ctx.save_for_backward(x, *weights)
        return mode.gather_matmul(x, tuple(weight.t() for weight in weights), group)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        grads = tuple(grad.contiguous() for grad in grads)
        needs_x, *needs_w = ctx.needs_input_grad[2:]
        gathered = ctx.mode.start_gather(x, ctx.group) if any(needs_w) else None
        dx = ctx.mode.matmul_scatter(tuple(zip(grads, weights, strict=True)), ctx.group) if needs_x else None
        if gathered is None:
            return None, None, dx, *(None for _ in weights)
        whole = gathered()
        dws = (grad.t() @ whole if needed else None for grad, needed in zip(grads, needs_w, strict=True))
        return None, None, dx, *dws


class MatmulReduceScatter(torch.autograd.Function):
    """y = this rank's rows of the sum over ranks of x @ w^T; backward gathers dy once for both gradients."""

    @staticmethod
    def forward(ctx: Any, mode: Mode, group: dist.ProcessGroup, x: Tensor, weight: Tensor) -> Tensor:
        ctx.mode, ctx.group = mode, group
        ctx.save_for_backward(x, weight)
        return mode.matmul_scatter(((x, weight.t()),), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        needs_x, needs_w = ctx.needs_input_grad[2:]
        if not needs_x:
            return None, None, None, ctx.mode.start_gather(grad, ctx.group)().t() @ x if needs_w else None
        (dx,), whole = ctx.mode.gather_matmul(grad, (weight,), ctx.group, keep=needs_w)
        return None, None, dx, whole.t() @ x if needs_w else None


class MatmulAllReduce(torch.autograd.Function):
    """y = sum over ranks of x @ w^T, the same on all; every rank has the whole dy, so backward communicates nothing."""

    @staticmethod
    def forward(ctx: Any, mode: Mode, group: dist.ProcessGroup, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return mode.matmul_reduce(x, weight.t(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_w = ctx.needs_input_grad[2:]
        return None, None, grad @ weight if needs_x else None, grad.t() @ x if needs_w else None
