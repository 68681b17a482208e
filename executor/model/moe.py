"""A mixture-of-experts layer: route each token to its top-k experts, run them on sorted tokens, add up the results.

Shapes: T tokens on this rank, k experts per token, E experts, f width of one expert, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.model.attention import InputProjection, OutputProjection, apply_linear, identity, project_each
from executor.model.permute import inverse_of, take, weighted_sum
from executor.model.saved_results import as_autocast, product
from simulator.config.model import MixtureOfExperts as Shapes


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202). Tensor parallelism replaces `project_in` and `project_out`."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, width, bias=False)
        self.w2 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(hidden, width, bias=False)
        self.project_in: InputProjection = project_each
        self.project_out: OutputProjection = apply_linear

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project_in(x, (self.w1, self.w3))
        return self.project_out(functional.silu(gate) * up, self.w2)


class Experts(nn.Module):
    """The weights of the experts on this rank, applied to tokens that are sorted by expert."""

    def __init__(self, hidden: int, width: int, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, width, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, width))
        self.w3 = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Take tokens (T k, h) sorted by expert and the number of tokens of each local expert; return (T k, h)."""
        # Autocast does not cover grouped matmuls.
        tokens, w1, w2, w3 = (as_autocast(x) for x in (tokens, self.w1, self.w2, self.w3))
        multiply, ends = grouped, counts.cumsum(0, dtype=torch.int32)
        if not can_group(tokens, w1):
            multiply, ends = looped, ends.cpu()  # the host waits once for all three products
        inner = functional.silu(multiply(tokens, w1, ends)) * multiply(tokens, w3, ends)
        return multiply(inner, w2, ends)


def can_group(tokens: Tensor, weights: Tensor) -> bool:
    """Return whether one kernel can run all experts: bfloat16, Hopper or newer, rows aligned to 16 bytes."""
    aligned = not any(size * weights.element_size() % 16 for size in weights.shape[1:])
    return aligned and tokens.is_cuda and tokens.dtype is torch.bfloat16 and _capability(tokens.device) >= (9, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def grouped(tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return all experts' matmuls by one kernel: (T k, x) with (E, y, x) to (T k, y)."""
    return functional.grouped_mm(tokens, weights.transpose(-2, -1), offs=ends)


@torch.compiler.disable  # the numbers of rows change with every step
def looped(tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return the same, one expert after the other; `ends` is on the CPU. Weights of an expert without tokens have a
    gradient of zero.
    """
    results: Tensor = _Looped.apply(tokens, weights, ends)
    return results


class _Looped(torch.autograd.Function):
    """Products write to their rows of one tensor: autograd of slices would make a whole tensor of zeros for each."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weights)
        ctx.bounds = [0, *ends.tolist()]
        results = tokens.new_empty(len(tokens), weights.shape[1])
        for weight, (start, end) in zip(weights, pairwise(ctx.bounds), strict=True):
            torch.mm(tokens[start:end], weight.T, out=results[start:end])
        return results

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weights = ctx.saved_tensors
        needs_tokens, needs_weights, _ = ctx.needs_input_grad
        of_tokens = torch.empty_like(tokens) if needs_tokens else None
        of_weights = torch.empty_like(weights) if needs_weights else None
        for expert, (start, end) in enumerate(pairwise(ctx.bounds)):
            if of_tokens is not None:
                torch.mm(grad[start:end], weights[expert], out=of_tokens[start:end])
            if of_weights is not None:
                torch.mm(grad[start:end].T, tokens[start:end], out=of_weights[expert])
        return of_tokens, of_weights, None


class MixtureOfExperts(nn.Module):
    """Routed experts, and with `shared` one expert for all tokens (DeepSeekMoE, arXiv 2401.06066).

    Expert parallelism sets `exchange`, which sends tokens to their experts and returns the results. Tensor parallelism
    over the experts' width sets `gather_tokens` and `reduce_tokens`.
    """

    def __init__(self, hidden: int, shapes: Shapes) -> None:
        super().__init__()
        self.experts_per_token = shapes.experts_per_token
        self.total = shapes.experts
        self.router = nn.Linear(hidden, shapes.experts, bias=False)
        self.experts = Experts(hidden, shapes.ffn, shapes.experts)
        # Affects the choice of experts, not their weights; gradients do not train it (arXiv 2408.15664). Always zero.
        self.router_bias = (
            nn.Parameter(torch.empty(shapes.experts), requires_grad=False) if shapes.router_bias else None
        )
        self.shared = FeedForward(hidden, shapes.shared_ffn) if shapes.shared_ffn else None
        self.shared_gate = nn.Linear(hidden, 1, bias=False) if shapes.shared_gate else None
        self.exchange: nn.Module | None = None
        self.gather_tokens: Callable[[Tensor], Tensor] = identity
        self.reduce_tokens: Callable[[Tensor], Tensor] = identity

    def forward(self, x: Tensor) -> Tensor:
        """Take and return (B, S, h), or the same with other first dimensions."""
        x = self.gather_tokens(as_autocast(x))  # cast before the copies for the experts
        out = self.routed(x)
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = shared * apply_linear(x, self.shared_gate).sigmoid()
            out = out + shared
        return self.reduce_tokens(out)

    def routed(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for each token."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.route(tokens)
        # Token copies sorted by expert; sorting int16 takes half as long as int64.
        experts, order = ids.flatten().to(torch.int16).sort(stable=True)
        # Not `bincount`, which synchronises the host with the device.
        every = torch.arange(self.total, dtype=torch.int16, device=ids.device)
        ends = torch.searchsorted(experts, every, right=True)
        counts = ends.diff(prepend=ends.new_zeros(1))
        back = inverse_of(order)
        sent = take(tokens, order, back, copies=self.experts_per_token)
        done = self.experts(sent, counts) if self.exchange is None else self.exchange(self.experts, sent, counts)
        # Back in the original order: the k copies of a token are adjacent.
        done = take(done, back, order).unflatten(0, (-1, self.experts_per_token))
        return weighted_sum(weights.to(done.dtype), done).to(tokens.dtype).view_as(x)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (T, k), which add up to one, and expert numbers (T, k) (arXiv 2401.04088, section 2.1)."""
        scores = product(tokens, self.router.weight)
        probabilities = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
        if self.router_bias is None:
            best, ids = probabilities.topk(self.experts_per_token, dim=-1)
        else:
            ids = (probabilities + self.router_bias).topk(self.experts_per_token, dim=-1).indices
            best = probabilities.gather(-1, ids)
        return best / best.sum(-1, keepdim=True), ids
