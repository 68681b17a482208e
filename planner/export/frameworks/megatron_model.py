"""Convert between a model's shapes and flags of Megatron-LM's `pretrain_gpt.py`.

Flags and defaults: `megatron/training/arguments.py` and the dataclasses it reads, as megatron-core 0.19.2 ships them.
"""

from __future__ import annotations

import re
from dataclasses import replace

from planner.export.mapping import Settings, truth, whole
from planner.export.named_models import model_said, models_of_shape
from simulator.config.model import LatentAttention, MixtureOfExperts, Model
from simulator.runtimes.library import runtime_spec
from topology.errors import BadInput

# Flags of pretrain_gpt.py that Megatron-Bridge's and other tools' files do not need: dropout off, and no mask of
# sequence x sequence made by the data loader for every sequence, as attention kernels make their own.
DROPOUT = 0.1
FUSED_MASK = "--no-create-attention-mask-in-dataloader"


def set_flags(values: Settings) -> Settings:
    """Return the flags that are set: those with values other than False and None."""
    return {flag: value for flag, value in values.items() if value is not None and value is not False}


def model_flags(model: Model) -> Settings:
    """Return the flags of the model's shape; True stands for a flag without a value."""
    moe, latent = model.moe, model.latent
    grouped = latent is None and model.kv_heads < model.heads
    dropout = DROPOUT if has_dropout(model) else 0.0
    flags: Settings = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn or (moe.ffn if moe else None),
        "--num-attention-heads": model.heads,
        "--group-query-attention": grouped,
        "--num-query-groups": model.kv_heads if grouped else None,
        "--kv-channels": None if latent else model.head_dim,
        "--vocab-size": model.vocab,
        "--normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "--position-embedding-type": "rope" if model.rotary else "learned_absolute",
        "--swiglu": model.gated_mlp,
        "--disable-bias-linear": not model.mlp_bias,
        "--add-qkv-bias": model.qkv_bias and not model.mlp_bias,
        # With latent attention these are the norms on the compressed vectors, which all such models have.
        "--qk-layernorm": model.qk_norm or latent is not None,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
        "--attention-dropout": dropout,
        "--hidden-dropout": dropout,
        FUSED_MASK: True,
    }
    if latent:
        flags |= {
            "--multi-latent-attention": True,
            "--q-lora-rank": latent.q_lora_rank or None,
            "--kv-lora-rank": latent.kv_lora_rank,
            "--qk-head-dim": latent.qk_nope_head_dim,
            "--qk-pos-emb-head-dim": latent.qk_rope_head_dim,
            "--v-head-dim": latent.v_head_dim,
        }
    if moe:
        routed = [int(kind.sparse) for kind in model.layer_kinds]
        flags |= {
            "--num-experts": moe.experts,
            "--moe-router-topk": moe.experts_per_token,
            "--moe-ffn-hidden-size": moe.ffn,
            "--moe-shared-expert-intermediate-size": moe.shared_ffn or None,
            "--moe-shared-expert-gate": moe.shared_gate,
            "--moe-router-score-function": "sigmoid" if moe.selection_bias else None,
            "--moe-router-enable-expert-bias": moe.selection_bias,
            "--moe-layer-freq": None if all(routed) else str(routed).replace(" ", ""),  # its parser accepts no blanks
            "--moe-grouped-gemm": True,
        }
    return set_flags(flags)


def has_dropout(model: Model) -> bool:
    """Return whether the model was predicted with dropout, as GPT models are."""
    return runtime_spec("megatron-lm").dropout and model.family in {"gpt", "gpt2"}


