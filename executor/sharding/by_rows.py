"""Kernels that compute rows of the last dims one by one, in the order of the rows in memory.

torch copies rows whose order in memory differs from that of the dims before it multiplies or normalizes them; here they
are computed in memory order, and the results have the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

OF_ROWS = frozenset(("aten.linear.default", "aten.matmul.default"))


def by_rows(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that passes the rows of its first operand in memory order where torch would copy them first;
    with other operands of rows it changes nothing.
    """

    def of_rows(x: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        with_a_matrix = not others or not isinstance(others[0], torch.Tensor) or others[0].ndim <= 2
        order = _order_of_rows(x, 1) if with_a_matrix else []
        if not order:
            return function(x, *others, **more)
        return function(x.permute(order), *others, **more).permute(_inverse(order))

    return of_rows


def _order_of_rows(x: torch.Tensor, over: int) -> list[int]:
    """Return the dims in memory order, with the last `over` dims innermost; empty if that is their order already, or if
    those dims are not innermost.
    """
    if x.ndim < 3 or x.is_contiguous():
        return []
    strides = x.stride()
    outer = sorted(range(x.ndim - over), key=lambda dim: -strides[dim])
    order = [*outer, *range(x.ndim - over, x.ndim)]
    return order if x.permute(order).is_contiguous() else []


def _inverse(order: list[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]


def norm(how: str) -> Callable[..., torch.Tensor]:
    def norm(tensors: list[torch.Tensor], over: int, eps: float | None) -> torch.Tensor:
        x, *affine = tensors
        shape = list(x.shape[x.ndim - over :])
        weight, bias = weight_and_bias(affine)
        order = _order_of_rows(x, over)
        x = x.permute(order) if order else x
        if how != "layernorm":
            made = F.rms_norm(x, shape, weight, eps=eps)
        else:
            made = F.layer_norm(x, shape, weight, bias, 1e-5 if eps is None else eps)
        return made.permute(_inverse(order)) if order else made

    return norm


def softmax_of(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def of_rows(x: torch.Tensor, dim: int, *more: Any) -> torch.Tensor:
        return (by_rows(function) if dim % x.ndim == x.ndim - 1 else function)(x, dim, *more)

    return of_rows


def weight_and_bias(affine: list[torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    padded = [*affine, None, None]
    return padded[0], padded[1]
