"""Tensor parallelism, with or without sequence parallelism.

Projections into heads or inner width are cut by output ("colwise"), those out of it by input ("rowwise"), so that a
pair needs one sum (Megatron-LM, arXiv 1909.08053). Without sequence parallelism that sum is an all-reduce and
everything between pairs is computed on each rank; with it (arXiv 2205.05198) tokens are cut between pairs: the sum is
a reduce-scatter and an all-gather stands before the next pair. What moves per layer, forward: two of each; backward:
their mirror images.

Parameters are cut where they are made and everything computes with plain tensors: DTensor says the same with a dispatch
in Python for every operator, which costs the host 9 ms more a layer (`tests/bench/host_cost.py`). Cut tokens lie
first in memory, (S, B, h), as in Megatron-LM: what is gathered of several sequences is then in order, and no copy is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from executor.attention import Attention
from executor.kept import product
from executor.latent_attention import LatentAttention
from executor.model import Block, Decoder
from executor.shards import Cut, cut
from executor.tensor_overlap import overlap_block
from executor.token_collectives import copy_in, gather, scatter, sum_up


class Line:
    """The ranks of one tensor-parallel group, and how tokens get to all of them and back."""

    def __init__(self, group: dist.ProcessGroup, *, sequence_parallel: bool) -> None:
        self.group, self.tokens_first = group, sequence_parallel

    def enter(self, x: Tensor) -> Tensor:
        """Return all tokens, (S, B, h), of this rank's, (S / tp, B, h); or what every rank has, whose gradient is a sum."""
        return gather(x, self.group) if self.tokens_first else copy_in(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of the sum over ranks, or all tokens of it."""
        return scatter(x, self.group) if self.tokens_first else sum_up(x, self.group)

    def project(self, x: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """Take tokens as they lie between layers; return all of them through this rank's columns."""
        whole = self.enter(x)
        return tuple(product(whole, linear.weight, linear.bias) for linear in linears)

    def close(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """Take all tokens of this rank's width; return tokens as they lie between layers."""
        return self.leave(product(x, linear.weight))


class CutEmbedding(nn.Embedding):
    """Has a share of the words. A token's vector comes from the rank that has its word; the others add zeros."""

    line: Line
    first: int  # word here

    def forward(self, tokens: Tensor) -> Tensor:
        """Take token ids (B, S); return hidden states as they lie between layers."""
        column = (tokens.t() if self.line.tokens_first else tokens) - self.first
        absent = (column < 0) | (column >= self.weight.shape[0])
        rows = functional.embedding(column.masked_fill(absent, 0), self.weight)
        return self.line.leave(rows.masked_fill(absent[..., None], 0))


class CutHead(nn.Linear):
    """Has a share of the words; the logits stay cut, and VocabularyLoss takes them as they are."""

    line: Line

    def forward(self, x: Tensor) -> Tensor:
        return product(self.line.enter(x), self.weight)


def apply_tensor_parallel(
    model: Decoder, group: dist.ProcessGroup, *, sequence_parallel: bool, experts_cut: bool, overlap: str = "none"
) -> None:
    """Cut a decoder over `group`.

    `experts_cut`: experts lie whole on the ranks (expert parallelism), so tokens are routed where they are; otherwise
    each rank takes a slice of every expert's width. `overlap` is the plan's tp_overlap; see executor.tensor_overlap.
    """
    line = Line(group, sequence_parallel=sequence_parallel)
    if model.tok_embeddings is not None:
        vocab, hidden = model.tok_embeddings.weight.shape
        model.tok_embeddings = _like(CutEmbedding(vocab, hidden, device="meta"), model.tok_embeddings, line)
        model.tok_embeddings.first = -(-vocab // dist.get_world_size(group)) * dist.get_rank(group)
        model.cuts["tok_embeddings.weight"] = cut(model.tok_embeddings, "weight", 0, group)
    if model.output is not None:
        vocab, hidden = model.output.weight.shape
        model.output = _like(CutHead(hidden, vocab, bias=False, device="meta"), model.output, line)
        model.cuts["output.weight"] = cut(model.output, "weight", 0, group)
    if model.norm is not None and sequence_parallel:
        model.cuts["norm.weight"] = cut(model.norm, "weight", None, group)
    model.tie()
    for index, block in model.layers.items():
        for name, made in _cut_block(block, line, experts_cut=experts_cut).items():
            model.cuts[f"layers.{index}.{name}"] = made
        overlap_block(block, overlap, group)


def _like(module: CutEmbedding | CutHead, plain: nn.Module, line: Line) -> CutEmbedding | CutHead:
    """Have `module` take the place of `plain`, whose parameter it gets."""
    module.line, module.weight = line, plain.weight
    return module


def _cut_block(block: Block, line: Line, *, experts_cut: bool) -> dict[str, Cut]:
    """Cut a block's parameters and set what communicates in it; return the cuts by the parameters' names in it."""
    dims: dict[str, int | None] = {"attention.wo.weight": 1}
    block.attention.tokens_first, block.attention.close = line.tokens_first, line.close
    if isinstance(block.attention, LatentAttention):
        # What is compressed is one for all heads: every rank compresses all tokens, and expands them for its heads.
        dims |= dict.fromkeys(("attention.wq_b.weight", "attention.wkv_b.weight"), 0)
        compressing = ("wq_a", "q_norm", "wkv_a", "kv_norm")
        held = [name for name in compressing if getattr(block.attention, name) is not None]
        dims |= {f"attention.{name}.weight": None for name in held}
        block.attention.enter = line.enter
    else:
        dims |= {f"attention.{name}.weight": 0 for name in ("wq", "wk", "wv")}
        dims |= {f"attention.{name}.bias": 0 for name in ("wq", "wk", "wv") if block.attention.wq.bias is not None}
        block.attention.project = line.project
    if line.tokens_first:
        dims |= {"attention_norm.weight": None, "ffn_norm.weight": None}
    if isinstance(block.attention, Attention) and block.attention.q_norm is not None:
        # One weight for heads that are on different ranks: its gradient is a sum over them.
        dims |= {"attention.q_norm.weight": None, "attention.k_norm.weight": None}
    if block.feed_forward is not None:
        dims |= {"feed_forward.w1.weight": 0, "feed_forward.w3.weight": 0, "feed_forward.w2.weight": 1}
        block.feed_forward.project, block.feed_forward.close = line.project, line.close
    if block.moe is not None:
        # Every rank routes its tokens, or all tokens through its slice: either way its gradients are parts of a sum.
        apart = ("router", "shared_gate")
        dims |= {f"moe.{name}.weight": None for name in apart if getattr(block.moe, name) is not None}
        if block.moe.shared is not None:
            for name, dim in (("w1", 0), ("w3", 0), ("w2", 1)):
                dims[f"moe.shared.{name}.weight"] = None if experts_cut else dim
        if not experts_cut:
            dims |= {"moe.experts.w1": 1, "moe.experts.w3": 1, "moe.experts.w2": 2}
            block.moe.enter, block.moe.leave = line.enter, line.leave
    return {path: _cut_at(block, path, dim, line.group) for path, dim in dims.items()}


def _cut_at(block: Block, path: str, dim: int | None, group: dist.ProcessGroup) -> Cut:
    module, _, name = path.rpartition(".")
    return cut(block.get_submodule(module), name, dim, group)
