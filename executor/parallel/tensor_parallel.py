"""Tensor parallelism, with or without sequence parallelism.

Input projections are sharded by output dimension (column-parallel), output projections by input dimension
(row-parallel), so that a pair needs one sum (Megatron-LM, arXiv 1909.08053). Without sequence parallelism that sum is
an all-reduce and everything between pairs is computed on each rank; with it (arXiv 2205.05198) tokens are sharded
between pairs: the sum is a reduce-scatter, followed by an all-gather before the next pair. Per layer: two of each in
the forward pass, and their mirror images in the backward pass.

Parameters are plain tensors that are sharded explicitly: DTensor's Python dispatch for every operator would cost the
host 9 ms more per layer (`tests/bench/host_cost.py`). Sharded tokens are the first dimension, (S, B, h), as in
Megatron-LM, so that gathered tokens of several sequences are in order without a copy. The four collectives are torch's
functional ones, which the compiler can trace:

    all_gather       all ranks' tokens, concatenated along the first dimension    backward: reduce-scatter
    reduce_scatter   this rank's tokens of the sum over ranks                     backward: all-gather
    copy_to_ranks    the same tensor on every rank                                backward: all-reduce
    all_reduce       the sum over ranks                                           backward: identity
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from executor.model.attention import Attention
from executor.model.decoder import Block, Decoder
from executor.model.latent_attention import LatentAttention
from executor.model.saved_results import product, save_or_replay
from executor.model.shards import ParameterShard, shard_parameter
from executor.parallel.tensor_overlap import overlap_block

_FUNCTIONAL = torch.ops._c10d_functional  # noqa: SLF001 - the public functions wrap every result in a tensor subclass


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return (W R, ..) of every rank's (R, ..)."""
    whole: Tensor = _AllGather.apply(x, dist.get_world_size(group), group.group_name)
    return whole


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows (R, ..) of the sum of every rank's (W R, ..); saved under selective recomputation."""
    share: Tensor = _ReduceScatter.apply(x, dist.get_world_size(group), group.group_name)
    return share


def copy_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    same: Tensor = _CopyToRanks.apply(x, group.group_name)
    return same


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total: Tensor = _AllReduce.apply(x, group.group_name)
    return total


def _gathered(x: Tensor, ranks: int, name: str) -> Tensor:
    moving = _FUNCTIONAL.all_gather_into_tensor.default(x.contiguous(), ranks, name)
    whole: Tensor = _FUNCTIONAL.wait_tensor.default(moving)
    return whole


def _scattered(x: Tensor, ranks: int, name: str) -> Tensor:
    moving = _FUNCTIONAL.reduce_scatter_tensor.default(x.contiguous(), "sum", ranks, name)
    share: Tensor = _FUNCTIONAL.wait_tensor.default(moving)
    return share


