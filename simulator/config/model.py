"""The model as shapes. Exact parameter counts and FLOPs follow from them; nothing is looked up by name.

Read from a Hugging Face `config.json` by `simulator.config.hf_config`. Symbols in comments: L layers, h hidden, a query
heads, k key/value heads, d head width, f feed-forward width, V vocabulary, E experts, s sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple


class LayerKind(NamedTuple):
    """What one layer is: whether its tokens go to experts, and how far back its queries reach."""

    sparse: bool
    window: int  # keys that a query meets at most; 0: the whole sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Small heads that choose which keys a query of latent attention meets (DeepSeek sparse attention, arXiv 2512.02556
    section 2.1). `width` in elements, the same for queries and the one key that all heads share.
    """

    heads: int
    width: int
    keys: int  # that a query meets, at most

    def matmul_parameters(self, hidden: int, q_lora_rank: int) -> int:
        """Weights of one layer's projections: queries from their compressed vector, the key, a weight a head."""
        return q_lora_rank * self.heads * self.width + hidden * (self.width + self.heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1). Widths in elements."""

    q_lora_rank: int  # 0: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: Indexer | None = None  # None: a query meets all keys


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Gated delta networks in the place of attention (transformers' Qwen3NextGatedDeltaNet). Widths in elements."""

    layers: int  # number of the model's layers that have it
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens of the convolution before it

    @property
    def mixed(self) -> int:
        """Width of a token's queries, keys and values, the input of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def matmul_parameters(self, hidden: int) -> int:
        """Weights of one layer's projections: queries, keys, values and their gate, two scalars a head, the output."""
        gate = self.value_heads * self.value_dim
        return hidden * (self.mixed + gate + 2 * self.value_heads) + gate * hidden

    def parameters(self, hidden: int) -> int:
        """Parameters of one layer: projections, convolution, decay and step of each head, and the norm of the
        output.
        """
        return self.matmul_parameters(hidden) + self.kernel * self.mixed + 2 * self.value_heads + self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """Sparse feed-forward layers. `dense_layer_ids` names the layers that stay dense; where only their number
    `dense_layers` is given, they come first, as in DeepSeek's networks. `Model.layer_kinds` gives the kind of each
    layer.
    """

    experts: int
    experts_per_token: int
    ffn: int  # width of one expert
    shared_ffn: int = 0  # total width of the experts every token visits
    shared_gate: bool = False  # a scalar gate on the shared expert (qwen2-moe)
    expert_bias: bool = False  # biases on the routed experts (in transformers' classes only gpt-oss has them)
    router_bias: bool = False  # a bias for each expert on the router's scores
    dense_layers: int = 0
    dense_layer_ids: tuple[int, ...] = ()  # indices from 0, in order
    groups: int = 1  # groups of experts, and the most groups that a token visits (deepseek-v3's n_group and topk_group)
    groups_per_token: int = 1

    def __post_init__(self) -> None:
        if self.dense_layer_ids and len(self.dense_layer_ids) != self.dense_layers:
            raise ValueError(f"{self.dense_layers} dense layers, but {len(self.dense_layer_ids)} are named")

    @property
    def selection_bias(self) -> bool:
        """Whether the router's bias only chooses experts (DeepSeek-V3's e_score_correction_bias), and is not that of a
        linear layer, as in gpt-oss.
        """
        return self.router_bias and not self.expert_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder-only transformer. All widths in elements, all counts exact.

    Biases: `qkv_bias` and `attention_out_bias` with `latent` mean the biases that DeepSeek's modules have (on the
    compressing projections and on the output), never one on the up-projections. `assumed` lists, as sentences, defaults
    for what the configuration does not state, and the keys that were ignored.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated_mlp: bool = True
    tied_embeddings: bool = False
    learned_positions: int = 0  # rows of a learned position table (gpt2), else 0
    norm: str = "rmsnorm"  # or layernorm
    norm_bias: bool = False
    norms_per_layer: int = 2  # gemma2 and gemma3 have 4
    final_norm: bool = True
    qk_norm: bool = False  # a norm of width d on queries and on keys
    qk_norm_wide: bool = False  # that norm spans all heads: a d and k d wide (olmo2)
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    latent: LatentAttention | None = None
    attention_gate: bool = False  # a gate on attention's output, from as many more columns as queries have (qwen3-next)
    linear: LinearAttention | None = None  # layers that have linear attention in the place of softmax attention
    moe: MixtureOfExperts | None = None
    sliding_window: int = 0
    sliding_layers: int | tuple[int, ...] = (
        0  # which layers attend only within `sliding_window`, or how many, spread evenly
    )
    max_positions: int = 0
    multi_token_layers: int = 0  # extra prediction layers that the base count leaves out (deepseek-v3's MTP)
    rotary: bool = True  # rotary position embedding: no parameters, but an operator on queries and keys
    parallel_residual: bool = False  # attention and feed-forward read the same input and are added once (gpt-neox)
    assumed: tuple[str, ...] = ()

    # --- layers -------------------------------------------------------------------------------------------------

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, in order. All counts and costs of layers follow from it."""
        return self._layer_table[0]

    @property
    def dense_before(self) -> tuple[int, ...]:
        """The number of dense layers before each of the L + 1 places between layers."""
        return self._layer_table[1]

    @property
    def _layer_table(self) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
        placed = (self.moe.dense_layers, self.moe.dense_layer_ids) if self.moe else None
        return _layer_table(self.layers, placed, self.sliding_window, self.sliding_layers)

    def dense_among(self, start: int, stop: int) -> int:
        """The number of dense layers among layers `start` to `stop`, `stop` excluded."""
        return self.dense_before[stop] - self.dense_before[start]

    @property
    def dense_layers(self) -> int:
        return self.dense_before[-1]

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def dense_layers_lead(self) -> bool:
        """Whether every dense layer comes before every sparse one."""
        return self.dense_before[self.dense_layers] == self.dense_layers

    @property
    def windowed_layers(self) -> int:
        """The number of layers that attend only within the sliding window."""
        return sum(kind.window > 0 for kind in self.layer_kinds)

    # --- parameters ---------------------------------------------------------------------------------------------

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm of width h."""
        return self.hidden * (2 if self.norm_bias else 1)

    @property
    def attention_matmul_parameters(self) -> int:
        """Weights of one attention block's matrices: projections only, no biases and no norms."""
        h = self.hidden
        if self.latent:
            m = self.latent
            queries = self.heads * self.qk_dim
            query = h * m.q_lora_rank + m.q_lora_rank * queries if m.q_lora_rank else h * queries
            compress = h * (m.kv_lora_rank + m.qk_rope_head_dim)
            expand = m.kv_lora_rank * self.heads * (m.qk_nope_head_dim + m.v_head_dim)
            index = m.indexer.matmul_parameters(h, m.q_lora_rank) if m.indexer else 0
            return query + compress + expand + self.heads * m.v_head_dim * h + index
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return h * ((2 if self.attention_gate else 1) * q + 2 * kv) + q * h

    @property
    def linear_layers(self) -> int:
        """How many layers have linear attention."""
        return self.linear.layers if self.linear else 0

    @property
    def attention_matmul_parameters_of_all(self) -> int:
        """Weights of the attention matrices of all layers, linear attention included."""
        linear = self.linear.layers * self.linear.matmul_parameters(self.hidden) if self.linear else 0
        return (self.layers - self.linear_layers) * self.attention_matmul_parameters + linear

    @property
    def attention_sinks(self) -> bool:
        """Whether the softmax of each query head has a learned term that belongs to no key (gpt-oss)."""
        return self.family == "gpt_oss"

    @property
    def attention_parameters(self) -> int:
        """Parameters of one attention block without its norms before and after."""
        out_bias = self.hidden if self.attention_out_bias else 0
        if self.latent:
            m = self.latent
            norms = m.q_lora_rank + m.kv_lora_rank  # one norm on each compressed vector
            norms += 2 * m.indexer.width if m.indexer else 0  # a layer norm on the indexer's key
            compressed = m.q_lora_rank + m.kv_lora_rank + m.qk_rope_head_dim
            return self.attention_matmul_parameters + norms + (compressed if self.qkv_bias else 0) + out_bias
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = 0
        if self.qk_norm:
            norms = q + kv if self.qk_norm_wide else 2 * self.head_dim
        sinks = self.heads if self.attention_sinks else 0
        return self.attention_matmul_parameters + (q + 2 * kv if self.qkv_bias else 0) + out_bias + norms + sinks

    def mlp_matmul_parameters(self, width: int) -> int:
        """Weights of one feed-forward block's matrices: gate (if any), up and down."""
        return (3 if self.gated_mlp else 2) * self.hidden * width

    def mlp_parameters(self, width: int) -> int:
        """Parameters of one dense or shared feed-forward block of the given width."""
        return self.mlp_matmul_parameters(width) + (self._mlp_biases(width) if self.mlp_bias else 0)

    def _mlp_biases(self, width: int) -> int:
        inner = (2 if self.gated_mlp else 1) * width  # rows that carry a bias before the down projection
        return inner + self.hidden

    @property
    def one_expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        if not self.moe:
            return 0
        biases = self._mlp_biases(self.moe.ffn) if self.moe.expert_bias else 0
        return self.mlp_matmul_parameters(self.moe.ffn) + biases

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts of one MoE layer."""
        return self.moe.experts * self.one_expert_parameters if self.moe else 0

    @property
    def moe_shared_parameters(self) -> int:
        """Parameters of one MoE layer that are not routed experts: router and shared experts."""
        if not self.moe:
            return 0
        router = self.hidden * self.moe.experts + (self.moe.experts if self.moe.router_bias else 0)
        shared = self.mlp_parameters(self.moe.shared_ffn) if self.moe.shared_ffn else 0
        return router + shared + (self.hidden if self.moe.shared_gate else 0)

    @property
    def block_norm_parameters(self) -> int:
        return self.norms_per_layer * self.norm_parameters

    @property
    def dense_layer_parameters(self) -> int:
        return self.attention_parameters + self.block_norm_parameters + self.mlp_parameters(self.ffn)

    @property
    def moe_layer_parameters(self) -> int:
        return (
            self.attention_parameters + self.block_norm_parameters + self.moe_shared_parameters + self.expert_parameters
        )

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab + self.learned_positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """The output projection's own parameters: none when it is tied to the embedding."""
        return (0 if self.tied_embeddings else self.vocab * self.hidden) + (self.vocab if self.head_bias else 0)

    @property
    def parameters(self) -> int:
        """All parameters, each counted once."""
        return (
            self.embedding_parameters
            + self.dense_layers * self.dense_layer_parameters
            + self.moe_layers * self.moe_layer_parameters
            + (self.norm_parameters if self.final_norm else 0)
            + self.head_parameters
            + self.linear_layers
            * ((self.linear.parameters(self.hidden) if self.linear else 0) - self.attention_parameters)
        )

    @property
    def multi_token_parameters(self) -> int:
        """Parameters of the extra prediction layers, which `parameters` leaves out.

        Each has two norms on its inputs (hidden state and embedding), a projection of both to h, one more layer of
        the model's last kind and a norm before the head; embedding and head are the model's own (DeepSeek-V3,
        README_WEIGHTS.md, "Multi-Token Prediction modules").
        """
        layer = self.moe_layer_parameters if self.layer_kinds[-1].sparse else self.dense_layer_parameters
        extra = 2 * self.hidden * self.hidden + 3 * self.norm_parameters
        return self.multi_token_layers * (layer + extra)

    @property
    def active_parameters(self) -> int:
        """Parameters one token passes through: routed experts count as often as they are chosen."""
        if not self.moe:
            return self.parameters
        idle = self.moe.experts - self.moe.experts_per_token
        return self.parameters - self.moe_layers * idle * self.one_expert_parameters

    # --- floating-point operations ------------------------------------------------------------------------------

    @property
    def qk_dim(self) -> int:
        """Width of one query or key head."""
        return self.latent.qk_nope_head_dim + self.latent.qk_rope_head_dim if self.latent else self.head_dim

    @property
    def v_dim(self) -> int:
        """Width of one value head."""
        return self.latent.v_head_dim if self.latent else self.head_dim

    @property
    def layer_matmul_parameters(self) -> int:
        """Matrix weights of all layers that one token is multiplied with, of experts only the chosen ones; without the
        head.
        """
        total = self.attention_matmul_parameters_of_all
        total += self.dense_layers * self.mlp_matmul_parameters(self.ffn)
        if self.moe:
            moe = self.moe
            routed = moe.experts_per_token * self.mlp_matmul_parameters(moe.ffn)
            shared = self.mlp_matmul_parameters(moe.shared_ffn) + (self.hidden if moe.shared_gate else 0)
            total += self.moe_layers * (self.hidden * moe.experts + routed + shared)
        return total

    def matmul_parameters(self) -> int:
        """Weights that one token is multiplied with: active matrices and the head, tied or not; no look-up table."""
        return self.layer_matmul_parameters + self.vocab * self.hidden

    def attended_keys(self, seq_len: int, *, causal: bool = True) -> float:
        """Keys that a token's query meets, averaged over the sequence and summed over layers.

        Causal: s/2 in a full layer (the diagonal's half is left out, as every published formula does) and
        w - w^2/2s in a layer with a window of w < s. Not causal: s, or w.
        """
        window = min(self.sliding_window or seq_len, seq_len)
        full, windowed = float(seq_len), float(window)
        if causal and seq_len:
            full, windowed = seq_len / 2, window - window * window / (2 * seq_len)
        return (self.layers - self.windowed_layers - self.linear_layers) * full + self.windowed_layers * windowed

    def keys_by_layers(self, seq_len: int) -> tuple[float, float]:
        """Return the mean number of keys that a causal query meets, in two parts: from layers with windows, and from
        the others.

        Exact, the diagonal counted: what kernels compute, while `attended_keys` follows the published formulas.
        """
        share = self.windowed_layers / self.layers
        return share * causal_keys(seq_len, self.sliding_window), (1 - share) * causal_keys(seq_len)

    def attention_flops_per_token(self, seq_len: int, *, causal: bool = True) -> float:
        """FLOPs of scores and context for one token over all layers: 2 a (d_qk + d_v) for each key it meets."""
        return 2.0 * self.heads * (self.qk_dim + self.v_dim) * self.attended_keys(seq_len, causal=causal)

    def forward_flops_per_token(self, seq_len: int) -> float:
        """FLOPs of one token's forward pass: two per matmul weight, plus attention over the keys it meets."""
        return 2.0 * self.matmul_parameters() + self.attention_flops_per_token(seq_len)

    def training_flops_per_token(self, seq_len: int, *, causal: bool = False, recompute_layers: float = 0.0) -> float:
        """FLOPs of one token's forward and backward pass (twice the forward), plus recomputed layers.

        `recompute_layers` is the fraction of layers whose forward pass runs again in the backward pass: 0 gives model
        FLOPs (the numerator of MFU), 1 the hardware FLOPs of full recompute. The head is never recomputed. With 1 and
        `causal=False` this is Megatron's 96 l h^2 (1 + s/6h + V/16lh) for a GPT (arXiv 2104.04473, section 5.1).
        """
        attention = self.attention_flops_per_token(seq_len, causal=causal)
        layers = 2.0 * self.layer_matmul_parameters + attention
        return (3.0 + recompute_layers) * layers + 3.0 * 2.0 * self.vocab * self.hidden


