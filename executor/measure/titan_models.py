"""Models of our shapes in torchtitan's own registry. Imports torchtitan, so `executor.measure.torchtitan` loads it
late.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torchtitan.config import ConfigManager
from torchtitan.models import llama3, qwen3
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer

from simulator.config.model import Model
from topology import codec

__all__ = ["ConfigManager", "Trainer", "register"]

SPEC = "meshwright_calibration"

_registered: set[str] = set()


def register(model: Model, family: str, *, flavor: str, text: bool) -> str:
    """Register the model's shape with torchtitan, with random data unless `text` is given; return its
    registered name.
    """
    name = f"{SPEC}_{codec.fingerprint(model)}{'_text' if text else ''}"
    if name in _registered:
        return name
    _registered.add(name)
    spec, shape = _qwen3(model) if family == "qwen3" else _llama3(model)
    spec = dataclasses.replace(spec, model_args={flavor: shape}, build_validator_fn=None)
    if not text:
        spec = dataclasses.replace(
            spec,
            build_tokenizer_fn=None,
            build_dataloader_fn=lambda **named: _RandomTokens(model.vocab, named["job_config"]),
        )
    register_train_spec(name, spec)
    return name


def _llama3(model: Model) -> tuple[Any, Any]:
    """Return torchtitan's train spec and model arguments of a Llama of this shape."""
    return llama3.get_train_spec(), TransformerModelArgs(
        dim=model.hidden,
        n_layers=model.layers,
        n_heads=model.heads,
        n_kv_heads=model.kv_heads,
        vocab_size=model.vocab,
        # torchtitan rounds the width up to `multiple_of`, so with a small factor the result is model.ffn itself.
        ffn_dim_multiplier=0.01,
        multiple_of=model.ffn,
        rope_theta=500000,
    )


def _qwen3(model: Model) -> tuple[Any, Any]:
    """Return torchtitan's train spec and model arguments of a Qwen 3 of this shape; experts as in its 30B-A3B."""
    moe = model.moe
    experts = {} if moe is None else {"num_experts": moe.experts, "top_k": moe.experts_per_token}
    return qwen3.get_train_spec(), Qwen3ModelArgs(
        dim=model.hidden,
        n_layers=model.layers,
        n_heads=model.heads,
        n_kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        hidden_dim=model.ffn,
        vocab_size=model.vocab,
        qk_norm=True,
        rope_theta=1000000,
        enable_weight_tying=model.tied_embeddings,
        moe_enabled=moe is not None,
        moe_inter_dim=moe.ffn if moe is not None else 0,
        moe_args=MoEArgs(
            **experts, num_shared_experts=0, score_func="softmax", route_norm=True, score_before_experts=False
        ),
    )


class _RandomTokens:
    """An endless loader of one batch of random tokens, so that a step has no data-loading cost."""

    def __init__(self, vocab: int, config: Any) -> None:
        size = (config.training.local_batch_size, config.training.seq_len + 1)
        self.tokens = torch.randint(vocab, size)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            yield {"input": self.tokens[:, :-1]}, self.tokens[:, 1:]

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        del state
