"""Gradients after the backward pass: all-reduce partial sums, and compute the global norm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from executor.model.shards import ParameterShard, local_tensor


def sum_partial_gradients(
    parameters: Iterable[tuple[str, nn.Parameter]], parameter_shards: Mapping[str, ParameterShard]
) -> None:
    """All-reduce gradients that are partial sums over ranks (norms under sequence parallelism, routers).

    They are small and latency decides, so they are reduced once per step, flattened into one buffer.
    """
    parts: dict[tuple[dist.ProcessGroup, torch.dtype], list[Tensor]] = {}
    for name, parameter in parameters:
        shard = parameter_shards.get(name)
        if shard is not None and shard.dim is None and parameter.grad is not None:
            grad = local_tensor(parameter.grad)
            parts.setdefault((shard.group, grad.dtype), []).append(grad)
    for (group, _), grads in parts.items():
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        sums = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [some.view_as(grad) for some, grad in zip(sums, grads, strict=True)])


def cuts_of(grad: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which FSDP has sharded a gradient."""
    if not isinstance(grad, DTensor):
        return ()
    cut = [axis for axis, placement in enumerate(grad.placements) if not placement.is_replicate()]
    return tuple(grad.device_mesh.get_group(axis) for axis in cut)


@torch.no_grad()
def global_norm(
    parameters: Iterable[tuple[str, nn.Parameter]],
    parameter_shards: Mapping[str, ParameterShard],
    pipeline: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Return the 2-norm of the gradients of the whole model, every element counted once; a collective call.

    Squares are summed over the ranks that a parameter is sharded over, not over its replicas, and finally over pipeline
    stages.
    """
    by_cut: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for name, parameter in parameters:
        if parameter.grad is None:
            continue
        shard, grad = parameter_shards.get(name), parameter.grad
        groups: tuple[dist.ProcessGroup, ...] = () if shard is None or shard.dim is None else (shard.group,)
        by_cut.setdefault(groups + cuts_of(grad), []).append(local_tensor(grad))
    total = torch.zeros((), dtype=torch.float64, device=device)
    # Every rank of a stage holds the same parameters in the same order, so the collectives match.
    for groups, grads in by_cut.items():
        norms = torch._foreach_norm(grads)  # noqa: SLF001 - a few kernels for all; torch's clipping uses it too
        square = torch.stack(norms).double().square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        total += square
    if pipeline is not None:
        dist.all_reduce(total, group=pipeline)
    return total.sqrt()
