"""A model's vital numbers as plain data, for JSON output and tables."""

from __future__ import annotations

from simulator.config.model import Model


def describe(model: Model, *, seq_len: int = 4096) -> dict[str, object]:
    """Return shapes, parameter counts and FLOPs per token at `seq_len` tokens. Counts are exact integers.

    `flops_per_token` holds one forward pass with causal attention, and forward plus backward in both conventions:
    `training_causal` counts the half square of scores that is needed, `training_full` the whole square that MFU is
    usually quoted with (PaLM, Megatron, torchtitan). Nothing recomputed is counted.
    """
    moe, latent = model.moe, model.latent
    description: dict[str, object] = {
        "name": model.name,
        "family": model.family,
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.qk_dim,
        "ffn": model.ffn,
        "vocab": model.vocab,
        "max_positions": model.max_positions,
        "sliding_window": model.sliding_window,
        "sliding_layers": model.windowed_layers,
        "parameters": {
            "total": model.parameters,
            "active": model.active_parameters,
            "embedding": model.embedding_parameters,
            "head": model.head_parameters,
            "dense_layer": model.dense_layer_parameters if model.dense_layers else 0,
            "sparse_layer": model.moe_layer_parameters if moe else 0,
            "attention": model.attention_parameters,
            "multi_token": model.multi_token_parameters,
        },
        "kv_elements_per_token": _kv_elements_per_token(model),
        "seq_len": seq_len,
        "flops_per_token": {
            "forward_causal": model.forward_flops_per_token(seq_len),
            "training_causal": model.training_flops_per_token(seq_len, causal=True),
            "training_full": model.training_flops_per_token(seq_len),
        },
        "assumed": list(model.assumed),
    }
    if moe:
        description["experts"] = {
            "count": moe.experts,
            "per_token": moe.experts_per_token,
            "ffn": moe.ffn,
            "shared_ffn": moe.shared_ffn,
            "sparse_layers": model.moe_layers,
            "dense_layers": model.dense_layers,
            "parameters_per_layer": model.expert_parameters,
        }
    if latent:
        description["latent_attention"] = {
            "q_lora_rank": latent.q_lora_rank,
            "kv_lora_rank": latent.kv_lora_rank,
            "qk_nope_head_dim": latent.qk_nope_head_dim,
            "qk_rope_head_dim": latent.qk_rope_head_dim,
            "v_head_dim": latent.v_head_dim,
        }
    return description


def _kv_elements_per_token(model: Model) -> int:
    """Return the cached elements of one token over all layers: keys and values, or the shared latent vector."""
    if model.latent:
        return model.layers * (model.latent.kv_lora_rank + model.latent.qk_rope_head_dim)
    return model.layers * 2 * model.kv_heads * model.head_dim
