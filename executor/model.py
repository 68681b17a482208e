"""A Llama-like decoder made from the shapes of a `simulator.model.Model`, with nothing parallel in it.

Parallelisms are applied from outside (`executor.parallelize`): they shard parameters in place and replace the two
callables that communicate, `Attention.core` and `MixtureOfExperts.run_experts`. Names of parameters are those of the
whole model even when only some layers are built, so that a stage of a pipeline and the whole agree on what
`layers.7.attention.wq.weight` is.

Shapes in comments: B sequences, S tokens of each held here, h hidden, a heads, d head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.legal import refuse_unsupported
from executor.moe import MixtureOfExperts
from simulator.model import Model

ROPE_BASE = 500_000.0  # Llama 3's; the shapes do not say it and no cost depends on it
NORM_EPS = 1e-5


class CausalAttention(nn.Module):
    """Attention of one rank that holds whole sequences; context parallelism puts a ring in its place."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Take q (B, a, S, d) and k, v (B, a_kv, S, d); return (B, a, S, d)."""
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Attention(nn.Module):
    """Grouped-query attention with rotary positions. How many heads are here is read off the projections' outputs."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.wq = nn.Linear(model.hidden, q, bias=model.qkv_bias)
        self.wk = nn.Linear(model.hidden, kv, bias=model.qkv_bias)
        self.wv = nn.Linear(model.hidden, kv, bias=model.qkv_bias)
        self.wo = nn.Linear(q, model.hidden, bias=False)
        self.q_norm = nn.RMSNorm(model.head_dim, eps=NORM_EPS) if model.qk_norm else None
        self.k_norm = nn.RMSNorm(model.head_dim, eps=NORM_EPS) if model.qk_norm else None
        self.core: nn.Module = CausalAttention()
        # (S, 1, d) each. Buffers and not arguments: mixed precision casts the arguments of a block, and angles in
        # bfloat16 would blur positions.
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))  # (B, S, heads here, d)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        out = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(out.transpose(1, 2).flatten(-2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + d/2) of each head by the angle of the token's position (arXiv 2104.09864)."""
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos + turned * sin).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, width, bias=False)
        self.w2 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer. `feed_forward` or `moe` is None."""

    def __init__(self, model: Model, index: int) -> None:
        super().__init__()
        sparse = model.layer_is_moe(index)
        self.attention_norm = nn.RMSNorm(model.hidden, eps=NORM_EPS)
        self.attention = Attention(model)
        self.ffn_norm = nn.RMSNorm(model.hidden, eps=NORM_EPS)
        self.feed_forward = None if sparse else FeedForward(model.hidden, model.ffn)
        self.moe = MixtureOfExperts(model.hidden, model.moe) if sparse and model.moe else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        feed: Callable[[Tensor], Tensor] = self.feed_forward if self.moe is None else self.moe
        return x + feed(self.ffn_norm(x))


class Decoder(nn.Module):
    """The whole model, or a pipeline stage of it: `layers` are indices in the whole, ends are None where not held."""

    def __init__(
        self, model: Model, layers: Iterable[int] | None = None, *, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        refuse_unsupported(model)
        self.tied = model.tied_embeddings
        self.head_dim = model.head_dim
        self.tok_embeddings = nn.Embedding(model.vocab, model.hidden) if first else None
        indices = range(model.layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(index): Block(model, index) for index in indices})
        self.norm = nn.RMSNorm(model.hidden, eps=NORM_EPS) if last else None
        self.output = nn.Linear(model.hidden, model.vocab, bias=False) if last else None
        self.tie()

    def tie(self) -> None:
        """Make the head use the embedding's parameter; to be repeated when parameters have been replaced."""
        if self.tied and self.output is not None and self.tok_embeddings is not None:
            self.output.weight = self.tok_embeddings.weight

    def set_positions(self, positions: Tensor, dtype: torch.dtype) -> None:
        """Say which positions of the sequence this rank's tokens have; `positions` is (S,) of integers."""
        device = positions.device
        half = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device)
        angles = positions.to(torch.float64)[:, None] * ROPE_BASE ** (-half / self.head_dim)
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        wide = torch.promote_types(dtype, torch.float32)
        cos, sin = angles.cos().to(wide), angles.sin().to(wide)
        for module in self.modules():
            if isinstance(module, Attention):
                module.cos, module.sin = cos, sin  # one table for all layers

    def forward(self, x: Tensor) -> Tensor:
        """Take token ids (B, S), or hidden states (B, S, h) if not first; return hidden states or logits (B, S, V)."""
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for block in self.layers.values():
            x = block(x)
        if self.norm is not None and self.output is not None:
            x = self.output(self.norm(x))
        return x
