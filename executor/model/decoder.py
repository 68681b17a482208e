"""A Llama-like decoder built from the shapes of a `simulator.config.model.Model`, without any parallelism.

Parallelism is applied from outside (`executor.parallel.parallelize`), which shards parameters in place and replaces the
callables that communicate: `core` of attention; `gather_tokens`, `reduce_tokens` and `exchange` of a sparse layer;
`project_in` and `project_out`, the first and last matmuls of attention and feed-forward. Parameters have the names of
the whole model even when only some layers are built, so that `layers.7.attention.wq.weight` is the same everywhere.

Initial weights are the same under every plan: each rank draws one whole parameter at a time from its name and the run's
seed, and keeps its part. Nothing is communicated.

Shapes in comments: B sequences, S tokens of each held here, h hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from executor.launch.legal import refuse_unsupported
from executor.model.attention import NORM_EPS, Attention
from executor.model.latent_attention import LatentAttention
from executor.model.moe import FeedForward, MixtureOfExperts
from executor.model.shards import ParameterShard, local_shard, local_tensor
from simulator.config.model import Model

ROPE_BASE = 500_000.0  # Llama 3's value; the shapes do not include it and costs do not depend on it
STD = 0.02


class Block(nn.Module):
    """One layer. `feed_forward` or `moe` is None."""

    def __init__(self, model: Model, index: int) -> None:
        super().__init__()
        sparse, window = model.layer_kinds[index]
        self.attention_norm = nn.RMSNorm(model.hidden, eps=NORM_EPS)
        self.attention = Attention(model, window) if model.latent is None else LatentAttention(model, window)
        self.ffn_norm = nn.RMSNorm(model.hidden, eps=NORM_EPS)
        self.feed_forward = None if sparse else FeedForward(model.hidden, model.ffn)
        self.moe = MixtureOfExperts(model.hidden, model.moe) if sparse and model.moe else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        feed = self.feed_forward if self.moe is None else self.moe
        assert feed is not None  # noqa: S101 - one of the two is there
        out: Tensor = feed(self.ffn_norm(x))
        return x + out


class Decoder(nn.Module):
    """The whole model, or a pipeline stage of it: `layers` are indices in the whole model; embedding and head are None
    on stages without them.
    """

    def __init__(
        self, model: Model, layers: Iterable[int] | None = None, *, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        refuse_unsupported(model)
        self.tied = model.tied_embeddings
        # By name, for parameters that tensor or expert parallelism has sharded.
        self.parameter_shards: dict[str, ParameterShard] = {}
        self.tok_embeddings = nn.Embedding(model.vocab, model.hidden) if first else None
        indices = range(model.layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(index): Block(model, index) for index in indices})
        self.norm = nn.RMSNorm(model.hidden, eps=NORM_EPS) if last else None
        self.output = nn.Linear(model.hidden, model.vocab, bias=False) if last else None
        self.tie()

    def blocks(self) -> dict[str, Block]:
        """Return the layers of this stage by their index in the whole model."""
        return cast("dict[str, Block]", dict(self.layers.items()))

    def tie(self) -> None:
        """Make the head use the embedding's parameter; call it again after parameters have been replaced."""
        if self.tied and self.output is not None and self.tok_embeddings is not None:
            self.output.weight = self.tok_embeddings.weight

    def set_positions(self, positions: Tensor, dtype: torch.dtype) -> None:
        """Set the positions of this rank's tokens in the sequence; `positions` is (S,) of integers."""
        tables: dict[int, tuple[Tensor, Tensor]] = {}  # shared by all layers
        for block in self.blocks().values():
            width, rest = block.attention.rope_dim, (1, 1) if block.attention.tokens_first else (1,)
            if width not in tables:
                half = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
                angles = positions.to(torch.float64)[:, None] * ROPE_BASE ** (-half / width)
                angles = torch.cat((angles, angles), dim=-1).unflatten(0, (-1, *rest))
                wide = torch.promote_types(dtype, torch.float32)
                tables[width] = angles.cos().to(wide), angles.sin().to(wide)
            block.attention.cos, block.attention.sin = tables[width]

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Take token ids (B, S), or hidden states (B, S, h) if not first; return hidden states or logits (B, S, V), or
        the sum of the loss if `targets` are given and the head computes it.

        With sequence parallelism hidden states and logits are tokens first, (S, B, ..).
        """
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for block in self.layers.values():
            x = block(x)
        if self.norm is not None and self.output is not None:
            x = self.norm(x)
            x = self.output(x) if targets is None else self.output(x, targets)
        return x


def draw(name: str, shape: torch.Size, *, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the whole initial value of the parameter `name`: ones for norms, normal numbers for the rest."""
    if len(shape) == 1 and "norm" in name:
        return torch.ones(shape, device=device, dtype=dtype)
    if name.endswith("bias"):
        return torch.zeros(shape, device=device, dtype=dtype)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:6], "little"))
    # Always drawn in float32: for other types the generator would give different numbers.
    return (torch.randn(shape, generator=generator, device=device, dtype=torch.float32) * STD).to(dtype)


@torch.no_grad()
def init_weights(model: nn.Module, *, seed: int, parameter_shards: Mapping[str, ParameterShard] | None = None) -> None:
    """Fill every parameter of `model` (not on the meta device) in place. `parameter_shards` has its sharded parameters,
    by name.
    """
    for name, parameter in model.named_parameters():
        here, shard = local_tensor(parameter), (parameter_shards or {}).get(name)
        shape = parameter.shape if shard is None else shard.full_shape
        whole = draw(name, shape, seed=seed, device=here.device, dtype=here.dtype)
        here.copy_(local_shard(whole, parameter, shard))
