"""Adapters next to frozen linear layers, and modules that are not trained."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from executor.model.decoder import Decoder
from executor.model.saved_results import product
from simulator.config.adapter import ALL_LINEAR, Adapter, frozen_parts, projections_named
from simulator.config.model import Model

SCALING = 2.0  # alpha over rank; costs do not depend on it
# Names of a block's linear layers by projection.
_LAYERS = {
    "q": "attention.wq",
    "k": "attention.wk",
    "v": "attention.wv",
    "o": "attention.wo",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}
_NORMS = ("attention_norm", "ffn_norm", "attention.q_norm", "attention.k_norm")


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with a trained product of two thin matrices next to it."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__(frozen.in_features, frozen.out_features, bias=frozen.bias is not None, device="meta")
        self.weight, self.bias = frozen.weight, frozen.bias
        self.lora_a = nn.Parameter(frozen.weight.new_empty(rank, frozen.in_features))
        self.lora_b = nn.Parameter(frozen.weight.new_empty(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Take x (..., in); return (..., out)."""
        thin = functional.linear(x, self.lora_a)
        return product(x, self.weight, self.bias) + functional.linear(thin, self.lora_b) * SCALING


def train_only(decoder: Decoder, model: Model, adapter: Adapter | None) -> Decoder:
    """Freeze the parameters that `adapter` does not train, and add adapters; return the decoder."""
    if adapter is None:
        return decoder
    if adapter.freezes_all:
        decoder.requires_grad_(False)
        names = projections_named(adapter.target_modules, fused=False)
        for block in decoder.blocks().values():
            for path in [_LAYERS[name] for name in (_LAYERS if names == (ALL_LINEAR,) else names) if name in _LAYERS]:
                holder, _, name = path.rpartition(".")
                inner = block.get_submodule(holder)
                setattr(inner, name, AdaptedLinear(cast("nn.Linear", inner.get_submodule(name)), adapter.rank))
        return decoder
    _freeze(decoder, frozen_parts(adapter.target_modules, model))
    return decoder


def _freeze(decoder: Decoder, parts: frozenset[str]) -> None:
    ends = {"embedding": decoder.tok_embeddings, "final_norm": decoder.norm, "head": decoder.output}
    still: list[nn.Module | None] = [module for part, module in ends.items() if part in parts]
    for block in decoder.blocks().values():
        inside = dict(block.named_modules())
        still += [inside.get(path) for part, path in _LAYERS.items() if part in parts]
        still += [inside.get(path) for path in _NORMS if "norms" in parts]
    for module in still:
        if module is not None:
            module.requires_grad_(requires_grad=False)
