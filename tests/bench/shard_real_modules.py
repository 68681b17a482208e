"""Modules of transformers 5 and diffusers at the shapes of published models, and how their weights are placed.

A module is made on the device that it runs on, with the same values on every rank. `small` has narrow ones with the
same code, for a rehearsal on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

COLUMNS, ROWS = ["S(0)"], ["S(1)"]


@dataclass(frozen=True, slots=True)
class Real:
    """One module: `make(small)` returns it with its arguments, `placements` are those of its weights."""

    name: str
    make: Callable[[bool], tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]]
    how: str
    placements: dict[str, list[str]] = field(default_factory=dict)


def _llama(small: bool) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding

    wide = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    narrow = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**(narrow if small else wide), num_hidden_layers=1, attn_implementation="sdpa")
    x = torch.randn(1, 16 if small else 4096, config.hidden_size)
    angles = LlamaRotaryEmbedding(config)(x, torch.arange(x.shape[1])[None])
    return LlamaDecoderLayer(config, 0), (x,), {"position_embeddings": angles}


def _experts(small: bool) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    hidden, width, experts = (16, 32, 4) if small else (5120, 8192, 4)
    config = Llama4TextConfig(
        hidden_size=hidden,
        intermediate_size=width,
        intermediate_size_mlp=2 * width,
        num_local_experts=experts,
        num_experts_per_tok=1,
    )
    module = Llama4TextMoe(config)
    for parameter in module.parameters():  # some are made without values
        torch.nn.init.normal_(parameter, std=0.02)
    return module, (torch.randn(1, 32 if small else 2048, hidden),), {}


def _vision(small: bool) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers import ViTConfig, ViTModel

    wide = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 16,
    }
    narrow = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    config = ViTConfig(**(narrow if small else wide), num_hidden_layers=1, attn_implementation="sdpa")
    images = torch.randn(4 if small else 64, 3, config.image_size, config.image_size)
    return ViTModel(config, add_pooling_layer=False).eval(), (images,), {}


def _diffusion(small: bool) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    from diffusers.models.attention import BasicTransformerBlock

    width, heads, text = (32, 4, 16) if small else (1280, 20, 2048)
    module = BasicTransformerBlock(width, heads, width // heads, cross_attention_dim=text).eval()
    x, prompt = torch.randn(4, 8 if small else 1024, width), torch.randn(4, 4 if small else 77, text)
    return module, (x,), {"encoder_hidden_states": prompt}


def _residual(small: bool) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    from diffusers.models.resnet import ResnetBlock2D

    width, time, groups, side = (8, 8, 4, 8) if small else (640, 1280, 32, 64)
    module = ResnetBlock2D(in_channels=width, out_channels=2 * width, temb_channels=time, groups=groups).eval()
    return module, (torch.randn(4, width, side, side), torch.randn(4, time)), {}


MODULES = (
    Real(
        "Llama 3 8B block (transformers)",
        _llama,
        "tensor parallel",
        {
            **dict.fromkeys(("*q_proj.weight", "*k_proj.weight", "*v_proj.weight"), COLUMNS),
            **dict.fromkeys(("*gate_proj.weight", "*up_proj.weight"), COLUMNS),
            **dict.fromkeys(("*o_proj.weight", "*down_proj.weight"), ROWS),
        },
    ),
    Real(
        "Llama 4 Scout experts, 4 of 16 (transformers)",
        _experts,
        "expert parallel",
        {"experts.gate_up_proj": COLUMNS, "experts.down_proj": COLUMNS},
    ),
    Real(
        "ViT-L/16 layer with patches (transformers)",
        _vision,
        "tensor parallel",
        {
            **dict.fromkeys(("*q_proj.*", "*k_proj.*", "*v_proj.*", "*fc1.*"), COLUMNS),
            **dict.fromkeys(("*o_proj.weight", "*fc2.weight"), ROWS),
        },
    ),
    Real(
        "SDXL transformer block (diffusers)",
        _diffusion,
        "tensor parallel",
        {
            **dict.fromkeys(("*to_q.weight", "*to_k.weight", "*to_v.weight", "*net.0.proj.*"), COLUMNS),
            **dict.fromkeys(("*to_out.0.weight", "*net.2.weight"), ROWS),
        },
    ),
    Real("SDXL residual block of the U-Net (diffusers)", _residual, "output channels", {"conv*.weight": COLUMNS}),
)


class FeedForward(torch.nn.Module):
    """Two linear layers of Llama 3 8B's widths: one gathers its tokens before it, one scatters them after it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, hidden, bias=False), torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Attending(torch.nn.Module):
    """Causal attention of Llama 3 8B's widths with a residual, for any batch and length."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (torch.nn.Linear(width, width, bias=False) for _ in range(4))

    def heads_of(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(one(x) for one in (self.q, self.k, self.v))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.heads_of(x))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


class FusedAttending(Attending):
    """The same, its queries, keys and values made by one matrix."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        del self.q, self.k, self.v
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)

    def heads_of(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(x).chunk(3, -1)