def causal_keys(seq_len: float, window: int = 0) -> float:
    """Return the number of keys that a causal query meets, its own included, on average over a sequence."""
    reach = min(window or seq_len, seq_len)
    # The first `reach` positions see 1 .. reach keys, all later ones exactly `reach`.
    return (reach * (reach + 1) / 2 + (seq_len - reach) * reach) / seq_len


def evenly(number: int, layers: int) -> tuple[int, ...]:
    """Return the indices of `number` layers spread evenly over all, from the first on: every other one, or five of six,
    as in Gemma.
    """
    return tuple(i for i in range(layers) if -(-(i + 1) * number // layers) > -(-i * number // layers))


@lru_cache(maxsize=256)
def _layer_table(
    layers: int, placed: tuple[int, tuple[int, ...]] | None, window: int, sliding: int | tuple[int, ...]
) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """Return (the kind of every layer, dense layers before each).

    `placed` is (number, indices) of the layers that stay dense in a mixture of experts; None for a dense model.
    """
    slide = frozenset((evenly(sliding, layers) if isinstance(sliding, int) else sliding) if window else ())
    number, ids = placed if placed is not None else (layers, ())
    dense = frozenset(ids or range(number))
    kinds = tuple(LayerKind(sparse=i not in dense, window=window if i in slide else 0) for i in range(layers))
    return kinds, tuple(accumulate((not kind.sparse for kind in kinds), initial=0))
