"""cuBLAS on whole shards, copy engines between: every product is as fast as the library's, and only the first is early.

The own shard needs no transfer and is computed while the next ones arrive. Without CUDA this is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from executor.overlap import push
from executor.overlap.mode import Pair, products, shard_rows
from executor.overlap.nccl import Nccl
from executor.overlap.relay import relay_sum

# On two H200 the two ways were equally fast at 3 x 67 MB, the relay slower at 3 x 34 MB (249 and 189 us at 8192 x 4096 x
# 1024; examples/validation/overlap_2xH200.md).
LARGEST_ADDED_BYTES = 2**27
# Multiply-adds from which two ranks relay in four pieces, each a whole number of rounds of tiles, whose products take turns
# on two streams: 837 and 868 instead of 866 and 889 us at 8192 x 8192 x 4096. At half the depth that was 445 and 451
# instead of 452 and 467 us while the host kept up, and 558 instead of 454 when it did not: eight products and their
# signals cost it 260 to 550 us.
FOUR_PIECES_PRODUCT = 2**38
TILE = (128, 256)  # of the library's products


class CopyEngine(Nccl):
    name = "copy_engine"

    def gather_matmul(
        self, x: Tensor, operands: tuple[Tensor, ...], group: dist.ProcessGroup, *, keep: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        if not x.is_cuda:
            return super().gather_matmul(x, operands, group, keep=keep)
        rank, world, rows = dist.get_rank(group), dist.get_world_size(group), x.shape[0]
        outs = [x.new_empty(world * rows, operand.shape[1]) for operand in operands]
        # Two ranks exchange one shard only; in halves, the second moves beside the product of the first.
        large = world == 2 and x.numel() * x.element_size() >= push.LARGE_BYTES
        moving = push.Gathering(x, group, pieces=2 if large else 1, keep=keep)
        for out, operand in zip(outs, operands, strict=True):
            torch.mm(moving.x, operand, out=out[rank * rows : (rank + 1) * rows])
        for step in range(1, world):
            source = (rank + step) % world
            for number, (first, last) in enumerate(moving.plan.bounds):
                piece = moving.arrive(source, number)
                for out, operand in zip(outs, operands, strict=True):
                    torch.mm(piece, operand, out=out[source * rows + first : source * rows + last])
        moving.finish()
        return tuple(outs), moving.plan.gathered if keep else None

    def matmul_scatter(self, pairs: tuple[Pair, ...], group: dist.ProcessGroup) -> Tensor:
        x, operand = pairs[0]
        world = dist.get_world_size(group)
        if not x.is_cuda or world == 1:
            return super().matmul_scatter(pairs, group)
        rows = shard_rows(x.shape[0], group)
        shape = (rows, operand.shape[1])
        # In a graph only kernels can wait. One that spins beside the product that its peer waits for may keep a
        # multiprocessor from it, for ever; slots are waited for after the last product.
        if relays(world, *shape, x.element_size()) and not torch.cuda.is_current_stream_capturing():

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
        """Reduce-scatter beside the product, then all-gather; the second half is exposed."""
        if not x.is_cuda or x.shape[0] % dist.get_world_size(group):
            return super().matmul_reduce(x, operand, group)
        return self.start_gather(self.matmul_scatter(((x, operand),), group), group)().clone()

    def start_gather(self, x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        return push.gather(x, group) if x.is_cuda else super().start_gather(x, group)


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def rows_of_a_round(columns: int, processors: int) -> int:
    """Return how many rows of a product the multiprocessors compute at once, a tile each."""
    height, width = TILE
    return height * max(1, processors // -(-columns // width))


def relays(world: int, rows: int, columns: int, itemsize: int) -> bool:
    """Say whether parts of (rows, columns) are relayed in pieces, or sent whole to slots and added up.

    Adding reads and writes W + 1 parts after the last product; the relay does not, for more launches and signals.
    """
    return (world + 1) * rows * columns * itemsize >= LARGEST_ADDED_BYTES
