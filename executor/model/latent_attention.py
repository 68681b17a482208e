"""Multi-head latent attention: keys and values of all heads come from one narrow vector a token.

DeepSeek-V2 (arXiv 2405.04434), section 2.1. Widths: c the compressed vector of keys and values, n and r the parts of a
head without and with rotary positions, v a value head. The part with positions is one for all heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from executor.model.attention import (
    NORM_EPS,
    CausalAttention,
    OutputProjection,
    apply_linear,
    heads_first,
    heads_last,
    identity,
)
from executor.model.rotary import rotate
from simulator.config.model import Model


class LatentAttention(nn.Module):
    """Replaces `executor.model.attention.Attention`; the number of heads on this rank follows from the projections."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Model, window: int) -> None:
        super().__init__()
        widths = model.latent
        if widths is None:
            raise ValueError(f"{model.name} has no latent attention")
        self.widths = widths
        self.rope_dim = widths.qk_rope_head_dim
        query = model.heads * model.qk_dim
        self.wq_a = nn.Linear(model.hidden, widths.q_lora_rank, bias=False) if widths.q_lora_rank else None
        self.q_norm = nn.RMSNorm(widths.q_lora_rank, eps=NORM_EPS) if widths.q_lora_rank else None
        self.wq_b = nn.Linear(widths.q_lora_rank or model.hidden, query, bias=False)
        self.wkv_a = nn.Linear(model.hidden, widths.kv_lora_rank + self.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(widths.kv_lora_rank, eps=NORM_EPS)
        both = model.heads * (widths.qk_nope_head_dim + widths.v_head_dim)
        self.wkv_b = nn.Linear(widths.kv_lora_rank, both, bias=False)
        self.wo = nn.Linear(model.heads * widths.v_head_dim, model.hidden, bias=False)
        self.core: nn.Module = CausalAttention(window)
        self.gather_tokens: Callable[[Tensor], Tensor] = identity
        self.project_out: OutputProjection = apply_linear
        self.tokens_first = False
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gather_tokens(x)
        narrow = x if self.wq_a is None or self.q_norm is None else self.q_norm(apply_linear(x, self.wq_a))
        q = apply_linear(narrow, self.wq_b).unflatten(
            -1, (-1, self.widths.qk_nope_head_dim + self.rope_dim)
        )  # (.., heads, n + r)
        compressed, k_rope = apply_linear(x, self.wkv_a).split((self.widths.kv_lora_rank, self.rope_dim), dim=-1)
        kv = apply_linear(self.kv_norm(compressed), self.wkv_b)
        kv = kv.unflatten(-1, (-1, self.widths.qk_nope_head_dim + self.widths.v_head_dim))
        k_nope, v = kv.split((self.widths.qk_nope_head_dim, self.widths.v_head_dim), dim=-1)
        q_nope, q_rope = q.split((self.widths.qk_nope_head_dim, self.rope_dim), dim=-1)
        q_rope = rotate(q_rope, self.cos, self.sin)
        k_rope = rotate(k_rope[:, :, None], self.cos, self.sin).expand(-1, -1, k_nope.shape[2], -1)
        q, k = torch.cat((q_nope, q_rope), dim=-1), torch.cat((k_nope, k_rope), dim=-1)
        out = self.core(*(heads_first(t, tokens_first=self.tokens_first) for t in (q, k, v)))
        return self.project_out(heads_last(out, tokens_first=self.tokens_first), self.wo)
