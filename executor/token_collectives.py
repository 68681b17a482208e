"""Four ways in which tokens travel in tensor parallelism, each the other's way back.

    gather    all ranks' tokens, joined along the first dimension      backward: scatter
    scatter   this rank's tokens of the sum over ranks                 backward: gather
    copy_in   the same tensor on every rank                            backward: sum
    sum_up    the sum over ranks                                       backward: the same tensor

torch's functional collectives, because the compiler knows them: what is traced is what runs eagerly.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.kept import kept

_FUNCTIONAL = torch.ops._c10d_functional  # noqa: SLF001 - their public face wraps every result in a class of its own


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return (W R, ..) of every rank's (R, ..)."""
    return _Gather.apply(x, dist.get_world_size(group), group.group_name)


def scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows (R, ..) of the sum of every rank's (W R, ..); kept where results of a block are."""
    return _Scatter.apply(x, dist.get_world_size(group), group.group_name)


def copy_in(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _CopyIn.apply(x, group.group_name)


def sum_up(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _SumUp.apply(x, group.group_name)


def _gathered(x: Tensor, ranks: int, name: str) -> Tensor:
    moving = _FUNCTIONAL.all_gather_into_tensor.default(x.contiguous(), ranks, name)
    return _FUNCTIONAL.wait_tensor.default(moving)


def _scattered(x: Tensor, ranks: int, name: str) -> Tensor:
    moving = _FUNCTIONAL.reduce_scatter_tensor.default(x.contiguous(), "sum", ranks, name)
    return _FUNCTIONAL.wait_tensor.default(moving)


def _summed(x: Tensor, name: str) -> Tensor:
    return _FUNCTIONAL.wait_tensor.default(_FUNCTIONAL.all_reduce.default(x.contiguous(), "sum", name))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, name: str) -> Tensor:
        ctx.ranks, ctx.name = ranks, name
        return _gathered(x, ranks, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _scattered(grad, ctx.ranks, ctx.name), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, name: str) -> Tensor:
        ctx.ranks, ctx.name = ranks, name
        return _scattered(x, ranks, name) if torch.compiler.is_compiling() else kept(lambda: _scattered(x, ranks, name))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _gathered(grad, ctx.ranks, ctx.name), None, None


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _summed(grad, ctx.name), None


class _SumUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:  # noqa: ARG004 - autograd's
        return _summed(x, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # noqa: ARG004 - as above
        return grad, None