# Flags whose value is not read, since no shape or cost depends on it.
MODEL_KEYS = frozenset(
    {
        "--num-layers",
        "--hidden-size",
        "--ffn-hidden-size",
        "--num-attention-heads",
        "--group-query-attention",
        "--num-query-groups",
        "--kv-channels",
        "--vocab-size",
        "--normalization",
        "--position-embedding-type",
        "--swiglu",
        "--disable-bias-linear",
        "--add-qkv-bias",
        "--qk-layernorm",
        "--untie-embeddings-and-output-weights",
        "--attention-dropout",
        "--hidden-dropout",
        FUSED_MASK,
        "--multi-latent-attention",
        "--q-lora-rank",
        "--kv-lora-rank",
        "--qk-head-dim",
        "--qk-pos-emb-head-dim",
        "--v-head-dim",
        "--num-experts",
        "--moe-router-topk",
        "--moe-ffn-hidden-size",
        "--moe-shared-expert-intermediate-size",
        "--moe-shared-expert-gate",
        "--moe-router-score-function",
        "--moe-router-enable-expert-bias",
        "--moe-layer-freq",
        "--moe-grouped-gemm",
        "--max-position-embeddings",
    }
)
# Flags of models with other kinds of layers, and the name of the kind.
_OTHER_LAYERS = {
    r"--(is-)?hybrid-.*|--mamba-.*": "a hybrid of state-space and attention layers",
    r"--linear-.*|--experimental-attention-variant": "linear attention",
    r"--heterogeneous-layers-.*": "layers of different shapes",
    r"--encoder-num-layers|--decoder-num-layers": "an encoder and a decoder",
    r"--((vision|img|num-image|disable-vision)-.*|patch-(dim|size))": "a vision tower",
    r"--(model|dataset)-provider|--language-model-checkpoint": "a language model among other parts",
    r"--spec": "layers of the program's own",
}
# Vocabularies of tokenizers whose file is not available: GPT-2's, Llama 2's.
_VOCABULARIES = {"gpt2bpetokenizer": 50257, "llama2tokenizer": 32000}


