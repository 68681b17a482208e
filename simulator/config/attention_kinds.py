"""Kinds of attention other than softmax over keys and values, read from a config.json: latent, and linear in most
layers.
"""

from __future__ import annotations

from simulator.config.config_reader import MAX_LAYERS, ConfigReader, show
from simulator.config.model import Indexer, LatentAttention, LinearAttention
from simulator.config.model_families import LATENT_DEFAULTS


def latent_attention(reader: ConfigReader) -> LatentAttention:
    def width(key: str) -> int:
        value = reader.integer(key)
        if value is None:
            value = LATENT_DEFAULTS[key]
            reader.assume(key, value)
        return value

    # An explicit null or 0 says that queries are not compressed (DeepSeek-V2-Lite); an absent key does not.
    direct = "q_lora_rank" in reader.config and not reader.stated("q_lora_rank")
    return LatentAttention(
        q_lora_rank=0 if direct and reader.count("q_lora_rank") == 0 else width("q_lora_rank"),
        kv_lora_rank=width("kv_lora_rank"),
        qk_nope_head_dim=width("qk_nope_head_dim"),
        qk_rope_head_dim=width("qk_rope_head_dim"),
        v_head_dim=width("v_head_dim"),
        indexer=_indexer(reader) if reader.family.indexed else None,
    )


def _indexer(reader: ConfigReader) -> Indexer:
    return Indexer(
        heads=reader.size("index_n_heads"), width=reader.size("index_head_dim"), keys=reader.size("index_topk")
    )


def linear_attention(reader: ConfigReader, layers: int) -> LinearAttention | None:
    """Return which layers have linear attention: those that `layer_types` names, else all but every fourth."""
    named = layers_of_type(reader, layers, "layer_types", ("full_attention", "linear_attention"))
    every = reader.integer("full_attention_interval", high=MAX_LAYERS) or 4
    if reader.config.get("attn_output_gate") is not None and not reader.flag("attn_output_gate", default=True):
        raise reader.bad("attention without its gate", remedy="set attn_output_gate to true")
    count = layers - layers // every if named is None else len(named)
    sizes = {
        "key_heads": reader.size("linear_num_key_heads"),
        "value_heads": reader.size("linear_num_value_heads"),
        "key_dim": reader.size("linear_key_head_dim"),
        "value_dim": reader.size("linear_value_head_dim"),
        "kernel": reader.integer("linear_conv_kernel_dim") or 4,
    }
    return LinearAttention(layers=count, **sizes) if count else None


def layers_of_type(reader: ConfigReader, layers: int, key: str, known: tuple[str, str]) -> tuple[int, ...] | None:
    """Return which layers have the second of two types in a list with one type per layer; None when the list is
    absent.
    """
    types = reader.stated(key)
    if types is None:
        return None
    if type(types) is not list or len(types) != layers or any(kind not in known for kind in types):
        raise reader.bad(
            f"{key!r} is {show(types)}", why=f"it must name each of the {layers} layers {' or '.join(known)}"
        )
    return tuple(i for i, kind in enumerate(types) if kind == known[1])
