"""The forward pass of one rank: answers continue by one token, alone or in a step that also reads prompts into the
cache.

Weights are those of `executor.model.decoder.Decoder`, drawn by the same names, with projections that read the same
input joined into one matrix. Tensor parallelism cuts heads, the feed-forward's width and the vocabulary; after each
half of a layer the ranks add their parts, together with the residual and the norm that follow (`own`) or before them
(`nccl`).

Shapes in comments: T tokens, B sequences, h hidden, a query heads and k key/value heads of this rank, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from executor.model.attention import NORM_EPS
from executor.model.decoder import ROPE_BASE, draw
from executor.overlap.all_reduce import all_reduce_rms_norm, fits_own_kernel
from executor.serving import operators
from executor.serving.cache import PagedCache
from executor.serving.operators import Chunks, Heads
from simulator.config.model import Model

# Bytes up to which two ranks add by our own kernel: at 16 MiB it takes 62 us where NCCL takes 80
# (examples/validation/overlap_2xH200.md); steps of 64 MiB a sum took 4 % longer with it than with NCCL.
LARGEST_OF_TWO = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer on this rank: (outputs, inputs) each, norms (h,)."""

    qkv: Tensor  # ((a + 2 k) d, h)
    out: Tensor  # (h, a d)
    up: Tensor  # (2 f, h), gates first
    down: Tensor  # (h, f)
    attention_norm: Tensor
    ffn_norm: Tensor


@dataclass(frozen=True, slots=True)
class Spread:
    """The ranks of tensor parallelism and this rank's index among them. `group` is None for one rank."""

    ranks: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


