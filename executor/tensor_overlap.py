"""The plan's `tp_overlap`, applied: products of a block and their collectives run as one of the overlap modes.

The DTensor styles cut the weights as ever; what changes is who multiplies. Tokens come in cut (sequence parallelism),
the first products of attention and feed-forward gather them on the way, the last ones scatter their sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn

from executor.legal import OVERLAP_MODES
from executor.model import Block
from executor.shards import local


class Overlapped:
    """The two products of a pair: `project` and `close` of attention and feed-forward."""

    def __init__(self, tp_overlap: str, group: dist.ProcessGroup) -> None:
        self.name, self.mode, self.group = tp_overlap, OVERLAP_MODES[tp_overlap], group

    def project(self, x: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """Take this rank's tokens (B, S / tp, h); return all tokens through this rank's columns, (B, S, width)."""
        from executor.overlap import all_gather_matmul  # noqa: PLC0415 - Triton is imported for plans that overlap

        weights = tuple(local(linear.weight) for linear in linears)
        outs = all_gather_matmul(local(x), weights, self.group, mode=self.mode, dim=1)
        return tuple(
            out if linear.bias is None else out + local(linear.bias) for out, linear in zip(outs, linears, strict=True)
        )

    def close(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """Take all tokens of this rank's width (B, S, width / tp); return this rank's tokens of the sum."""
        from executor.overlap import matmul_reduce_scatter  # noqa: PLC0415 - as above

        return matmul_reduce_scatter(local(x), local(linear.weight), self.group, mode=self.mode, dim=1)


def overlap_block(block: Block, tp_overlap: str, group: dist.ProcessGroup) -> None:
    """Have the products of a block's attention and dense feed-forward run in the plan's mode."""
    run = Overlapped(tp_overlap, group)
    for module in (block.attention, block.feed_forward):
        if module is not None:
            module.project, module.close = run.project, run.close
