"""Expert parallelism: each rank holds some of the experts, and tokens are sent to them and back.

Communication: forward, token copies to the ranks of their experts (all-to-all with uneven splits) and results back;
backward, the same for gradients. The split sizes are known only after routing, so they are exchanged first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.model.decoder import Decoder
from executor.model.moe import Experts
from executor.model.permute import inverse_of, take
from executor.model.shards import shard_parameter


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class AllToAllExchange(nn.Module):
    """Sends tokens sorted by expert to the ranks of `group` that hold the experts, and returns their results."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.world = group, dist.get_world_size(group)

    def forward(self, experts: Experts, tokens: Tensor, counts: Tensor) -> Tensor:
        """Take tokens (T k, h) sorted by expert and counts (E,) of all experts; return results in the same order."""
        theirs = torch.empty_like(counts)  # (ranks, local experts), flat: tokens from each rank for each local expert
        dist.all_to_all_single(theirs, counts, group=self.group)
        # The host needs both split sizes; this is the only synchronisation with the device.
        sent, received = torch.stack((counts, theirs)).view(2, self.world, -1).sum(2).tolist()
        arrived = _AllToAll.apply(tokens, sent, received, self.group)
        # Tokens arrive sorted by sender, then by expert; sort them by expert.
        here = theirs.numel() // self.world
        expert = torch.arange(here, dtype=torch.int16, device=tokens.device).repeat(self.world)
        expert = expert.repeat_interleave(theirs, output_size=sum(received))  # output_size avoids synchronising again
        order = expert.argsort(stable=True)
        back = inverse_of(order)
        done = experts(take(arrived, order, back), theirs.view(self.world, -1).sum(0))
        returned: Tensor = _AllToAll.apply(take(done, back, order), received, sent, self.group)
        return returned


def apply_expert_parallel(model: Decoder, group: dist.ProcessGroup) -> None:
    """Shard the experts of every sparse layer over the ranks of `group`, along the expert dimension."""
    for index, block in model.blocks().items():
        if block.moe is None:
            continue
        for name, _ in list(block.moe.experts.named_parameters(recurse=False)):
            model.parameter_shards[f"layers.{index}.moe.experts.{name}"] = shard_parameter(
                block.moe.experts, name, 0, group
            )
        block.moe.exchange = AllToAllExchange(group)
