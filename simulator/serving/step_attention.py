"""Attention of all layers in a step of an engine: over prompts, by pairs of a query and a key; of answers, by keys."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.config.model import Model
from simulator.serving.deployment import CACHE_BYTES, Pool
from simulator.serving.kernel_tables import AnswerKernels
from simulator.serving.kernels import Kernels, PromptAttention
from simulator.serving.linear_attention import ANSWER_S, CHUNK_S, DELTA_CHUNK
from simulator.serving.measured import MeasuredSteps
from simulator.serving.request_bytes import cache_elements, state_bytes
from simulator.serving.sparse_attention import SparseAttention


@dataclass(slots=True, kw_only=True)
class StepAttention:
    """Seconds of attention on one rank of a pool whose cache has the format `cache`; `checked` tokens of an answer are
    in a step.
    """

    model: Model
    pool: Pool
    kernels: Kernels
    cache: str
    checked: int = 1
    key_s: float = field(init=False)  # for a cached key in one layer
    pair_ratio: float = 1.0  # how much longer than modelled attention over prompts takes
    prompts: PromptAttention = field(init=False)
    _answers: AnswerKernels | None = field(init=False)  # that attend to cached heads, where they are listed
    _answer_s: float = field(init=False)  # of all layers for an answer, whatever keys it has
    _scan_s: float = field(init=False)  # of linear attention for a token of a prompt
    _layers_met: tuple[int, int, int] = field(init=False)  # layers that see all keys, layers with a window, its width
    _sparse: SparseAttention | None = field(init=False)

    def __post_init__(self) -> None:
        model, windowed = self.model, self.model.windowed_layers
        single = model.heads == model.kv_heads
        self._answers = None if model.latent else self.kernels.listed_answers(self.cache_bits, single=single)
        self.key_s = self._one_key_s()
        self.prompts = self._prompt_attention()
        self._answer_s = self._answer_bytes() / self.kernels.bytes_per_s
        self._scan_s = model.linear_layers * CHUNK_S / DELTA_CHUNK
        self._layers_met = (model.layers - windowed - model.linear_layers, windowed, model.sliding_window)
        self._sparse = self._chosen_keys()

    def bend(self, steps: MeasuredSteps) -> None:
        """Scale the times to measured steps."""
        self.key_s, self.pair_ratio = self.key_s * steps.cached_ratio, steps.pair_ratio

    @property
    def cache_bits(self) -> int:
        return round(8 * CACHE_BYTES[self.cache])

    @property
    def start_s(self) -> float:
        """The mean seconds of a layer for attention of answers with hardly any keys."""
        linear, heads = self.model.linear_layers, self.model.heads / self.pool.tp
        latent = self.model.latent is not None
        full = self.kernels.attention_start_s(
            heads, latent=latent, cache_bits=self.cache_bits, kv_heads=self.model.kv_heads / self.pool.tp
        )
        return (full * (self.model.layers - linear) + ANSWER_S * linear) / self.model.layers

    def read_s(self, tokens: float, pairs: float, readers: int) -> float:
        """Return the seconds of all layers' attention over `tokens` of prompts with `pairs` of a query and a key."""
        if not pairs:
            return 0.0
        ranks = min(readers, self.pool.dp_attention)
        read, met, each = tokens / ranks, pairs / ranks, readers / ranks
        full, windowed, window = self._layers_met
        time = full * self.prompts.seconds(read, met, readers=each)
        if windowed:
            time += windowed * self.prompts.seconds(read, met, readers=each, window=window)
        time *= self.pair_ratio
        if self._sparse is not None and (chosen := self._sparse.read_s(read, met, each)) is not None:
            time = self.model.layers * chosen
        return time + self._scan_s * tokens / readers

    def answers_s(self, sequences: float, keys: float) -> float:
        """Return the seconds of all layers' attention for `sequences` answers with `keys` keys in all, on one rank."""
        here = sequences / min(sequences, self.pool.dp_attention)
        met = self._cache_s(keys / sequences * here, keys / sequences)
        listed, layers = self._answers, self.model.layers - self.model.linear_layers
        if listed is not None:
            waiting = max(0.0, here * max(1.0, self.model.kv_heads / self.pool.tp) - self.kernels.gpu.sm_count)
            met = listed.seconds(layers * waiting, met)
        return met + self._answer_s * here

    def _chosen_keys(self) -> SparseAttention | None:
        """Return the cost of attention over chosen keys; None if queries meet all keys."""
        latent = self.model.latent
        if latent is None or latent.indexer is None:
            return None
        return SparseAttention(
            kernels=self.kernels,
            latent=latent,
            indexer=latent.indexer,
            heads=self.model.heads / self.pool.tp,
            cache_bits=self.cache_bits,
        )

    def _prompt_attention(self) -> PromptAttention:
        model, tp, latent = self.model, self.pool.tp, self.model.latent is not None
        heads = model.heads / tp
        return self.kernels.prompt_attention(
            heads,
            heads if latent else max(1.0, model.kv_heads / tp),  # compressed keys are expanded to all heads
            model.qk_dim,
            model.v_dim,
            cache_bits=self.cache_bits,
            latent=latent,
        )

    def _answer_bytes(self) -> float:
        """Return the bytes that the attention of all layers passes for an answer, whatever keys it has: the states of
        linear attention are read and written, and so are latent attention's queries and results, which are as wide as
        the compressed vectors for every head.
        """
        model, latent = self.model, self.model.latent
        states = 2.0 * self.pool.pp * state_bytes(model, self.pool)
        if latent is None:
            return states
        wide = 2 * (2 * latent.kv_lora_rank + latent.qk_rope_head_dim)
        return states + self.checked * 2.0 * wide * model.heads / self.pool.tp * model.layers

    def _cache_s(self, keys: float, mean: float) -> float:
        """Return the seconds of attention over `keys` cached keys on one rank, with a mean of `mean` per sequence."""
        if self._sparse is not None:
            met = self.key_s * keys * self._sparse.met_share(mean) + self._sparse.index_s(self.checked * keys, mean)
            return self.model.layers * met
        full, windowed, window = self._layers_met
        met = full + windowed * min(1.0, (window or mean) / mean)
        return met * self.key_s * keys

    def _one_key_s(self) -> float:
        """Return the seconds for one cached key in one layer of one rank."""
        model, pool = self.model, self.pool
        heads = model.heads / pool.tp
        width = CACHE_BYTES[self.cache]
        if model.latent:  # queries meet the compressed vectors themselves
            rank = model.latent.kv_lora_rank
            flops = 2.0 * heads * (2 * rank + model.latent.qk_rope_head_dim)
            rows = self.checked * heads
            return self.kernels.latent_key_s(
                rows, self.checked * flops, cache_elements(model) * width, round(8 * width)
            )
        nbytes = 2.0 * max(1.0, model.kv_heads / pool.tp) * model.head_dim * width
        flops = self.checked * 2.0 * heads * 2 * model.head_dim
        return self.kernels.cached_key_s(flops, nbytes, width=model.head_dim, listed=self._answers)
