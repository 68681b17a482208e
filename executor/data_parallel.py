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


class Replica(DistributedDataParallel):
    """A copy of the model, whose parameters are already initialised and whose gradients are summed over its group.

    After the first backward pass DDP trades its one bucket of everything (torch/nn/parallel/distributed.py,
    `_ddp_init_helper`: limits of [sys.maxsize]) for buckets of 25 MiB in the order that gradients came in
    (reducer.cpp, `rebuild_buckets`). But an NCCL call keeps its tensors until somebody waits for it, or until another
    call of its group after its watchdog has seen it end (ProcessGroupNCCL.cpp, `stashed_for_allocator_safety_`), and DDP
    waits for futures only: the old bucket would be there, a second copy of all gradients, when memory peaks in the
    second step. So we wait: on a GPU only the stream does, and DDP has made it wait already.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(
            model, device_ids=[device.index] if device.type == "cuda" else None, process_group=group, init_sync=False
        )
        self.travelling: list[dist.Work] = []
        self.register_comm_hook((group, self.travelling), _sum)

    def let_go(self) -> None:
        """Let calls forget the buckets that they have summed; to be called after a backward pass."""
        for work in self.travelling:
            work.wait()
        self.travelling.clear()


def _sum(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket by sum; DDP's own way divides. `state`: the group, and where to note what is on its way."""
    group, travelling = state
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    travelling.append(work)
    return work.get_future().then(lambda done: done.value()[0])
