"""Gradients after the backward pass: sums that are still spread are finished, and the norm of all is found."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from executor.shards import local


def finish(parameters: Iterable[nn.Parameter]) -> None:
    """Add up gradients that are parts of a sum over ranks (norms under sequence parallelism, routers)."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


@torch.no_grad()
def global_norm(parameters: Iterable[nn.Parameter], pipeline: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """Return the 2-norm of the gradients of the whole model, each number counted once; a collective call.

    Shards are added over the mesh axes that cut a parameter; axes that copy it add nothing. Stages of a pipeline hold
    different parameters and are added last.
    """
    by_cut: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        grad, groups = parameter.grad, ()
        if isinstance(grad, DTensor):
            cuts = [axis for axis, placement in enumerate(grad.placements) if not placement.is_replicate()]
            groups = tuple(grad.device_mesh.get_group(axis) for axis in cuts)
        by_cut.setdefault(groups, []).append(local(grad))
    total = torch.zeros((), dtype=torch.float64, device=device)
    # Every rank of a stage holds the same parameters in the same order, so the collectives meet.
    for groups, grads in by_cut.items():
        square = torch.stack([norm.double() ** 2 for norm in torch._foreach_norm(grads)]).sum()  # noqa: SLF001 - one kernel for all; torch's clipping uses it too
        for group in groups:
            dist.all_reduce(square, group=group)
        total += square
    if pipeline is not None:
        dist.all_reduce(total, group=pipeline)
    return total.sqrt()
