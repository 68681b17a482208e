"""A mode that moves nothing: what the products take alone, with whatever lies where others' rows would be.

Its numbers are wrong; a step with it is what a step would take if all tensor-parallel communication were hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from executor.overlap.mode import Pair, products
from executor.overlap.nccl import Nccl


class Alone(Nccl):
    name = "alone"

    def __init__(self) -> None:
        self.whole: dict[tuple[int, ...], Tensor] = {}

    @torch.compiler.disable  # graphs end at exchanges, as those of the other modes do
    def gather_matmul(
        self, x: Tensor, operands: tuple[Tensor, ...], group: dist.ProcessGroup, *, keep: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        whole = self.start_gather(x, group)()
        return tuple(whole @ operand for operand in operands), whole if keep else None

    @torch.compiler.disable
    def matmul_scatter(self, pairs: tuple[Pair, ...], group: dist.ProcessGroup) -> Tensor:
        return products(pairs).chunk(dist.get_world_size(group))[dist.get_rank(group)]

    def start_gather(self, x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        shape = (dist.get_world_size(group) * x.shape[0], x.shape[1])
        if shape not in self.whole:  # random values: products of zeros draw less power and run faster
            self.whole[shape] = torch.randn(shape, dtype=x.dtype, device=x.device) * x.std()
        return lambda: self.whole[shape]
