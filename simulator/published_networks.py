"""What a short description of a mixture of experts leaves out, from the published network that has its dimensions.

Benchmarks describe sparse networks in the words for a Llama or a GPT with experts: hidden size, heads, widths, vocabulary.
Latent attention, shared experts and the dense layers at the start have no word there, and without them a
DeepSeek is another network, a fifth quicker and with other memory. But no two published networks share all these
dimensions. So a plain description that has every one of a shipped network's is read as that network, of as many
layers as it states; what it does state is kept, and what was filled in is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERT_WIDTHS = ("moe_intermediate_size", "intermediate_size")
# Together they name a network. The number of layers is not among them: benchmarks cut it to fit few GPUs.
IDENTITY = ("hidden_size", "num_attention_heads", "vocab_size", "num_experts_per_tok")
# Words that only a plain description has, and the value that says nothing new about a published network.
PLAIN_WORDS = {"gated_mlp": True, "normalization": "rmsnorm", "norm_bias": False, "position_embedding_type": "rope"}
# What a run adds to the network, and so must ask for.
OF_THE_RUN = ("num_nextn_predict_layers",)


def complete(
    config: Mapping[str, Any], published: Iterable[tuple[str, dict[str, Any]]]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return `config` with what the published network of its dimensions adds, and sentences that say so.

    `config` is of a plain family, `published` are names and config.json of shipped networks. Where none has these
    dimensions, or something stated contradicts it, `config` comes back as it is, without a sentence.
    """
    for name, network in published:
        if _same_network(config, network):
            return _filled(config, name, network)
    return dict(config), ()


def _experts(config: Mapping[str, Any]) -> object:
    return next((config[key] for key in EXPERT_KEYS if config.get(key) is not None), None)


def _expert_width(config: Mapping[str, Any]) -> object:
    return next((config[key] for key in EXPERT_WIDTHS if config.get(key) is not None), None)


def _same_network(config: Mapping[str, Any], network: Mapping[str, Any]) -> bool:
    if not _experts(network) or _experts(config) != _experts(network):
        return False
    if any(config.get(key) != network[key] for key in IDENTITY) or _expert_width(config) != _expert_width(network):
        return False
    for key in ("num_key_value_heads", "intermediate_size", "tie_word_embeddings"):
        if config.get(key) is not None and key in network and config[key] != network[key]:
            return False
    if config.get("head_dim") not in (None, network.get("head_dim"), _even_share(config)):
        return False
    return all(config.get(word) in (None, usual) for word, usual in PLAIN_WORDS.items())


def _even_share(config: Mapping[str, Any]) -> int:
    """The head width of whoever has no other: the hidden size shared among the heads."""
    return int(config["hidden_size"] // config["num_attention_heads"])


def _filled(config: Mapping[str, Any], name: str, network: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    own = {key for key in config if key in EXPERT_KEYS or key in PLAIN_WORDS or key in {"model_type", "head_dim"}}
    stated = {key: value for key, value in config.items() if key not in own and value is not None}
    filled = {key: value for key, value in network.items() if key not in OF_THE_RUN} | stated
    layers, dense = config.get("num_hidden_layers"), network.get("first_k_dense_replace")
    if dense and "first_k_dense_replace" not in stated and type(layers) is int:
        filled["first_k_dense_replace"] = _leading_dense(layers, dense, network["num_hidden_layers"])
    added = [
        f"{key} {value}"
        for key, value in filled.items()
        if key not in config and key not in {"max_position_embeddings", *EXPERT_KEYS} and value is not None
    ]
    said = [f"read as {name}, which has these dimensions: {', '.join(added)}"]
    if config.get("head_dim") not in (None, network.get("head_dim")):
        said.append(f"head_dim {config['head_dim']} not used: {name} does not share its hidden size among its heads")
    return filled, tuple(said)


def _leading_dense(layers: int, dense: int, published_layers: int) -> int:
    """Dense layers at the start of a network cut to `layers`: their share of it, at least one of each kind left."""
    return min(dense, max(1, (2 * dense * layers + published_layers) // (2 * published_layers)))  # rounded, any size
