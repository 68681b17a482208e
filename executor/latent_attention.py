"""Multi-head latent attention: keys and values of all heads come from one narrow vector a token.

DeepSeek-V2 (arXiv 2405.04434), section 2.1. Widths: c the compressed vector of keys and values, n and r the parts of a
head without and with rotary positions, v a value head. The part with positions is one for all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from executor.attention import NORM_EPS, CausalAttention, rotate
from simulator.model import Model


class LatentAttention(nn.Module):
    """Takes the place of `executor.attention.Attention`. How many heads are here is read off the projections' outputs."""

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
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        narrow = x if self.wq_a is None or self.q_norm is None else self.q_norm(self.wq_a(x))
        q = self.wq_b(narrow).unflatten(-1, (-1, self.widths.qk_nope_head_dim + self.rope_dim))  # (B, S, heads, n + r)
        compressed, k_rope = self.wkv_a(x).split((self.widths.kv_lora_rank, self.rope_dim), dim=-1)
        kv = self.wkv_b(self.kv_norm(compressed))
        kv = kv.unflatten(-1, (-1, self.widths.qk_nope_head_dim + self.widths.v_head_dim))
        k_nope, v = kv.split((self.widths.qk_nope_head_dim, self.widths.v_head_dim), dim=-1)
        q_nope, q_rope = q.split((self.widths.qk_nope_head_dim, self.rope_dim), dim=-1)
        q_rope = rotate(q_rope, self.cos, self.sin)
        k_rope = rotate(_shared(k_rope)[:, :, None], self.cos, self.sin).expand(-1, -1, k_nope.shape[2], -1)
        q, k = torch.cat((q_nope, q_rope), dim=-1), torch.cat((k_nope, k_rope), dim=-1)
        out = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(out.transpose(1, 2).flatten(-2))


def _shared(tensor: Tensor) -> Tensor:
    """Return what every head reads as a plain tensor; ranks with different heads see parts of its gradient."""
    return tensor.to_local(grad_placements=[Partial()]) if isinstance(tensor, DTensor) else tensor
