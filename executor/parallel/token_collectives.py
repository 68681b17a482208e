"""The four differentiable collectives of tensor parallelism.

    all_gather       all ranks' tokens, concatenated along the first dimension    backward: reduce-scatter
    reduce_scatter   this rank's tokens of the sum over ranks                     backward: all-gather
    copy_to_ranks    the same tensor on every rank                                backward: all-reduce
    all_reduce       the sum over ranks                                           backward: identity

They use torch's functional collectives, which the compiler can trace.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.model.saved_results import save_or_replay

_FUNCTIONAL = torch.ops._c10d_functional  # noqa: SLF001 - the public functions wrap every result in a tensor subclass


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return (W R, ..) of every rank's (R, ..)."""
    whole: Tensor = _AllGather.apply(x, dist.get_world_size(group), group.group_name)
    return whole


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows (R, ..) of the sum of every rank's (W R, ..); saved under selective recomputation."""
    share: Tensor = _ReduceScatter.apply(x, dist.get_world_size(group), group.group_name)
    return share


def copy_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    same: Tensor = _CopyToRanks.apply(x, group.group_name)
    return same


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total: Tensor = _AllReduce.apply(x, group.group_name)
    return total


def _gathered(x: Tensor, ranks: int, name: str) -> Tensor:
    moving = _FUNCTIONAL.all_gather_into_tensor.default(x.contiguous(), ranks, name)
    whole: Tensor = _FUNCTIONAL.wait_tensor.default(moving)
    return whole


def _scattered(x: Tensor, ranks: int, name: str) -> Tensor:
    moving = _FUNCTIONAL.reduce_scatter_tensor.default(x.contiguous(), "sum", ranks, name)
    share: Tensor = _FUNCTIONAL.wait_tensor.default(moving)
    return share


def _summed(x: Tensor, name: str) -> Tensor:
    total: Tensor = _FUNCTIONAL.wait_tensor.default(_FUNCTIONAL.all_reduce.default(x.contiguous(), "sum", name))
    return total


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, name: str) -> Tensor:
        ctx.ranks, ctx.name = ranks, name
        return _gathered(x, ranks, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grad, ctx.ranks, ctx.name), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, name: str) -> Tensor:
        ctx.ranks, ctx.name = ranks, name
        return (
            _scattered(x, ranks, name)
            if torch.compiler.is_compiling()
            else save_or_replay(lambda: _scattered(x, ranks, name))
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, ctx.ranks, ctx.name), None, None


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.name), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:  # noqa: ARG004 - autograd's
        return _summed(x, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 - as above
        return grad, None