class ServedDecoder:
    """A decoder on one of `spread.ranks` ranks; `all_reduce` may be changed between steps."""

    def __init__(
        self, model: Model, spread: Spread, *, device: torch.device, dtype: torch.dtype, positions: int, seed: int
    ) -> None:
        self.model, self.spread, self.dtype, self.device = model, spread, dtype, device
        self.all_reduce = "nccl"
        self.heads = Heads(model.heads // spread.ranks, model.kv_heads // spread.ranks, model.head_dim)
        self._seed = seed
        self.embedding = self._drawn("tok_embeddings.weight", (model.vocab, model.hidden))
        self.layers = [self._layer(index) for index in range(model.layers)]
        self.norm = self._drawn("norm.weight", (model.hidden,))
        head = "tok_embeddings.weight" if model.tied_embeddings else "output.weight"
        self.head = self._drawn(head, (model.vocab, model.hidden), cut=0)
        self.angles = self._angles(positions)

    def mix(
        self,
        tokens: Tensor,
        places: tuple[Tensor, Tensor],
        chunks: Chunks,
        answers: tuple[Tensor, Tensor, Tensor],
        last: Tensor,
        cache: PagedCache,
    ) -> Tensor:
        """Read `chunks` of prompts and continue answers; return the scores (n, V here) after the rows `last` (n,).

        `tokens` (T,) are those of answers first; `places` their positions and slots of the cache (T,); `answers` says
        which of the first rows are answers (B,), with their positions (B,) and pages (B, ..).
        """
        is_answer, at, tables = answers
        first, lengths = is_answer.shape[0], (at + 1).int()

        def attend(qkv: Tensor, index: int) -> Tensor:
            pages = cache.layer(index)
            operators.rotate_and_store(qkv, self.angles, *places, pages, self.heads)
            attended = operators.attend_prompts(qkv, chunks, pages, self.heads)
            if first:
                own = operators.attend_pages(qkv[:first], pages, tables, lengths, self.heads)
                torch.where(is_answer[:, None], own, attended[:first], out=attended[:first])
            return attended

        return functional.linear(self._through(tokens, attend)[last], self.head)

    def go_on(self, tokens: Tensor, positions: Tensor, tables: Tensor, cache: PagedCache) -> Tensor:
        """Take the last token (B,) of each sequence and its position; return the scores (B, V here) of the next one."""
        slots = cache_slots(positions, tables, cache.data.shape[4])
        lengths = (positions + 1).int()

        def attend(qkv: Tensor, index: int) -> Tensor:
            pages = cache.layer(index)
            operators.rotate_and_store(qkv, self.angles, positions, slots, pages, self.heads)
            return operators.attend_pages(qkv, pages, tables, lengths, self.heads)

        return functional.linear(self._through(tokens, attend), self.head)

    def likeliest(self, scores: Tensor) -> Tensor:
        """Return the token (B,) with the highest of all ranks' scores (B, V here); of equal ones, the first rank's."""
        best, index = scores.max(dim=1)
        if self.spread.group is None:
            return index
        # One float32 tensor holds both: token numbers are integers below 2**24.
        mine = torch.stack((best.float(), (index + self.spread.rank * scores.shape[1]).float()))
        every = mine.new_empty((self.spread.ranks, *mine.shape))
        dist.all_gather_into_tensor(every, mine[None], group=self.spread.group)
        return every[:, 1].gather(0, every[:, 0].argmax(dim=0, keepdim=True))[0].long()

    def _through(self, tokens: Tensor, attend: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Return normalized hidden states (T, h) after all layers."""
        residual = functional.embedding(tokens, self.embedding)
        first = self.layers[0].attention_norm
        x = functional.rms_norm(residual, first.shape, first, NORM_EPS)
        for index, layer in enumerate(self.layers):
            attended = attend(functional.linear(x, layer.qkv), index)
            x, residual = self.sum_and_norm(functional.linear(attended, layer.out), residual, layer.ffn_norm)
            fed = functional.linear(operators.gated(functional.linear(x, layer.up)), layer.down)
            following = self.layers[index + 1].attention_norm if index + 1 < len(self.layers) else self.norm
            x, residual = self.sum_and_norm(fed, residual, following)
        return x

    def sum_and_norm(self, part: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return (normalized, sum) of the residual and all ranks' parts (T, h)."""
        group = self.spread.group
        if group is not None:
            if self.all_reduce == "own" and self._takes_own(part.numel() * part.element_size()):
                return all_reduce_rms_norm(part, residual, weight, group, eps=NORM_EPS)
            dist.all_reduce(part, group=group)
        return operators.add_norm(part, residual, weight, NORM_EPS)

    def _takes_own(self, nbytes: int) -> bool:
        """Return whether a sum of `nbytes` is quicker by our kernel; between two ranks it sends no more than NCCL's
        ring.
        """
        return nbytes <= LARGEST_OF_TWO if self.spread.ranks == 2 else fits_own_kernel(nbytes)

    def reserve(self, tokens: int) -> None:
        """Allocate the memory that ranks share for steps of up to `tokens`, since growing it later is slow. A
        collective call.
        """
        if self.spread.ranks == 2:
            tokens = min(tokens, LARGEST_OF_TWO // (self.model.hidden * self.dtype.itemsize))
        part = torch.zeros((tokens, self.model.hidden), dtype=self.dtype, device=self.device)
        self.sum_and_norm(part, torch.zeros_like(part), self.norm)

    # --- weights ------------------------------------------------------------------------------------------------

    def _layer(self, index: int) -> Layer:
        model, at = self.model, f"layers.{index}"
        hidden, queries, kv = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
        inputs = (("wq", queries), ("wk", kv), ("wv", kv))
        qkv = [self._drawn(f"{at}.attention.{name}.weight", (width, hidden), cut=0) for name, width in inputs]
        ups = [self._drawn(f"{at}.feed_forward.{name}.weight", (model.ffn, hidden), cut=0) for name in ("w1", "w3")]
        return Layer(
            qkv=torch.cat(qkv),
            out=self._drawn(f"{at}.attention.wo.weight", (hidden, queries), cut=1),
            up=torch.cat(ups),
            down=self._drawn(f"{at}.feed_forward.w2.weight", (hidden, model.ffn), cut=1),
            attention_norm=self._drawn(f"{at}.attention_norm.weight", (hidden,)),
            ffn_norm=self._drawn(f"{at}.ffn_norm.weight", (hidden,)),
        )

    def _drawn(self, name: str, shape: tuple[int, ...], *, cut: int | None = None) -> Tensor:
        """Return this rank's part of a parameter, sharded along a dim or whole."""
        whole = draw(name, torch.Size(shape), seed=self._seed, device=self.device, dtype=self.dtype)
        if cut is None or self.spread.ranks == 1:
            return whole
        return whole.chunk(self.spread.ranks, dim=cut)[self.spread.rank].contiguous().clone()

    def _angles(self, positions: int) -> tuple[Tensor, Tensor]:
        half, width = torch.arange(0, self.heads.width, 2, dtype=torch.float64, device=self.device), self.heads.width
        angles = torch.arange(positions, device=self.device).double()[:, None] * ROPE_BASE ** (-half / width)
        return angles.cos().float(), angles.sin().float()


def cache_slots(positions: Tensor, tables: Tensor, size: int) -> Tensor:
    """Return the cache's slots (B,) at `positions` (B,) of sequences with pages `tables` (B, ..) of `size` tokens."""
    page = tables.gather(1, (positions // size)[:, None])[:, 0].long()
    return page * size + positions % size
