"""Shards travel from neighbour to neighbour in W - 1 hops, each overlapped with the matmul of the current shard."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from executor.overlap.mode import Pair, products, shard_rows
from executor.overlap.nccl import Nccl


class Ring(Nccl):
    name = "ring"

    def gather_matmul(
        self, x: Tensor, operands: tuple[Tensor, ...], group: dist.ProcessGroup, *, keep: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        world, rank, (rows, depth) = dist.get_world_size(group), dist.get_rank(group), x.shape
        outs = [x.new_empty(world, rows, operand.shape[1]) for operand in operands]
        gathered = x.new_empty(world, rows, depth)
        chunk = x.contiguous()
        if keep:
            gathered[rank].copy_(x)
        for step in range(world):
            shard = (rank + step) % world
            works = []
            if step + 1 < world:  # the next rank sends the shard that follows the current one
                works = _hop(chunk, gathered[(shard + 1) % world], send_to=rank - 1, receive_from=rank + 1, group=group)
            for out, operand in zip(outs, operands, strict=True):
                torch.mm(chunk, operand, out=out[shard])
            for work in works:
                work.wait()
            chunk = gathered[(shard + 1) % world]
        return tuple(out.flatten(0, 1) for out in outs), gathered.flatten(0, 1) if keep else None

    def matmul_scatter(self, pairs: tuple[Pair, ...], group: dist.ProcessGroup) -> Tensor:
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        rows = shard_rows(pairs[0][0].shape[0], group)

        def partial(shard: int) -> Tensor:
            return products(pairs, shard * rows, (shard + 1) * rows)

        # The sum for a shard starts at the rank after its owner and travels round the ring to the owner.
        total = partial((rank - 1) % world)
        for step in range(1, world):
            arriving = torch.empty_like(total)
            works = _hop(total, arriving, send_to=rank + 1, receive_from=rank - 1, group=group)
            following = partial((rank - 1 - step) % world)
            for work in works:
                work.wait()
            total = following.add_(arriving)
        return total


def _hop(
    sent: Tensor, received: Tensor, *, send_to: int, receive_from: int, group: dist.ProcessGroup
) -> list[dist.Work]:
    world = dist.get_world_size(group)
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, dist.get_global_rank(group, send_to % world), group),
            dist.P2POp(dist.irecv, received, dist.get_global_rank(group, receive_from % world), group),
        ]
    )
