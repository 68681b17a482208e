"""cuBLAS on whole shards, copy engines between: every product is as fast as the library's, and only the first is early.

The own shard needs no transfer and is computed while the next ones arrive. Without CUDA this is the reference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from executor.overlap import push
from executor.overlap.mode import Pair, products, shard_rows
from executor.overlap.nccl import Nccl


class CopyEngine(Nccl):
    name = "copy_engine"

    def gather_matmul(
        self, x: Tensor, operands: tuple[Tensor, ...], group: dist.ProcessGroup, *, keep: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        if not x.is_cuda:
            return super().gather_matmul(x, operands, group, keep=keep)
        rank, world, rows = dist.get_rank(group), dist.get_world_size(group), x.shape[0]
        outs = [x.new_empty(world, rows, operand.shape[1]) for operand in operands]
        # Two ranks exchange one shard only; in halves, the second moves beside the product of the first.
        large = world == 2 and x.numel() * x.element_size() >= push.LARGE_BYTES
        moving = push.Gathering(x, group, pieces=2 if large else 1, keep=keep)
        for out, operand in zip(outs, operands, strict=True):
            torch.mm(moving.x, operand, out=out[rank])
        for step in range(1, world):
            source = (rank + step) % world
            shard = moving.gathered[source * rows : (source + 1) * rows]
            for number, (first, last) in enumerate(moving.bounds):
                moving.wait(source, number, 1)
                for out, operand in zip(outs, operands, strict=True):
                    torch.mm(shard[first:last], operand, out=out[source, first:last])
        moving.finish()
        return tuple(out.flatten(0, 1) for out in outs), moving.gathered if keep else None

    def matmul_scatter(self, pairs: tuple[Pair, ...], group: dist.ProcessGroup) -> Tensor:
        if not pairs[0][0].is_cuda:
            return super().matmul_scatter(pairs, group)
        x, operand = pairs[0]
        rows = shard_rows(x.shape[0], group)

        def make(shard: int, out: Tensor) -> None:
            products(pairs, shard * rows, (shard + 1) * rows, out)

        return push.scatter_sum(make, (rows, operand.shape[1]), x.dtype, group)

    def matmul_reduce(self, x: Tensor, operand: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Reduce-scatter beside the product, then all-gather; the second half is exposed."""
        if not x.is_cuda or x.shape[0] % dist.get_world_size(group):
            return super().matmul_reduce(x, operand, group)
        return self.start_gather(self.matmul_scatter(((x, operand),), group), group)().clone()

    def start_gather(self, x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        return push.gather(x, group) if x.is_cuda else super().start_gather(x, group)
