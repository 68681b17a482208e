"""Families of models as data: the shapes of their modules and the defaults of their config classes.

`config_class` is the class of Hugging Face transformers 5.23 (src/transformers/models/<family>/configuration_*.py)
whose defaults stand here; which projections and norms exist, and which carry biases, is from modeling_*.py next to it.
One family has no such class: `gpt` is Megatron-LM's GPTModel with the defaults of its command line
(megatron/training/arguments.py: biases, LayerNorm, learned positions, output tied to the embedding).

Sizes (layers, hidden, heads, feed-forward, vocabulary, experts) never have a default here: a class's default sizes are
those of one particular model, which need not be the one asked about.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Shapes and defaults of one `model_type`.

    `kv_heads` and `head_dim` are what the class assumes for an absent key (None: as many as query heads; hidden over
    heads). A bias is fixed when its key is empty; otherwise the value here is the key's default. Latent attention
    takes the widths of DeepSeek's classes, which are the same in V2 and V3 (`LATENT_DEFAULTS`).
    """

    config_class: str
    kv_heads: int | None = None
    head_dim: int | None = None
    tied: bool = False
    gated_mlp: bool = True
    norm: str = "rmsnorm"
    norms_per_layer: int = 2
    rotary: bool = True
    parallel_residual: bool = False
    qk_norm: bool = False
    qk_norm_key: str = ""
    qk_norm_wide: bool = False
    biases: tuple[bool, bool, bool] = (False, False, False)  # of queries, keys and values, of their output, of the MLP
    bias_keys: tuple[str, str, str] = ("", "", "")
    head_bias: bool = False
    multi_head_only: bool = False  # no grouped queries: heads and key/value heads are the same
    latent: bool = False
    indexed: bool = False  # queries of latent attention meet only the keys that an indexer chooses
    experts: str = "optional"  # optional (dense without the keys), required
    expert_width_keys: tuple[str, ...] = ("moe_intermediate_size",)
    attention_gate: bool = False
    linear: bool = False  # most layers have linear attention, see attention_kinds
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    shared_experts: int | None = None  # default of n_shared_experts; None: none unless the key is given
    shared_expert_width: int | None = None  # default of shared_expert_intermediate_size
    dense_first: int = 0  # default of first_k_dense_replace
    sliding: str = "none"  # see hf_config._sliding
    sliding_window: int = 0  # default when the key is absent; 0: none
    generic: bool = False  # a generic kind of network, which accepts keys that its class does not have
    dropout: bool = False  # dropout of the residual stream, by default
    inner_is_4h: bool = False  # feed-forward width is 4 h unless stated
    positions_default: int = 0  # rows of the learned position table when unstated


# Both DeepseekV2Config and DeepseekV3Config.
LATENT_DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

EVERYWHERE = (True, True, True)
ATTENTION = ("attention_bias", "attention_bias", "")
ATTENTION_AND_MLP = ("attention_bias", "attention_bias", "mlp_bias")

QWEN3_NEXT = Family(
    config_class="Qwen3NextConfig",
    kv_heads=2,
    head_dim=256,
    qk_norm=True,
    attention_gate=True,
    linear=True,
    experts="required",
    shared_gate=True,
    shared_expert_width=512,
)
DEEPSEEK_V3 = Family(
    config_class="DeepseekV3Config",
    latent=True,
    experts="required",
    shared_experts=1,
    dense_first=3,
    router_bias=True,
    bias_keys=ATTENTION,
)

