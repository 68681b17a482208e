"""Gradients after the backward pass: sums that are still spread are finished, and the norm of all is found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from executor.shards import Cut, local


def finish(parameters: Iterable[tuple[str, nn.Parameter]], cuts: Mapping[str, Cut]) -> None:
    """Add up gradients that are parts of a sum over ranks (norms under sequence parallelism, routers).

    Once a step and all together: each is small, and a collective of its own would cost more than its numbers.
    """
    parts: dict[tuple[dist.ProcessGroup, torch.dtype], list[Tensor]] = {}
    for name, parameter in parameters:
        cut = cuts.get(name)
        if cut is not None and cut.dim is None and parameter.grad is not None:
            grad = local(parameter.grad)
            parts.setdefault((cut.group, grad.dtype), []).append(grad)
    for (group, _), grads in parts.items():
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        sums = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [some.view_as(grad) for some, grad in zip(sums, grads, strict=True)])


@torch.no_grad()
def global_norm(
    parameters: Iterable[tuple[str, nn.Parameter]],
    cuts: Mapping[str, Cut],
    pipeline: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Return the 2-norm of the gradients of the whole model, each number counted once; a collective call.

    Shards are added over the ranks that a parameter is cut over; ranks that copy it add nothing. Stages of a pipeline
    hold different parameters and are added last.
    """
    by_cut: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for name, parameter in parameters:
        if parameter.grad is None:
            continue
        cut, grad = cuts.get(name), parameter.grad
        groups = () if cut is None or cut.dim is None else (cut.group,)
        if isinstance(grad, DTensor):
            cuts_of_fsdp = [axis for axis, placement in enumerate(grad.placements) if not placement.is_replicate()]
            groups += tuple(grad.device_mesh.get_group(axis) for axis in cuts_of_fsdp)
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
