"""The network, as shapes. Exact parameter counts and FLOPs follow from them; nothing is looked up by name.

Read from a Hugging Face `config.json` by `simulator.hf_config`. Symbols in comments: L layers, h hidden, a query
heads, k key/value heads, d head width, f feed-forward width, V vocabulary, E experts, s sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1). Widths in elements."""

    q_lora_rank: int  # 0: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """Sparse feed-forward layers. `dense_layers` counts the layers that stay dense."""

    experts: int
    experts_per_token: int
    ffn: int  # width of one expert
    shared_ffn: int = 0  # total width of the experts every token visits
    shared_gate: bool = False  # a scalar gate on the shared expert (qwen2-moe)
    router_bias: bool = False  # a per-expert selection bias (deepseek-v3's e_score_correction_bias)
    dense_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder-only transformer. All widths in elements, all counts exact."""

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
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    latent: LatentAttention | None = None
    moe: MixtureOfExperts | None = None
    sliding_window: int = 0
    sliding_layers: int = 0  # how many of the layers attend within `sliding_window` only
    max_positions: int = 0
    multi_token_layers: int = 0  # extra prediction layers that the base count leaves out (deepseek-v3's MTP)
    assumed: tuple[str, ...] = ()

    # --- parameters ---------------------------------------------------------------------------------------------

    @property
    def moe_layers(self) -> int:
        return self.layers - self.moe.dense_layers if self.moe else 0

    @property
    def dense_layers(self) -> int:
        return self.layers - self.moe_layers

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm of width h."""
        return self.hidden * (2 if self.norm_bias else 1)

    @property
    def attention_parameters(self) -> int:
        """Parameters of one attention block without its norms before and after."""
        h = self.hidden
        if self.latent:
            m = self.latent
            qk_dim = m.qk_nope_head_dim + m.qk_rope_head_dim
            if m.q_lora_rank:
                query = h * m.q_lora_rank + m.q_lora_rank + m.q_lora_rank * self.heads * qk_dim
            else:
                query = h * self.heads * qk_dim
            compress = h * (m.kv_lora_rank + m.qk_rope_head_dim) + m.kv_lora_rank
            expand = m.kv_lora_rank * self.heads * (m.qk_nope_head_dim + m.v_head_dim)
            return query + compress + expand + self.heads * m.v_head_dim * h
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = h * (q + 2 * kv) + q * h
        biases = (q + 2 * kv if self.qkv_bias else 0) + (h if self.attention_out_bias else 0)
        return weights + biases + (2 * self.head_dim if self.qk_norm else 0)

    def mlp_parameters(self, width: int) -> int:
        """Parameters of one feed-forward block of the given width."""
        matrices = 3 if self.gated_mlp else 2
        biases = (matrices - 1) * width + self.hidden if self.mlp_bias else 0
        return matrices * self.hidden * width + biases

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts of one MoE layer."""
        return self.moe.experts * self.mlp_parameters(self.moe.ffn) if self.moe else 0

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
        )

    @property
    def active_parameters(self) -> int:
        """Parameters one token passes through: routed experts count as often as they are chosen."""
        if not self.moe:
            return self.parameters
        idle = self.moe.experts - self.moe.experts_per_token
        return self.parameters - self.moe_layers * idle * self.mlp_parameters(self.moe.ffn)

    # --- floating-point operations ------------------------------------------------------------------------------

    @property
    def qk_dim(self) -> int:
        """Width of one query or key head."""
        return self.latent.qk_nope_head_dim + self.latent.qk_rope_head_dim if self.latent else self.head_dim

    @property
    def v_dim(self) -> int:
        """Width of one value head."""
        return self.latent.v_head_dim if self.latent else self.head_dim

    def matmul_parameters(self) -> int:
        """Weights that one token is multiplied with: active matrices, the embedding look-up left out."""
        norms = self.layers * self.block_norm_parameters + (self.norm_parameters if self.final_norm else 0)
        head = self.vocab * self.hidden if self.tied_embeddings else 0
        return self.active_parameters - self.embedding_parameters - norms + head

    def forward_flops_per_token(self, seq_len: int) -> float:
        """FLOPs of one token's forward pass: two per matmul weight, plus causal attention.

        Attention is counted at half the square (causal), as torchtitan, PaLM (arXiv 2204.02311, appendix B) and
        Megatron do not agree on: `full_attention_flops_per_token` gives the other convention.
        """
        return 2.0 * self.matmul_parameters() + 0.5 * self.full_attention_flops_per_token(seq_len)

    def full_attention_flops_per_token(self, seq_len: int) -> float:
        """FLOPs of scores and context for one token over all layers, no causal saving: 2 s a (d_qk + d_v) a layer."""
        return 2.0 * seq_len * self.heads * (self.qk_dim + self.v_dim) * self.layers