FAMILIES: dict[str, Family] = {
    "llama": Family(config_class="LlamaConfig", generic=True, bias_keys=ATTENTION_AND_MLP),
    "mistral": Family(config_class="MistralConfig", kv_heads=8, sliding="all", sliding_window=4096),
    "mixtral": Family(
        config_class="MixtralConfig",
        kv_heads=8,
        sliding="all",
        experts="required",
        expert_width_keys=("intermediate_size", "moe_intermediate_size"),
    ),
    "qwen2": Family(
        config_class="Qwen2Config", kv_heads=32, sliding="qwen", sliding_window=4096, biases=(True, False, False)
    ),
    "qwen2_moe": Family(
        config_class="Qwen2MoeConfig",
        kv_heads=16,
        sliding="qwen-moe",
        sliding_window=4096,
        experts="required",
        shared_gate=True,
        shared_expert_width=5632,
        biases=(True, False, False),
        bias_keys=("qkv_bias", "", ""),
    ),
    "qwen3": Family(
        config_class="Qwen3Config",
        kv_heads=32,
        head_dim=128,
        qk_norm=True,
        sliding="qwen",
        sliding_window=4096,
        bias_keys=ATTENTION,
    ),
    "qwen3_moe": Family(
        config_class="Qwen3MoeConfig",
        kv_heads=4,
        qk_norm=True,
        sliding="qwen-all",
        sliding_window=4096,
        experts="required",
        bias_keys=ATTENTION,
    ),
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_moe_text": replace(QWEN3_NEXT, config_class="Qwen3_5MoeTextConfig"),
    "qwen3_5_text": Family(
        config_class="Qwen3_5TextConfig", kv_heads=4, head_dim=256, qk_norm=True, attention_gate=True, linear=True
    ),
    "deepseek_v2": Family(
        config_class="DeepseekV2Config", latent=True, experts="required", shared_experts=2, bias_keys=ATTENTION_AND_MLP
    ),
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": replace(DEEPSEEK_V3, config_class="DeepseekV32Config", indexed=True),
    "glm_moe_dsa": replace(DEEPSEEK_V3, config_class="GlmMoeDsaConfig", indexed=True),
    "gpt2": Family(
        config_class="GPT2Config",
        dropout=True,
        tied=True,
        gated_mlp=False,
        norm="layernorm",
        rotary=False,
        multi_head_only=True,
        inner_is_4h=True,
        positions_default=1024,
        biases=EVERYWHERE,
    ),
    "gpt_neox": Family(
        config_class="GPTNeoXConfig",
        gated_mlp=False,
        norm="layernorm",
        parallel_residual=True,
        multi_head_only=True,
        biases=EVERYWHERE,
        bias_keys=ATTENTION,
    ),
    "gptj": Family(
        config_class="GPTJConfig",
        head_bias=True,
        gated_mlp=False,
        norm="layernorm",
        norms_per_layer=1,
        parallel_residual=True,
        multi_head_only=True,
        inner_is_4h=True,
        biases=(False, False, True),
    ),
    "falcon": Family(
        config_class="FalconConfig",
        tied=True,
        gated_mlp=False,
        norm="layernorm",
        parallel_residual=True,
        inner_is_4h=True,
        bias_keys=("bias", "bias", "bias"),
    ),
    "gpt": Family(
        config_class="Megatron-LM GPTModel",
        generic=True,
        dropout=True,
        tied=True,
        gated_mlp=False,
        norm="layernorm",
        rotary=False,
        inner_is_4h=True,
        biases=EVERYWHERE,
        bias_keys=ATTENTION_AND_MLP,
    ),
    "gemma": Family(config_class="GemmaConfig", kv_heads=16, head_dim=256, tied=True, bias_keys=ATTENTION),
    "gemma2": Family(
        config_class="Gemma2Config",
        kv_heads=4,
        head_dim=256,
        tied=True,
        norms_per_layer=4,
        sliding="every-other",
        sliding_window=4096,
        bias_keys=ATTENTION,
    ),
    "gemma3_text": Family(
        config_class="Gemma3TextConfig",
        kv_heads=4,
        head_dim=256,
        tied=True,
        norms_per_layer=4,
        qk_norm=True,
        sliding="five-of-six",
        sliding_window=4096,
        bias_keys=ATTENTION,
    ),
    "gpt_oss": Family(
        config_class="GptOssConfig",
        kv_heads=8,
        head_dim=64,
        experts="required",
        expert_width_keys=("intermediate_size",),
        expert_bias=True,
        router_bias=True,
        sliding="every-other",
        sliding_window=128,
        biases=(True, True, False),
        bias_keys=ATTENTION,
    ),
    "phi3": Family(config_class="Phi3Config", sliding="all"),
    "olmo2": Family(config_class="Olmo2Config", qk_norm=True, qk_norm_wide=True, bias_keys=ATTENTION),
    "olmo3": Family(
        config_class="Olmo3Config",
        qk_norm=True,
        qk_norm_wide=True,
        sliding="three-of-four",
        sliding_window=4096,
        bias_keys=ATTENTION,
    ),
    "olmoe": Family(
        config_class="OlmoeConfig",
        qk_norm=True,
        qk_norm_wide=True,
        experts="required",
        expert_width_keys=("intermediate_size",),
        bias_keys=ATTENTION,
    ),
    "smollm3": Family(config_class="SmolLM3Config", kv_heads=4, tied=True, bias_keys=ATTENTION_AND_MLP),
    "granite": Family(config_class="GraniteConfig", bias_keys=ATTENTION_AND_MLP),
    "granitemoe": Family(
        config_class="GraniteMoeConfig",
        experts="required",
        expert_width_keys=("intermediate_size",),
        bias_keys=ATTENTION,
    ),
    "glm": Family(
        config_class="GlmConfig",
        kv_heads=2,
        head_dim=128,
        biases=(True, False, False),
        bias_keys=("attention_bias", "", ""),
    ),
    "glm4": Family(
        config_class="Glm4Config",
        kv_heads=2,
        head_dim=128,
        norms_per_layer=4,
        biases=(True, False, False),
        bias_keys=("attention_bias", "", ""),
    ),
    "glm4_moe": Family(
        config_class="Glm4MoeConfig",
        kv_heads=8,
        qk_norm_key="use_qk_norm",
        experts="required",
        shared_experts=1,
        dense_first=1,
        router_bias=True,
        bias_keys=("attention_bias", "", ""),
    ),
    "minimax_m2": Family(
        config_class="MiniMaxM2Config",
        kv_heads=8,
        head_dim=128,
        qk_norm=True,
        qk_norm_wide=True,
        experts="required",
        expert_width_keys=("intermediate_size",),
        router_bias=True,
    ),
    "starcoder2": Family(
        config_class="Starcoder2Config",
        kv_heads=2,
        tied=True,
        gated_mlp=False,
        norm="layernorm",
        sliding="all",
        biases=EVERYWHERE,
        bias_keys=("use_bias", "use_bias", "use_bias"),
    ),
}

