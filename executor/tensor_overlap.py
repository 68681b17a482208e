"""The plan's `tp_overlap`, applied: products of a block and their collectives run in the overlap mode of their site.

Weights are cut as ever; what changes is who multiplies. Tokens come in cut (sequence parallelism), the first products of
attention and feed-forward gather them on the way, the last ones scatter their sum. Sites whose mode is none are left as
they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from executor.legal import OVERLAP_MODES
from executor.model import Block
from simulator.overlap_sites import NONE, mode_at


class Overlapped:
    """The two products of a pair: `project` and `close` of attention and feed-forward. `name` is the plan's word."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name, self.mode, self.group = name, OVERLAP_MODES[name], group

    def project(self, x: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """Take this rank's tokens (S / tp, B, h); return all tokens through this rank's columns, (S, B, width)."""
        from executor.overlap import all_gather_matmul  # noqa: PLC0415 - Triton is imported for plans that overlap

        weights = tuple(linear.weight for linear in linears)
        outs = all_gather_matmul(x.flatten(0, 1), weights, self.group, mode=self.mode)
        outs = tuple(out.unflatten(0, (-1, x.shape[1])) for out in outs)
        return tuple(
            out if linear.bias is None else out + linear.bias for out, linear in zip(outs, linears, strict=True)
        )

    def close(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """Take all tokens of this rank's width (S, B, width / tp); return this rank's tokens of the sum."""
        from executor.overlap import matmul_reduce_scatter  # noqa: PLC0415 - as above

        out = matmul_reduce_scatter(x.flatten(0, 1), linear.weight, self.group, mode=self.mode)
        return out.unflatten(0, (-1, x.shape[1]))


def overlap_block(block: Block, tp_overlap: str, group: dist.ProcessGroup) -> None:
    """Have the products of a block's attention and dense feed-forward run in the modes of the plan."""
    for module, name in ((block.attention, "attention"), (block.feed_forward, "mlp")):
        if module is None:
            continue
        first, last = (mode_at(tp_overlap, f"{name}_{end}") for end in ("in", "out"))
        if first != NONE:
            module.project = Overlapped(first, group).project
        if last != NONE:
            module.close = Overlapped(last, group).close


def applied_overlap(blocks: Sequence[Block]) -> dict[str, str]:
    """Return the mode that each site of `blocks` runs in, read from their modules; `/` between where blocks differ.

    A site that no block has is left out: sparse layers have no dense feed-forward, and latent attention compresses.
    """
    found: dict[str, set[str]] = {}
    for block in blocks:
        for module, name in ((block.attention, "attention"), (block.feed_forward, "mlp")):
            if module is not None and hasattr(module, "project"):
                found.setdefault(f"{name}_in", set()).add(_mode_of(module.project))
                found.setdefault(f"{name}_out", set()).add(_mode_of(module.close))
    return {site: "/".join(sorted(modes)) for site, modes in found.items()}


def _mode_of(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    return owner.name if isinstance(owner, Overlapped) else NONE