def _summed(x: Tensor, name: str) -> Tensor:
    total: Tensor = _FUNCTIONAL.wait_tensor.default(_FUNCTIONAL.all_reduce.default(x.contiguous(), "sum", name))
    return total


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, name: str) -> Tensor:
        ctx.ranks, ctx.name = ranks, name
        return _gathered(x, ranks, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grad, ctx.ranks, ctx.name), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, name: str) -> Tensor:
        ctx.ranks, ctx.name = ranks, name
        return (
            _scattered(x, ranks, name)
            if torch.compiler.is_compiling()
            else save_or_replay(lambda: _scattered(x, ranks, name))
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, ctx.ranks, ctx.name), None, None


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.name), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:  # noqa: ARG004 - autograd's
        return _summed(x, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 - as above
        return grad, None


class TokenLayout:
    """A tensor-parallel group, and how tokens are laid out between layers: sharded (sequence parallelism) or whole."""

    def __init__(self, group: dist.ProcessGroup, *, sequence_parallel: bool) -> None:
        self.group, self.tokens_first = group, sequence_parallel

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Return all tokens (S, B, h) from this rank's (S / tp, B, h); without sequence parallelism x itself."""
        return all_gather(x, self.group) if self.tokens_first else copy_to_ranks(x, self.group)

    def reduce_tokens(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of the sum over ranks, or all tokens of it."""
        return reduce_scatter(x, self.group) if self.tokens_first else all_reduce(x, self.group)

    def project_in(self, x: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """Take tokens as laid out between layers; return all of them projected to this rank's columns."""
        whole = self.gather_tokens(x)
        return tuple(product(whole, linear.weight, linear.bias) for linear in linears)

    def project_out(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """Take all tokens of this rank's width; return their projection, laid out as between layers."""
        return self.reduce_tokens(product(x, linear.weight))


class ShardedEmbedding(nn.Embedding):
    """An embedding sharded by vocabulary. The rank that has a token's row contributes it; the others add zeros."""

    layout: TokenLayout
    first: int  # token id of the first local row

    def forward(self, tokens: Tensor) -> Tensor:
        """Take token ids (B, S); return hidden states, laid out as between layers."""
        column = (tokens.t() if self.layout.tokens_first else tokens) - self.first
        absent = (column < 0) | (column >= self.weight.shape[0])
        rows = functional.embedding(column.masked_fill(absent, 0), self.weight)
        return self.layout.reduce_tokens(rows.masked_fill(absent[..., None], 0))


class ShardedHead(nn.Linear):
    """An output layer sharded by vocabulary; its logits stay sharded, as VocabularyLoss takes them."""

    layout: TokenLayout

    def forward(self, x: Tensor) -> Tensor:
        return product(self.layout.gather_tokens(x), self.weight)


def apply_tensor_parallel(
    model: Decoder, group: dist.ProcessGroup, *, sequence_parallel: bool, expert_parallel: bool, overlap: str = "none"
) -> None:
    """Shard a decoder over `group`.

    With `expert_parallel` each rank holds whole experts, so each rank routes its own tokens; otherwise each rank takes
    a slice of every expert's width. `overlap` is the plan's tp_overlap; see executor.parallel.tensor_overlap.
    """
    layout = TokenLayout(group, sequence_parallel=sequence_parallel)
    if model.tok_embeddings is not None:
        vocab, hidden = model.tok_embeddings.weight.shape
        embedding = ShardedEmbedding(vocab, hidden, device="meta")
        embedding.layout, embedding.weight = layout, model.tok_embeddings.weight
        embedding.first = -(-vocab // dist.get_world_size(group)) * dist.get_rank(group)
        model.tok_embeddings = embedding
        model.parameter_shards["tok_embeddings.weight"] = shard_parameter(embedding, "weight", 0, group)
    if model.output is not None:
        vocab, hidden = model.output.weight.shape
        head = ShardedHead(hidden, vocab, bias=False, device="meta")
        head.layout, head.weight = layout, model.output.weight
        model.output = head
        model.parameter_shards["output.weight"] = shard_parameter(head, "weight", 0, group)
    if model.norm is not None and sequence_parallel:
        model.parameter_shards["norm.weight"] = shard_parameter(model.norm, "weight", None, group)
    model.tie()
    for index, block in model.blocks().items():
        for name, made in _shard_block(block, layout, expert_parallel=expert_parallel).items():
            model.parameter_shards[f"layers.{index}.{name}"] = made
        overlap_block(block, overlap, group)


def _shard_block(block: Block, layout: TokenLayout, *, expert_parallel: bool) -> dict[str, ParameterShard]:
    """Shard a block's parameters and set its communicating callables; return the shards by parameter name."""
    dims: dict[str, int | None] = {"attention.wo.weight": 1}
    block.attention.tokens_first, block.attention.project_out = layout.tokens_first, layout.project_out
    if isinstance(block.attention, LatentAttention):
        # All heads share the compressed vector: every rank compresses all tokens and expands them for its heads.
        dims |= dict.fromkeys(("attention.wq_b.weight", "attention.wkv_b.weight"), 0)
        compressing = ("wq_a", "q_norm", "wkv_a", "kv_norm")
        present = [name for name in compressing if getattr(block.attention, name) is not None]
        dims |= {f"attention.{name}.weight": None for name in present}
        block.attention.gather_tokens = layout.gather_tokens
    else:
        dims |= {f"attention.{name}.weight": 0 for name in ("wq", "wk", "wv")}
        dims |= {f"attention.{name}.bias": 0 for name in ("wq", "wk", "wv") if block.attention.wq.bias is not None}
        block.attention.project_in = layout.project_in
    if layout.tokens_first:
        dims |= {"attention_norm.weight": None, "ffn_norm.weight": None}
    if isinstance(block.attention, Attention) and block.attention.q_norm is not None:
        # One weight for heads on different ranks: its gradient is a sum over them.
        dims |= {"attention.q_norm.weight": None, "attention.k_norm.weight": None}
    if block.feed_forward is not None:
        dims |= {"feed_forward.w1.weight": 0, "feed_forward.w3.weight": 0, "feed_forward.w2.weight": 1}
        block.feed_forward.project_in, block.feed_forward.project_out = layout.project_in, layout.project_out
    if block.moe is not None:
        # Every rank routes its own tokens, or all tokens through its slice; either way its gradients are partial sums.
        apart = ("router", "shared_gate")
        dims |= {f"moe.{name}.weight": None for name in apart if getattr(block.moe, name) is not None}
        if block.moe.shared is not None:
            for name, dim in (("w1", 0), ("w3", 0), ("w2", 1)):
                dims[f"moe.shared.{name}.weight"] = None if expert_parallel else dim
        if not expert_parallel:
            dims |= {"moe.experts.w1": 1, "moe.experts.w3": 1, "moe.experts.w2": 2}
            block.moe.gather_tokens, block.moe.reduce_tokens = layout.gather_tokens, layout.reduce_tokens
    return {path: _shard_at(block, path, dim, layout.group) for path, dim in dims.items()}


def _shard_at(block: Block, path: str, dim: int | None, group: dist.ProcessGroup) -> ParameterShard:
    module, _, name = path.rpartition(".")
    return shard_parameter(block.get_submodule(module), name, dim, group)