# Keys that every config.json may carry and that change no shape. Some change cost a little (activation, rope
# variant); none changes a count of parameters or of matmul FLOPs.
IRRELEVANT = frozenset({
    "_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset", "_source", "name",
    "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "pretraining_tp", "tokenizer_class",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id",
    "hidden_act", "hidden_activation", "activation_function", "initializer_range", "initializer_factor",
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "rope_local_base_freq", "rotary_emb_base",
    "rotary_pct", "partial_rotary_factor", "original_max_position_embeddings", "rope_type",
    "attention_dropout", "hidden_dropout", "classifier_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "residual_dropout", "embedding_dropout", "dropout", "attention_probs_dropout_prob", "hidden_dropout_prob",
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux",
    "norm_topk_prob", "scoring_func", "topk_method", "topk_group", "n_group", "routed_scaling_factor", "ep_size",
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj",
    "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "task_specific_params", "n_ctx",
    "id2label", "label2id", "num_labels", "problem_type", "return_dict", "output_attentions", "output_hidden_states",
    "use_bidirectional_attention", "cache_implementation", "bad_words_ids", "is_decoder", "gradient_checkpointing",
    "chunk_size_feed_forward", "max_length", "min_length", "temperature", "top_k", "top_p", "do_sample",
    "begin_suppress_tokens", "suppress_tokens", "prefix", "finetuning_task", "torchscript", "tie_encoder_decoder",
    "attention_type", "use_flash_attn", "flash_attn", "mamba_ssm_dtype", "seq_length", "unsloth_version",
    "unsloth_fixed", "initial_context_length", "swiglu_limit",
    "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
    "no_rope_layers", "no_rope_layer_interval", "rotary_dim", "use_routing_bias", "qk_norm_type",
    "qk_head_dim", "embd_layer_norm", "tf_legacy_loss", "use_bfloat16", "trust_remote_code",
    "mtp_use_dedicated_embeddings",
})  # fmt: skip

# Keys that do change shapes. A family without such a key refuses it, since its counts would be wrong; false, null, 0
# and an empty list say that the feature is absent.
SHAPE_CHANGING = frozenset({
    "text_config", "vision_config", "audio_config", "encoder", "is_encoder_decoder", "add_cross_attention",
    "cross_attention_layers", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size", "num_experts", "num_local_experts",
    "n_routed_experts", "num_experts_per_tok", "experts_per_token", "moe_intermediate_size", "decoder_sparse_step",
    "mlp_only_layers", "mlp_layer_types",
    "first_k_dense_replace", "moe_layer_freq", "layer_types", "hybrid_override_pattern", "full_attention_interval",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "ssm_state_size", "mamba_num_heads", "attn_layer_period", "num_kv_shared_layers", "embedding_size",
    "word_embed_proj_dim", "n_inner", "ffn_hidden_size", "ffn_dim", "n_embd", "n_layer", "n_head", "d_model",
    "n_layers", "n_heads", "num_layers", "multi_query", "index_n_heads", "index_head_dim", "block_configs",
    "indexer_types", "index_topk_freq", "index_topk",
    "hidden_size_per_layer_input", "o_lora_rank", "attn_output_gate", "layer_group_size",
})  # fmt: skip
