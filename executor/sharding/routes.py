"""Rows of tokens at the ranks of their experts: sent there, multiplied by their matrices, and sent back.

A plan is one tensor of numbers, made from the expert numbers of this rank's pairs. It has the lengths of its parts, the
order of the pairs by expert, the order of the received rows, the rows to send and to receive by rank, and the ends of
the groups of rows by this rank's experts. A number beyond the last expert belongs to no group: its row is sent to the
last rank, where its product is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch.nn import functional as F  # noqa: N812

from executor.model import moe
from executor.sharding.exchanges import Group
from executor.sharding.places import Context
from simulator.sharded.program import ROUTE, Kernel

_PARTS = 5


def run_route(
    kernel: Kernel, values: Mapping[str, torch.Tensor], groups: Mapping[tuple[str, ...], Group]
) -> torch.Tensor:
    """Return the result of a kernel that exchanges rows: a plan, rows at their experts, or rows back at their
    tokens.
    """
    axes = tuple(kernel.kwargs["axes"])
    group = groups[axes] if axes else None
    x = values[kernel.args[0]["tensor"]]
    if kernel.op == f"{ROUTE}plan":
        return _plan(x, kernel.args[1], group)
    order, came, sends, receives, _ = _read(values[kernel.args[1]["tensor"]])
    if kernel.op == f"{ROUTE}send":
        rows: torch.Tensor = _Exchanged.apply(x[order // kernel.args[2]], sends.tolist(), receives.tolist(), group)
        return rows[came]
    back: torch.Tensor = _Exchanged.apply(x[_inverse(came)], receives.tolist(), sends.tolist(), group)
    return back[_inverse(order)]


def _plan(ids: torch.Tensor, experts: int, group: Group | None) -> torch.Tensor:
    """Return the plan of pairs with these expert numbers, for `experts` experts in total."""
    ids = ids.long()
    ranks = 1 if group is None else group.size
    width = -(-experts // ranks)  # ranks have experts as torch.chunk splits them
    index = 0 if group is None else group.order.index(dist.get_rank(group.group))
    own = max(0, min(width, experts - index * width))
    order = ids.argsort(stable=True)
    sends = torch.bincount((ids // width).clamp(0, ranks - 1), minlength=ranks)
    receives = sends if group is None else _exchanged(sends, [1] * ranks, [1] * ranks, group)
    there = _exchanged(ids[order], sends.tolist(), receives.tolist(), group) - index * width
    came = there.argsort(stable=True)
    ends = torch.bincount(there.clamp(0, own), minlength=own + 1)[:own].cumsum(0)
    parts = (order, came, sends, receives, ends)
    return torch.cat([ids.new_tensor([len(one) for one in parts]), *parts])


def _read(plan: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(plan[_PARTS:], plan[:_PARTS].tolist())


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _exchanged(x: torch.Tensor, sends: list[int], receives: list[int], group: Group | None) -> torch.Tensor:
    """Return the rows that ranks send here, in the order of ranks along the mesh axes; its own rows if there is one
    rank.
    """
    if group is None:
        return x
    x, counts = x.contiguous(), [0] * group.size
    given = list(x.split(sends))
    placed = list(given)
    for index, position in enumerate(group.order):
        placed[position], counts[position] = given[index], receives[index]
    out = x.new_empty(sum(receives), *x.shape[1:])
    dist.all_to_all_single(out, torch.cat(placed), counts, [len(one) for one in placed], group=group.group)
    if group.in_order:
        return out
    arrived = out.split(counts)
    return torch.cat([arrived[position] for position in group.order])


class _Exchanged(torch.autograd.Function):
    """Rows sent to other ranks; their gradients return the same way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sends: list[int], receives: list[int], group: Group | None) -> torch.Tensor:
        ctx.way = receives, sends, group
        found = _exchanged(x, sends, receives, group)
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _exchanged(gradients[0], *ctx.way), None, None, None


def _product(context: Context, x: torch.Tensor, weights: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    """Every row times the matrix of its expert."""
    del context
    ends = _read(plan)[4].to(torch.int32)
    if not len(weights):
        return x @ weights.sum(0)  # zeros, with a path for the gradients of both
    count = int(ends[-1])
    multiply = moe.grouped if moe.can_group(x, weights) else moe.looped
    made = multiply(x[:count], weights.transpose(-2, -1), ends)
    return F.pad(made, [0, 0, 0, len(x) - count])


def _picked(context: Context, by_expert: torch.Tensor, plan: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """For every row, its expert's part of a tensor by expert."""
    del context
    ends = _read(plan)[4]
    counts = ends.diff(prepend=ends.new_zeros(1))
    made = by_expert.repeat_interleave(counts, 0)
    return torch.cat([made, made.new_zeros(len(rows) - len(made), *made.shape[1:])])


PLACED = {"routed.product": _product, "routed.picked": _picked}
