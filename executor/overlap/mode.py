"""The interface of overlap modes. Modes differ in time, not in results.

Operands are (K, N) matrices, so that a product is `x @ operand`; the weight of a linear layer is passed as `weight.t()`
and read as it lies in memory. Rows are tokens: a rank's shard is (R, K), all of them in the order of ranks (W·R, K).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Pair = tuple[Tensor, Tensor]


class Mode(ABC):
    """One implementation of tensor-parallel matmuls with their collectives."""

    name: str
    # Whether the kernels of this mode support half precision only; for wider types see the mode's module.
    half_precision_only = False

    @abstractmethod
    def gather_matmul(
        self, x: Tensor, operands: tuple[Tensor, ...], group: dist.ProcessGroup, *, keep: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return X @ operand for each operand (K, N_i), where X (W·R, K) is all ranks' `x` (R, K).

        With `keep` X is returned as well. The call after the next one may overwrite its buffer.
        """

    @abstractmethod
    def matmul_scatter(self, pairs: tuple[Pair, ...], group: dist.ProcessGroup) -> Tensor:
        """Return this rank's R rows of the sum, over pairs and ranks, of x @ operand; x (W·R, K_i), operand (K_i,
        N).
        """

    @abstractmethod
    def matmul_reduce(self, x: Tensor, operand: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return x @ operand, (M, K) x (K, N), summed over ranks."""

    @abstractmethod
    def start_gather(self, x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        """Begin to gather `x` (R, K); the function returned waits for it and returns X as `gather_matmul` keeps it."""


def products(
    pairs: tuple[Pair, ...],
    first: int = 0,
    last: int | None = None,
    out: Tensor | None = None,
    *,
    add: bool = False,
) -> Tensor:
    """Return the sum of x[first:last] @ operand over the pairs, written to `out` if given, or added to it with
    `add`.
    """
    total = out if add else None
    for x, operand in pairs:
        part = x[first:last]
        if total is not None:
            total.addmm_(part, operand)
        else:
            total = torch.mm(part, operand, out=out) if out is not None else part @ operand
    if total is None:
        raise ValueError("no product to add up")
    return total


def shard_rows(rows: int, group: dist.ProcessGroup) -> int:
    """Return rows / W. Raises ValueError if W does not divide the rows."""
    world = dist.get_world_size(group)
    if rows % world:
        raise ValueError(f"{rows} rows cannot be shared out evenly among {world} ranks")
    return rows // world
