"""Data parallelism: parameters sharded with FSDP2 (and replicated: HSDP), or copied with DDP.

What moves: FSDP gathers a block's parameters before its forward and its backward pass and reduce-scatters its
gradients; HSDP then all-reduces the shards over the replicas; DDP all-reduces gradients in buckets. Gradients are
summed, never averaged: the loss is already divided by the tokens of the whole batch.
"""

# No deferred annotations here: DDP reads those of its hook and wants classes.

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from executor.model import Decoder


def apply_fsdp(
    model: Decoder,
    mesh: DeviceMesh,
    *,
    expert_mesh: DeviceMesh | None,
    precision: MixedPrecisionPolicy,
    reshard_after_forward: bool,
) -> None:
    """Shard each block, [norm, output] as one unit, and the root with the embedding's own unit before it.

    `mesh` has one axis (shards) or two (replicas, shards). Experts that lie on `expert_mesh`'s ranks are a unit of
    their own inside their block. Tied embeddings stay in the root's unit: a parameter can have one owner only.
    """
    settings: dict[str, Any] = {"mp_policy": precision}
    for block in model.layers.values():
        if block.moe is not None and expert_mesh is not None:
            fully_shard(block.moe.experts, mesh=expert_mesh, reshard_after_forward=reshard_after_forward, **settings)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, **settings)
    if not model.tied:
        if model.tok_embeddings is not None:
            fully_shard(model.tok_embeddings, mesh=mesh, reshard_after_forward=reshard_after_forward, **settings)
        if model.norm is not None and model.output is not None:
            # Backward starts with these: giving them back only to gather them again would be waste.
            fully_shard([model.norm, model.output], mesh=mesh, reshard_after_forward=False, **settings)
    fully_shard(model, mesh=mesh, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum, and there is nothing to scale


def apply_ddp(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> DistributedDataParallel:
    """Copy a model whose parameters are already initialised; gradients are summed over `group`."""
    wrapped = DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None, process_group=group, init_sync=False
    )
    wrapped.register_comm_hook(group, _sum)
    return wrapped


def _sum(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket by sum; DDP's own way divides."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