def model_of_flags(settings: Settings, name: str) -> tuple[Model, tuple[str, ...]]:
    """Return the model that flags describe, and assumptions about it. Raises BadInput for shapes that are not
    stated.
    """
    for flag in settings:
        for pattern, kind in _OTHER_LAYERS.items():
            if re.fullmatch(pattern, flag) and settings[flag] is not False:
                raise BadInput(f"{flag} asks for {kind}, which is not modelled")
    if str(settings.get("--tokenizer-type", "")).lower().startswith("bertwordpiece"):
        raise BadInput("its tokenizer is BERT's, whose model is not modelled")
    for flag in ("--num-layers", "--hidden-size", "--num-attention-heads"):
        if flag not in settings:
            raise BadInput(f"{flag} is not stated", why="the model's shapes are its flags", remedy="--model NAME")
    layers, hidden, heads = (
        whole(settings, f"--{word}") for word in ("num-layers", "hidden-size", "num-attention-heads")
    )
    gated, biased = truth(settings, "--swiglu"), not truth(settings, "--disable-bias-linear")
    latent = _latent(settings) if truth(settings, "--multi-latent-attention") else None
    # arguments.py, validate_args: four times the width, or two thirds of it in multiples of 64 with a gate.
    default_ffn = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    ffn = whole(settings, "--ffn-hidden-size", default_ffn)
    kv_heads = whole(settings, "--num-query-groups", 1) if truth(settings, "--group-query-attention") else heads
    position = settings.get("--position-embedding-type", "learned_absolute")
    norm = str(settings.get("--normalization", "LayerNorm")).lower()
    moe = _experts(settings, layers, ffn) if "--num-experts" in settings else None
    assumed: list[str] = []
    shape = (layers, hidden, heads, kv_heads)
    vocab = _vocabulary(settings, (*shape, ffn), assumed)
    length = whole(settings, "--max-position-embeddings", 0, least=0)
    rotary = position != "learned_absolute"
    model = Model(
        name=name,
        family=_family(
            moe, latent, gated=gated, plain=not rotary or str(settings.get("--hidden-dropout", DROPOUT)) != "0.0"
        ),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=whole(settings, "--kv-channels", hidden // heads),
        ffn=ffn,
        vocab=vocab,
        gated_mlp=gated,
        tied_embeddings=not truth(settings, "--untie-embeddings-and-output-weights"),
        learned_positions=0 if rotary else length,
        norm="rmsnorm" if norm == "rmsnorm" else "layernorm",
        norm_bias=norm != "rmsnorm",
        qk_norm=truth(settings, "--qk-layernorm") and latent is None,
        qkv_bias=biased or truth(settings, "--add-qkv-bias"),
        attention_out_bias=biased,
        mlp_bias=biased,
        latent=latent,
        moe=moe,
        max_positions=length,
        rotary=rotary,
    )
    same = (one for one in models_of_shape(layers, hidden, heads) if _same_sizes(one, model))
    known = next(same, None)
    return (model if known is None else replace(model, name=known.name)), tuple(assumed)


def _same_sizes(one: Model, other: Model) -> bool:
    experts = [model.moe and (model.moe.experts, model.moe.experts_per_token, model.moe.ffn) for model in (one, other)]
    return experts[0] == experts[1] and all(
        getattr(one, size) == getattr(other, size) for size in ("kv_heads", "head_dim", "ffn", "vocab", "parameters")
    )


def _family(moe: MixtureOfExperts | None, latent: LatentAttention | None, *, gated: bool, plain: bool) -> str:
    """Return the family whose operators a model with these parts runs; `plain`: a GPT, with dropout or learned
    positions.
    """
    if latent:
        return "deepseek_v3" if moe and moe.router_bias else "deepseek_v2"
    if moe:
        return "mixtral"
    if gated:
        return "llama"
    return "gpt" if plain else "gpt_neox"


def _latent(settings: Settings) -> LatentAttention:
    # Defaults of MLATransformerConfig.
    return LatentAttention(
        q_lora_rank=whole(settings, "--q-lora-rank", 0),
        kv_lora_rank=whole(settings, "--kv-lora-rank", 32),
        qk_nope_head_dim=whole(settings, "--qk-head-dim", 128),
        qk_rope_head_dim=whole(settings, "--qk-pos-emb-head-dim", 64),
        v_head_dim=whole(settings, "--v-head-dim", 128),
    )


def _experts(settings: Settings, layers: int, ffn: int) -> MixtureOfExperts:
    shared = settings.get("--moe-shared-expert-intermediate-size")
    return MixtureOfExperts(
        experts=whole(settings, "--num-experts"),
        experts_per_token=whole(settings, "--moe-router-topk", 2),
        ffn=whole(settings, "--moe-ffn-hidden-size", ffn),
        shared_ffn=0 if shared is None else whole(settings, "--moe-shared-expert-intermediate-size"),
        shared_gate=truth(settings, "--moe-shared-expert-gate"),
        router_bias=truth(settings, "--moe-router-enable-expert-bias"),
        **_dense(settings.get("--moe-layer-freq", 1), layers),
    )


def _dense(frequency: object, layers: int) -> Settings:
    """Return which layers are dense: `--moe-layer-freq` is a number N (every N-th is sparse) or a list of 0 and 1,
    which may be a sum of multiplied lists, such as ([0]*3+[1]*58).
    """
    pattern = _pattern(str(frequency), layers)
    dense = tuple(index for index, sparse in enumerate(pattern) if not sparse)
    leading = dense == tuple(range(len(dense)))
    return {"dense_layers": len(dense), "dense_layer_ids": () if leading else dense}


def _pattern(text: str, layers: int) -> list[int]:
    compact = text.replace(" ", "").strip("'\"")
    if compact.isdecimal() and 0 < int(compact[:6]) <= layers:
        return [int(index % int(compact) == 0) for index in range(layers)]
    pattern: list[int] = []
    for part in compact.removeprefix("(").removesuffix(")").split("+"):
        listed, _, times = part.strip("()").partition("*")
        bits = listed.strip("[]").split(",")
        if not all(bit in {"0", "1"} for bit in bits) or (times and not times.isdecimal()):
            break
        pattern += [int(bit) for bit in bits] * min(int(times[:6] or 1), layers + 1)
    if len(pattern) != layers:
        raise BadInput(
            f"--moe-layer-freq {text[:60]!r} does not describe {layers} layers", why="a number, or 0 and 1 a layer"
        )
    return pattern


def _vocabulary(settings: Settings, shape: tuple[int, ...], assumed: list[str]) -> int:
    """Return the vocabulary; the default is that of the named tokenizer, or of a known model with this shape: layers,
    width, heads, key/value heads, feed-forward width.
    """
    for flag in ("--vocab-size", "--padded-vocab-size"):
        if flag in settings:
            return whole(settings, flag)
    for flag in ("--tokenizer-model", "--tokenizer-name-or-path"):
        named, _ = model_said(settings.get(flag))
        if named is not None:
            assumed.append(f"vocabulary of {named.vocab} (that of {named.name}, which {flag} names)")
            return named.vocab
    kind = str(settings.get("--tokenizer-type", "")).lower()
    for one in models_of_shape(*shape[:3]) if kind not in _VOCABULARIES else ():
        if (one.kv_heads, one.ffn or (one.moe.ffn if one.moe else 0)) == shape[3:]:
            assumed.append(f"vocabulary of {one.vocab} (that of {one.name}; the tokenizer was not read)")
            return one.vocab
    vocab = _VOCABULARIES.get(kind, 50257)
    assumed.append(f"vocabulary of {vocab} ({kind or 'no tokenizer'} is stated, and no vocabulary)")
    return vocab
