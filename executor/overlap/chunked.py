"""NCCL collectives on pieces of every shard: while one piece is communicated, the matmul of another runs."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from executor.overlap.mode import Pair, shard_rows
from executor.overlap.nccl import Nccl
from simulator.overlap.modes import SLICES


def bounds(rows: int, pieces: int) -> list[tuple[int, int]]:
    """Return (first, last) of at most `pieces` pieces of nearly equal length."""
    marks = [rows * number // pieces for number in range(pieces + 1)]
    return [(first, last) for first, last in pairwise(marks) if first < last]


class Chunked(Nccl):
    name = "chunked"

    def gather_matmul(
        self, x: Tensor, operands: tuple[Tensor, ...], group: dist.ProcessGroup, *, keep: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        world, (rows, depth) = dist.get_world_size(group), x.shape
        x = x.contiguous()
        moving = []
        for first, last in bounds(rows, SLICES):
            piece = x.new_empty(world, last - first, depth)
            work = dist.all_gather_into_tensor(piece.flatten(0, 1), x[first:last], group=group, async_op=True)
            moving.append((first, last, piece, work))
        outs = [x.new_empty(world, rows, operand.shape[1]) for operand in operands]
        gathered = x.new_empty(world, rows, depth) if keep else None
        for first, last, piece, work in moving:
            work.wait()
            for out, operand in zip(outs, operands, strict=True):
                torch.bmm(piece, operand.expand(world, -1, -1), out=out[:, first:last])
            if gathered is not None:
                gathered[:, first:last] = piece
        return tuple(out.flatten(0, 1) for out in outs), None if gathered is None else gathered.flatten(0, 1)

    def matmul_scatter(self, pairs: tuple[Pair, ...], group: dist.ProcessGroup) -> Tensor:
        world = dist.get_world_size(group)
        rows = shard_rows(pairs[0][0].shape[0], group)
        out = pairs[0][0].new_empty(rows, pairs[0][1].shape[1])
        moving = []
        for first, last in bounds(rows, SLICES):
            products = (
                (x.unflatten(0, (world, rows))[:, first:last], operand.expand(world, -1, -1)) for x, operand in pairs
            )
            partial = torch.bmm(*next(products))
            for piece, wide in products:
                partial.baddbmm_(piece, wide)
            work = dist.reduce_scatter_tensor(out[first:last], partial.flatten(0, 1), group=group, async_op=True)
            moving.append((work, partial))
        for work, _ in moving:
            work.wait()
        return out

    def matmul_reduce(self, x: Tensor, operand: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.new_empty(x.shape[0], operand.shape[1])
        works = []
        for first, last in bounds(x.shape[0], SLICES):
            torch.mm(x[first:last], operand, out=total[first:last])
            works.append(dist.all_reduce(total[first:last], group=group, async_op=True))
        for work in works:
            work.wait()
        return total
