"""cuBLAS matmuls on whole shards, with copies between ranks by copy engines, which take no SMs from the matmuls.

The local shard is computed while the next ones arrive. Without CUDA this is the reference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from executor.gpu.device import processors
from executor.overlap import push
from executor.overlap.mode import Pair, products, shard_rows
from executor.overlap.nccl import Nccl
from executor.overlap.relay import relay_sum
from simulator.overlap.modes import LARGE_BYTES, relayed

# Multiply-adds from which two ranks relay in four pieces, each a whole number of waves of tiles, with products
# alternating between two streams: 837 and 868 instead of 866 and 889 us at 8192 x 8192 x 4096. At half the depth it
# took 445 and 451 instead of 452 and 467 us while the host kept up, and 558 instead of 454 us when it did not: eight
# products and their signals cost the host 260 to 550 us.
FOUR_PIECES_PRODUCT = 2**38
TILE = (128, 256)  # rows and columns of a tile of the library's products


class CopyEngine(Nccl):
    name = "copy_engine"

    def gather_matmul(
        self, x: Tensor, operands: tuple[Tensor, ...], group: dist.ProcessGroup, *, keep: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        if not x.is_cuda:
            return super().gather_matmul(x, operands, group, keep=keep)
        rank, world, rows = dist.get_rank(group), dist.get_world_size(group), x.shape[0]
        outs = [x.new_empty(world * rows, operand.shape[1]) for operand in operands]
        # Two ranks exchange one shard only, in halves: the second half is copied during the product of the first.
        large = world == 2 and x.numel() * x.element_size() >= LARGE_BYTES
        exchange = push.CopyGather(x, group, pieces=2 if large else 1, keep=keep)
        for out, operand in zip(outs, operands, strict=True):
            torch.mm(exchange.x, operand, out=out[rank * rows : (rank + 1) * rows])
        for step in range(1, world):
            source = (rank + step) % world
            for number, (first, last) in enumerate(exchange.plan.bounds):
                piece = exchange.wait_for_piece(source, number)
                for out, operand in zip(outs, operands, strict=True):
                    torch.mm(piece, operand, out=out[source * rows + first : source * rows + last])
        exchange.finish()
        return tuple(outs), exchange.plan.gathered if keep else None

    def matmul_scatter(self, pairs: tuple[Pair, ...], group: dist.ProcessGroup) -> Tensor:
        x, operand = pairs[0]
        world = dist.get_world_size(group)
        if not x.is_cuda or world == 1:
            return super().matmul_scatter(pairs, group)
        rows = shard_rows(x.shape[0], group)
        shape = (rows, operand.shape[1])
        if relays(world, *shape, x.element_size()):

            def multiply(shard: int, first: int, last: int, out: Tensor, add: bool) -> None:
                products(pairs, shard * rows + first, shard * rows + last, out, add=add)

            if world > 2 or sum(x.numel() for x, _ in pairs) * shape[1] < FOUR_PIECES_PRODUCT:
                return relay_sum(multiply, shape, x.dtype, group, x.device, pieces=2)
            unit = rows_of_a_round(shape[1], processors(x.device))
            return relay_sum(multiply, shape, x.dtype, group, x.device, pieces=4, unit=unit, lanes=2)

        def make(shard: int, out: Tensor) -> None:
            products(pairs, shard * rows, (shard + 1) * rows, out)

        return push.scatter_sum(make, shape, x.dtype, group, x.device)

    def matmul_reduce(self, x: Tensor, operand: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Reduce-scatter during the product, then all-gather; the all-gather is exposed."""
        if not x.is_cuda or x.shape[0] % dist.get_world_size(group):
            return super().matmul_reduce(x, operand, group)
        return self.start_gather(self.matmul_scatter(((x, operand),), group), group)().clone()

    def start_gather(self, x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        return push.gather(x, group) if x.is_cuda else super().start_gather(x, group)


def rows_of_a_round(columns: int, processors: int) -> int:
    """Return how many rows of a matmul the SMs compute in one wave, a tile each."""
    height, width = TILE
    return height * max(1, processors // -(-columns // width))


def relays(world: int, rows: int, columns: int, itemsize: int) -> bool:
    """Return whether parts of (rows, columns) are relayed in pieces instead of sent whole to slots and added up.

    Adding reads and writes W + 1 parts after the last matmul; the relay avoids that with more launches and signals.
    """
    return bool(relayed(world, rows * columns * itemsize))
