"""Apply the plan's `tp_overlap`: matmuls of a block and their collectives run in the overlap mode of their site.

Weights are sharded as in plain tensor parallelism. With sequence parallelism the input projections of attention and
feed-forward all-gather the tokens and the output projections reduce-scatter their sum; here each runs as one overlapped
operation. Sites whose mode is `none` are not changed. Selective recomputation saves the same results as for plain
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from executor.model import saved_results
from executor.model.decoder import Block
from executor.overlap import all_gather_matmul, matmul_reduce_scatter, mode_named
from executor.overlap.mode import Mode, Pair
from simulator.config.overlap_sites import NONE, executor_name, mode_at


class SavingMode(Mode):
    """A mode whose results in the forward pass of a block can be saved by selective recomputation."""

    def __init__(self, mode: Mode) -> None:
        self.mode, self.name, self.half_precision_only = mode, mode.name, mode.half_precision_only

    def gather_matmul(
        self, x: Tensor, operands: tuple[Tensor, ...], group: dist.ProcessGroup, *, keep: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        if keep:  # the backward pass, where nothing is saved
            return self.mode.gather_matmul(x, operands, group, keep=keep)

        def compute(numbers: Sequence[int]) -> tuple[Tensor, ...]:
            return self.mode.gather_matmul(x, tuple(operands[number] for number in numbers), group)[0]

        return saved_results.products(compute, len(operands)), None

    def matmul_scatter(self, pairs: tuple[Pair, ...], group: dist.ProcessGroup) -> Tensor:
        return saved_results.scattered_product(lambda: self.mode.matmul_scatter(pairs, group))

    def matmul_reduce(self, x: Tensor, operand: Tensor, group: dist.ProcessGroup) -> Tensor:
        return self.mode.matmul_reduce(x, operand, group)

    def start_gather(self, x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        return self.mode.start_gather(x, group)


class OverlappedProducts:
    """Overlapped `project_in` and `project_out` of attention and feed-forward. `name` is the plan's name of the
    mode.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name, self.group = name, group
        self.mode = SavingMode(mode_named(executor_name(name)))

    def project_in(self, x: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """Take this rank's tokens (S / tp, B, h); return all tokens projected to this rank's columns, (S, B, width)."""
        weights = tuple(linear.weight for linear in linears)
        outs = all_gather_matmul(x.flatten(0, 1), weights, self.group, mode=self.mode)
        outs = tuple(out.unflatten(0, (-1, x.shape[1])) for out in outs)
        return tuple(
            out if linear.bias is None else out + linear.bias for out, linear in zip(outs, linears, strict=True)
        )

    def project_out(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """Take all tokens of this rank's width (S, B, width / tp); return this rank's tokens of the sum."""
        out = matmul_reduce_scatter(x.flatten(0, 1), linear.weight, self.group, mode=self.mode)
        rows: Tensor = out.unflatten(0, (-1, x.shape[1]))
        return rows


def overlap_block(block: Block, tp_overlap: str, group: dist.ProcessGroup) -> None:
    """Make the projections of a block's attention and dense feed-forward run in the plan's modes."""
    for module, name in ((block.attention, "attention"), (block.feed_forward, "mlp")):
        if module is None:
            continue
        first, last = (mode_at(tp_overlap, f"{name}_{end}") for end in ("in", "out"))
        if first != NONE:
            module.project_in = OverlappedProducts(first, group).project_in
        if last != NONE:
            module.project_out = OverlappedProducts(last, group).project_out


def applied_overlap(blocks: Sequence[Block]) -> dict[str, str]:
    """Return the mode of each site of `blocks`, read from their modules; modes that differ between blocks are joined by
    `/`.

    Sites that no block has are left out: sparse layers have no dense feed-forward, and latent attention compresses.
    """
    found: dict[str, set[str]] = {}
    for block in blocks:
        for module, name in ((block.attention, "attention"), (block.feed_forward, "mlp")):
            if module is not None and hasattr(module, "project_in"):
                found.setdefault(f"{name}_in", set()).add(_mode_of(module.project_in))
                found.setdefault(f"{name}_out", set()).add(_mode_of(module.project_out))
    return {site: "/".join(sorted(modes)) for site, modes in found.items()}


def _mode_of(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    return owner.name if isinstance(owner, OverlappedProducts) else NONE
