"""Data parallelism: FSDP2 (with replicas: HSDP), or DDP.

Communication: FSDP all-gathers a block's parameters before its forward and its backward pass and reduce-scatters its
gradients; HSDP then all-reduces the shards over the replicas; DDP all-reduces gradients in buckets. Gradients are
summed, never averaged: the loss is already divided by the tokens of the whole batch.
"""

# No `from __future__ import annotations`: DDP inspects the annotations of its hook and needs classes.

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from executor.model.decoder import Decoder


def apply_fsdp(
    model: Decoder,
    mesh: DeviceMesh,
    *,
    expert_mesh: DeviceMesh | None,
    precision: MixedPrecisionPolicy,
    reshard_after_forward: bool,
) -> None:
    """Shard each block, the embedding, and [norm, output] together, each as a unit, and then the root with the rest.

    `mesh` has one axis (shards) or two (replicas, shards). With expert parallelism the experts are a separate unit on
    `expert_mesh`. Tied embeddings stay in the root's unit, since a parameter can belong to one unit only.
    """
    shard = partial(_shard, precision=precision)
    for block in model.blocks().values():
        if block.moe is not None and expert_mesh is not None:
            shard([block.moe.experts], expert_mesh, reshard_after_forward=reshard_after_forward)
        shard([block], mesh, reshard_after_forward=reshard_after_forward)
    if not model.tied:
        if model.tok_embeddings is not None:
            shard([model.tok_embeddings], mesh, reshard_after_forward=reshard_after_forward)
        if model.norm is not None and model.output is not None:
            # Backward starts with these, so resharding them after forward would only cost another all-gather.
            shard([model.norm, model.output], mesh, reshard_after_forward=False)
    shard([model], mesh)


def _shard(modules: list[nn.Module], mesh: DeviceMesh, *, precision: MixedPrecisionPolicy, **when: Any) -> None:
    """Make modules one unit, whose gradients are summed. Over one rank torch does so by itself; a stated factor would
    take a tensor as large as the unit (torch/distributed/fsdp/_fully_shard: foreach_reduce).
    """
    for module in fully_shard(modules, mesh=mesh, mp_policy=precision, **when):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum, and there is nothing to scale
        if mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)


class Replica(DistributedDataParallel):
    """DDP with summed gradients, around a model whose parameters are already initialised equally on all ranks.

    After the first backward pass DDP trades its one bucket of everything (torch/nn/parallel/distributed.py,
    `_ddp_init_helper`: limits of [sys.maxsize]) for buckets of 25 MiB in the order that gradients came in (reducer.cpp,
    `rebuild_buckets`). But an NCCL call holds its tensors until its work is waited for, or until another call of its
    group after the watchdog has seen it end (ProcessGroupNCCL.cpp, `stashed_for_allocator_safety_`), and DDP waits for
    futures only: the old bucket, a second copy of all gradients, would still be allocated at the memory peak of the
    second step. So we wait for the work; on a GPU this only makes the stream wait, as DDP already did.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(
            model, device_ids=[device.index] if device.type == "cuda" else None, process_group=group, init_sync=False
        )
        self.pending: list[dist.Work] = []
        self.register_comm_hook((group, self.pending), _sum)

    def wait_for_reductions(self) -> None:
        """Wait for the bucket reductions, which releases their buffers; call it after each backward pass."""
        for work in self.pending:
            work.wait()
        self.pending.clear()


def _sum(state: tuple[dist.ProcessGroup, list[dist.Work]], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce a bucket by sum (DDP's default averages). `state`: the group, and the list of pending reductions."""
    group, pending = state
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    pending.append(work)
    summed: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed
