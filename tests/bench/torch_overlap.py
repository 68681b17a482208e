"""PyTorch's own symmetric-memory operators, which the executor's overlap modes are compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from executor.gpu import symmetric_memory as symmetric
from executor.overlap.mode import Pair
from executor.overlap.nccl import Nccl

ONE_SHOT_BYTES = 128 * 2**10


class TorchSymmMem(Nccl):
    """Asynchronous tensor parallelism: torch.ops.symm_mem's fused operators."""

    name = "torch_symm_mem"

    def gather_matmul(
        self, x: Tensor, operands: tuple[Tensor, ...], group: dist.ProcessGroup, *, keep: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        # return_A=True keeps torch away from its multicast branch.
        gathered, outs = torch.ops.symm_mem.fused_all_gather_matmul(x.contiguous(), list(operands), 0, group.group_name)
        return tuple(outs), gathered if keep else None

    def matmul_scatter(self, pairs: tuple[Pair, ...], group: dist.ProcessGroup) -> Tensor:
        x, operand = pairs[0]  # it knows one product
        rows: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, operand, "sum", 0, group.group_name)
        return rows

    def start_gather(self, x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        gathered = torch.ops.symm_mem._low_contention_all_gather(x.contiguous(), group.group_name)
        return lambda: torch.ops._c10d_functional.wait_tensor(gathered)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks of `x` by torch's one-shot or two-shot kernel."""
    space = symmetric.workspace(group, "torch", x.device)
    space.reserve(x.numel() * x.element_size(), 1)
    chunk = space.slots.local[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)
    if x.numel() * x.element_size() <= ONE_SHOT_BYTES:
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(chunk, x, "sum", group.group_name)
        return total
    chunk.copy_(x)
    torch.ops.symm_mem.two_shot_all_reduce_(chunk, "sum", group.group_name)
    return chunk.clone()
