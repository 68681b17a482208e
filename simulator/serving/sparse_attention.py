"""Attention over keys that an indexer chooses (DeepSeek sparse attention): score all keys, choose some, attend to
these. Kernel times are those of SGLang 0.5.14 for GLM-5, 64 heads, and its whole modules with 8 heads a GPU
(ai-dynamo/aiconfigurator 0.12, systems/data/{h200,b200}_sxm/sparse_attention); TensorRT-LLM's are from 1.3.0rc20 there.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.config.model import Indexer, LatentAttention
from simulator.serving.kernels import Kernels

INDEX_KERNELS = 8.0  # kernels: a norm, a rotation, two transforms, two casts, writing the key, choosing
HEADS = 64  # heads in a tile of the kernels: fewer on a GPU take as long
# Share of the peak that scoring keys reaches: 8,192 queries times all earlier keys in 290 and 148 us.
SCORED = {"hopper": 0.48, "blackwell": 0.41}
# Share of the peak of the cache's format that attention over chosen keys reaches, by (engine, generation, bits of the
# cache); the exceptions come first. On Hopper an 8-bit cache is widened first, so the peak is that of 16 bits.
MET = {
    ("trtllm", "hopper", 16): 0.20, ("trtllm", "blackwell", 16): 0.32, ("trtllm", "blackwell", 8): 0.23,
    ("", "hopper", 16): 0.59, ("", "hopper", 8): 0.38, ("", "blackwell", 16): 0.26, ("", "blackwell", 8): 0.31,
}  # fmt: skip
# Choosing among a query's scores: seconds per query, and the share of memory's rate for reading scores.
CHOSEN_S, CHOSEN_READ = 4.6e-8, 0.28
SCORE_BYTES = 4.0
INDEX_BYTES = 1.0 + 4 / 128  # bytes per element of a key: float8, with a 32-bit scale for 128 elements


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseAttention:
    """Seconds of one layer on one rank. Each rank scores all keys with all of the indexer's heads."""

    kernels: Kernels
    latent: LatentAttention
    indexer: Indexer
    heads: float  # heads of the model on a rank
    cache_bits: int

    def read_s(self, tokens: float, pairs: float, readers: float) -> float | None:
        """Return the seconds of prompts with `pairs` of a query and an earlier key; None if no query has more keys than
        are chosen, since engines then use full attention.
        """
        longest = pairs / tokens + (tokens / readers - 1) / 2
        if longest <= self.indexer.keys:
            return None
        flops = 2.0 * max(self.heads, HEADS) * (2 * self.latent.kv_lora_rank + self.latent.qk_rope_head_dim)
        met = tokens * self.indexer.keys * flops / self._met_flops_per_s
        return met + pairs * self._score_flops / self._scored_flops_per_s + self._chosen_s(tokens, pairs)

    def index_s(self, keys: float, mean: float) -> float:
        """Return the seconds of scoring `keys` cached keys (a mean of `mean` per answer) and choosing among them."""
        moved = keys * self.indexer.width * INDEX_BYTES / self.kernels.bytes_per_s
        scored = max(keys * self._score_flops / self._scored_flops_per_s, moved)
        return scored + (self._chosen_s(keys / mean, keys) if mean > self.indexer.keys else 0.0)

    def met_share(self, mean: float) -> float:
        """Return the share of an answer's `mean` cached keys that its next token attends to."""
        return min(1.0, self.indexer.keys / mean)

    def _chosen_s(self, queries: float, scores: float) -> float:
        return queries * CHOSEN_S + scores * SCORE_BYTES / (CHOSEN_READ * self.kernels.gpu.memory_bytes_per_s)

    @property
    def _score_flops(self) -> float:
        return 2.0 * self.indexer.heads * self.indexer.width

    @property
    def _scored_flops_per_s(self) -> float:
        return SCORED.get(self.kernels.generation, min(SCORED.values())) * self._peak(8)

    @property
    def _met_flops_per_s(self) -> float:
        kernels, bits = self.kernels, self.cache_bits
        known = MET.get((kernels.program, kernels.generation, bits)) or MET.get(("", kernels.generation, bits))
        return (known or min(MET.values())) * self._peak(bits if kernels.generation == "blackwell" else 16)

    def _peak(self, bits: int) -> float:
        peaks = self.kernels.gpu.peak_flops
        return (bits == 8 and peaks.get("float8")) or peaks.get("bfloat16") or max(peaks.values())
