"""The reference: one collective and one matmul, one after the other. With gloo it runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from executor.overlap.mode import Mode, Pair, products, shard_rows


class Nccl(Mode):
    name = "nccl"

    def gather_matmul(
        self, x: Tensor, operands: tuple[Tensor, ...], group: dist.ProcessGroup, *, keep: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        gathered = self.start_gather(x, group)()
        return tuple(gathered @ operand for operand in operands), gathered if keep else None

    def matmul_scatter(self, pairs: tuple[Pair, ...], group: dist.ProcessGroup) -> Tensor:
        partial = products(pairs)
        out = partial.new_empty(shard_rows(partial.shape[0], group), partial.shape[1])
        dist.reduce_scatter_tensor(out, partial, group=group)
        return out

    def matmul_reduce(self, x: Tensor, operand: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x @ operand
        dist.all_reduce(total, group=group)
        return total

    def start_gather(self, x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        gathered = x.new_empty(x.shape[0] * dist.get_world_size(group), x.shape[1])
        work = dist.all_gather_into_tensor(gathered, x.contiguous(), group=group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return gathered

        return wait
