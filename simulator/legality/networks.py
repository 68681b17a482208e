"""Parts of a model that a framework's own model code cannot express; without them a run would train another model."""

from __future__ import annotations

from collections.abc import Callable

from simulator.config.model import Model
from topology.errors import BadPlan

# Feature, in words that follow "has no".
FEATURES: dict[str, Callable[[Model], bool]] = {
    "biases in latent attention": lambda m: m.latent is not None and m.qkv_bias,
    "learned positions": lambda m: m.learned_positions > 0,
    "layer norms or norms with biases": lambda m: m.norm != "rmsnorm" or m.norm_bias,
    "more or fewer than two norms in a layer": lambda m: m.norms_per_layer != 2,
    "network without a final norm": lambda m: not m.final_norm,
    "feed-forward without a gate": lambda m: not m.gated_mlp,
    "query norm over all heads": lambda m: m.qk_norm and m.qk_norm_wide,
    "biases other than on q, k and v": lambda m: m.attention_out_bias or m.mlp_bias or m.head_bias,
    "attention without rotary positions": lambda m: not m.rotary,
    "parallel residuals": lambda m: m.parallel_residual,
    "biases on experts": lambda m: m.moe is not None and m.moe.expert_bias,
}


def features(model: Model) -> tuple[str, ...]:
    """Return the names of the `FEATURES` that a model has."""
    return tuple(name for name, has in FEATURES.items() if has(model))


def torchtitan_family(model: Model) -> str:
    """Return which of torchtitan's models can express this one: `llama3` or `qwen3`. Raises BadPlan if none can."""
    plain = model.gated_mlp and model.latent is None and not model.qkv_bias and not model.sliding_layers
    if plain and model.moe is None and not model.qk_norm and model.head_dim * model.heads == model.hidden:
        if not model.tied_embeddings:
            return "llama3"
        why = "its Llama has an embedding and a head of their own, and this model ties them"
    elif plain and model.qk_norm and (model.moe is None or (model.moe.shared_ffn == 0 and model.dense_layers == 0)):
        return "qwen3"
    else:
        why = "only its Llama and its Qwen 3 are run here"
    raise BadPlan(
        f"no model of torchtitan has the network of {model.name}",
        why=why,
        remedy="--command runs a torchtitan of your own; --framework meshwright runs it here",
    )
