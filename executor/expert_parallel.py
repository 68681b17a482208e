"""Expert parallelism: each rank holds some of the experts, and tokens travel to them and back.

What moves: forward, token copies to the ranks of their experts (all-to-all with uneven parts), results back; backward,
the same two ways round. How many tokens go where is only known when they have been routed, so the counts travel first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from executor.model import Decoder
from executor.moe import Experts
from executor.permute import inverse_of, take


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _exchange(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class AllToAllExchange(nn.Module):
    """Takes tokens sorted by expert to the ranks of `group` that hold the experts, and brings the results back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.world = group, dist.get_world_size(group)

    def forward(self, experts: Experts, tokens: Tensor, counts: Tensor) -> Tensor:
        """Take tokens (T k, h) sorted by expert and counts (E,) of all experts; return results in the same order."""
        theirs = torch.empty_like(counts)  # (ranks, experts here), flat: what each rank sends to each expert here
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent = counts.view(self.world, -1).sum(1).tolist()
        received = theirs.view(self.world, -1).sum(1).tolist()
        arrived = _AllToAll.apply(tokens, sent, received, self.group)
        # Tokens arrive sorted by sender, then expert; experts want them by expert.
        here = theirs.numel() // self.world
        expert = torch.arange(here, device=tokens.device).repeat(self.world).repeat_interleave(theirs)
        order = expert.argsort(stable=True)
        back = inverse_of(order)
        done = experts(take(arrived, order, back), theirs.view(self.world, -1).sum(0))
        return _AllToAll.apply(take(done, back, order), received, sent, self.group)


def apply_expert_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Cut the experts of every sparse layer over the one-dimensional `mesh`, along the experts."""
    for block in model.layers.values():
        if block.moe is None:
            continue
        experts = block.moe.experts
        for name, weight in list(experts.named_parameters(recurse=False)):
            experts.register_parameter(name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))
        block.moe.exchange = AllToAllExchange(mesh.get_group())
