"""Grouped-query attention with rotary positions, whole or within a sliding window.

Shapes in comments: B sequences, S tokens of each on this rank, h hidden size, a heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.model.rotary import rotate
from executor.model.saved_results import attention, product
from simulator.config.model import Model

NORM_EPS = 1e-5
InputProjection = Callable[[Tensor, Sequence[nn.Linear]], tuple[Tensor, ...]]
OutputProjection = Callable[[Tensor, nn.Linear], Tensor]


def project_each(x: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Return each of `linears` applied to `x`."""
    return tuple(apply_linear(x, linear) for linear in linears)


def apply_linear(x: Tensor, linear: nn.Linear) -> Tensor:
    """Return a linear layer applied to `x`; special ones, such as one with an adapter, compute it themselves."""
    if type(linear) is not nn.Linear:
        adapted: Tensor = linear(x)
        return adapted
    return product(x, linear.weight, linear.bias)


def identity(x: Tensor) -> Tensor:
    return x


def rms_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """Return `norm` applied to `x`, in the type of `x`, since torch has no kernel for mixed types (as under
    autocast).
    """
    return functional.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)


class CausalAttention(nn.Module):
    """Attention of one rank that holds whole sequences; context parallelism replaces it by a ring.

    With `window` w > 0 a query sees its own key and the w - 1 before it (Mistral, arXiv 2310.06825).
    """

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Take q (B, a, S, d) and k, v (B, a_kv, S, d); return (B, a, S, d)."""
        tokens = q.shape[2]
        if q.dtype.itemsize > 2:
            # No fused kernel takes grouped keys in wide types: torch would store all scores instead.
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        grouped = q.shape[1] != k.shape[1]
        with attention():
            if not 0 < self.window < tokens:
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            if q.is_cuda and q.dtype in {torch.bfloat16, torch.float16} and q.shape[-1] == v.shape[-1]:
                return _windowed_flash(q, k, v, self.window)
            at = torch.arange(tokens, device=q.device)
            behind = at[:, None] - at[None, :]
            seen = (behind >= 0) & (behind < self.window)
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)


def _windowed_flash(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Return attention by the flash kernel with a window; the public function takes only a mask of all scores, all of
    which it reads.
    """
    tokens = q.shape[2]
    out: Tensor = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 - as above
        *(t.transpose(1, 2) for t in (q, k, v)),
        None,
        None,
        tokens,
        tokens,
        0.0,
        True,
        False,
        window_size_left=window - 1,
        window_size_right=0,
    )[0]
    return out.transpose(1, 2)


class Attention(nn.Module):
    """Attention of one layer; the number of heads on this rank follows from the sizes of the projections.

    `tokens_first`: hidden states are (S, B, h), as sequence parallelism lays them out. Attention reads both layouts
    through views. `project_in` and `project_out` are replaced by tensor parallelism, `core` by context parallelism.
    """

    # (S, 1, d) each, or (S, 1, 1, d) with tokens first. Buffers, not arguments: mixed precision casts the arguments of
    # a block, and bfloat16 angles would be too coarse.
    cos: Tensor
    sin: Tensor

    def __init__(self, model: Model, window: int) -> None:
        super().__init__()
        self.head_dim = self.rope_dim = model.head_dim
        q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.wq = nn.Linear(model.hidden, q, bias=model.qkv_bias)
        self.wk = nn.Linear(model.hidden, kv, bias=model.qkv_bias)
        self.wv = nn.Linear(model.hidden, kv, bias=model.qkv_bias)
        self.wo = nn.Linear(q, model.hidden, bias=False)
        self.q_norm = nn.RMSNorm(model.head_dim, eps=NORM_EPS) if model.qk_norm else None
        self.k_norm = nn.RMSNorm(model.head_dim, eps=NORM_EPS) if model.qk_norm else None
        self.core: nn.Module = CausalAttention(window)
        self.project_in: InputProjection = project_each
        self.project_out: OutputProjection = apply_linear
        self.tokens_first = False
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project_in(x, (self.wq, self.wk, self.wv))
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))  # (B, S, heads here, d) or (S, B, ..)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm), rms_norm(k, self.k_norm)
        q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        out = self.core(*(heads_first(t, tokens_first=self.tokens_first) for t in (q, k, v)))
        return self.project_out(heads_last(out, tokens_first=self.tokens_first), self.wo)


def heads_first(x: Tensor, *, tokens_first: bool) -> Tensor:
    """Return (B, a, S, d) of (B, S, a, d), or of (S, B, a, d) with tokens first; a view."""
    return x.permute(1, 2, 0, 3) if tokens_first else x.transpose(1, 2)


def heads_last(x: Tensor, *, tokens_first: bool) -> Tensor:
    """Return (B, S, a d), or (S, B, a d) with tokens first, of (B, a, S, d); a view if the kernel kept the layout."""
    return (x.permute(2, 0, 1, 3) if tokens_first else x.transpose(1, 2)).flatten(-2)
