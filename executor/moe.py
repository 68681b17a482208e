"""A sparse feed-forward layer: route each token to its best experts, run them on sorted tokens, add up.

Shapes: T tokens held here, k experts per token, E experts, f width of one expert, h hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

from executor.shards import local
from simulator.model import MixtureOfExperts as Shapes


class Experts(nn.Module):
    """The weights of the experts held here, and their product with tokens sorted by expert."""

    def __init__(self, hidden: int, width: int, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, width, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, width))
        self.w3 = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Take tokens (T k, h) in order of expert and how many each expert here has; return (T k, h)."""
        w1, w2, w3 = (local(w) for w in (self.w1, self.w2, self.w3))
        multiply = grouped if can_group(tokens) else looped
        ends = counts.cumsum(0).to(torch.int32)
        inner = functional.silu(multiply(tokens, w1, ends)) * multiply(tokens, w3, ends)
        return multiply(inner, w2, ends)


def can_group(tokens: Tensor) -> bool:
    """One kernel for all experts exists for bfloat16 on Hopper and newer; rows must be 16-byte aligned."""
    return (
        tokens.is_cuda and tokens.dtype is torch.bfloat16 and torch.cuda.get_device_capability(tokens.device) >= (9, 0)
    )


def grouped(tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """All experts in one kernel: (T k, x) with (E, y, x) to (T k, y)."""
    return functional.grouped_mm(tokens, weights.transpose(-2, -1), offs=ends)


def looped(tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """The same, one expert after the other. An expert without tokens still takes part, with a gradient of zero."""
    bounds = [0, *ends.tolist()]
    return torch.cat([tokens[bounds[e] : bounds[e + 1]] @ weights[e].T for e in range(len(weights))])


class MixtureOfExperts(nn.Module):
    """`run_experts` is what expert parallelism replaces: the experts here, or an exchange, the experts, and back."""

    def __init__(self, hidden: int, shapes: Shapes) -> None:
        super().__init__()
        self.experts_per_token = shapes.experts_per_token
        self.total = shapes.experts
        self.router = nn.Linear(hidden, shapes.experts, bias=False)
        self.experts = Experts(hidden, shapes.ffn, shapes.experts)
        self.exchange: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Take and return (B, S, h); both plain tensors, of the tokens to be routed here."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.route(tokens)
        order = ids.flatten().argsort(stable=True)  # token copies, sorted by expert
        counts = torch.bincount(ids.flatten(), minlength=self.total)
        source = order // self.experts_per_token
        sent = tokens[source]
        done = self.experts(sent, counts) if self.exchange is None else self.exchange(self.experts, sent, counts)
        done = done * weights.flatten()[order, None].to(done.dtype)
        return torch.zeros_like(tokens).index_add(0, source, done.to(tokens.dtype)).view_as(x)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (T, k), which add up to one, and expert numbers (T, k) (arXiv 2401.04088, section 2.1)."""
        gate = self.router.weight
        if isinstance(gate, DTensor):
            # Ranks that share the weight route different tokens, or hold a slice of each expert's width: either way
            # each sees a part of the gradient.
            gate = gate.to_local(grad_placements=[Partial()] * gate.device_mesh.ndim)
        scores = functional.linear(tokens, gate)
        probabilities = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
        best, ids = probabilities.topk(self.experts_per_token, dim=-1)
        return best / best.sum(-1, keepdim=True), ids
