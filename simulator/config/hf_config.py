"""Read a Hugging Face `config.json` as a `Model`, from data alone.

The file is a dictionary of plain values and nothing else: code that it names (`auto_map`) is never imported and
nothing is downloaded. Every key is either read, known to change no shape, or reported; a key that would change shapes
in a way that its family here does not have is refused, because a wrong count is worse than none.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from simulator.config.attention_kinds import latent_attention, layers_of_type, linear_attention
from simulator.config.config_reader import MAX_LAYERS, MAX_WIDTH, ConfigReader, show
from simulator.config.hub_models import ON_THE_HUB, SHIPPED, hub_model, hub_names_near, name_of_file
from simulator.config.model import LatentAttention, MixtureOfExperts, Model, evenly
from simulator.config.model_families import FAMILIES
from simulator.config.verify import verify_model
from topology.codec import JsonObject, parse_json, read_json, read_text
from topology.errors import BadModel

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_STEP_KEYS = ("interleave_moe_layer_step",)  # Llama4TextConfig's name for decoder_sparse_step
INFINITE = re.compile(r"(?<=[\s\[,:])-?Infinity(?=[\s\],}])")  # as Python writes it, in time_step_limit
_NEXT_TOKEN_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def model_from_config(config: JsonObject, *, name: str) -> Model:
    """Return the `Model` that a decoded config.json describes.

    `Model.assumed` lists defaults that stood in for absent keys (with the class they come from), and keys that were
    ignored. Raises BadModel when a size is missing, out of range or of the wrong type, when keys contradict each
    other, and when the family or a shape-changing key is not one this reader knows.
    """
    if not isinstance(config, dict):
        raise BadModel(f"model {show(name)} is not a JSON object", why=f"it is {show(config)}")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        _refuse_family(config, model_type, name)
    reader = ConfigReader(config, name, str(model_type), FAMILIES[str(model_type)])
    model = _read(reader)
    reader.report_unread()
    verify_model(model, where=f"model {show(name)}")
    return replace(model, assumed=tuple(reader.assumed))


def load_model(name_or_path: str) -> Model:
    """Return a model by its name here or on the Hub, or the model of a config.json or of a directory with one.

    Nothing is downloaded: names on the Hub are those of `models/HUB.json`. A model from there has its name on the Hub.

    Raises BadModel for an unknown name, with near names, and for a model with a part that is not modelled; BadInput for
    a file that cannot be read.
    """
    key = name_or_path.strip().casefold()
    if not key:
        raise BadModel("the name of the model is empty", remedy="name a model, for example llama3-8b, or leave it out")
    path = Path(name_or_path)
    try:
        if path.is_dir():
            path /= "config.json"
        is_file = path.is_file()
    except (OSError, ValueError):  # a name no file system accepts: too long, or with a NUL
        is_file = False
    if is_file and key not in shipped_models():
        config = parse_json(INFINITE.sub("null", read_text(path)), where=str(path))
        return model_from_config(config, name=name_of_file(path, config))
    if (found := named_model(name_or_path)) is not None:
        return found
    raise unknown_model(name_or_path)


def named_model(name: str) -> Model | None:
    """Return the model of a name here or on the Hub, without reading other files; None for a name that is not known.

    Raises BadModel for a model with a part that is not modelled.
    """
    key = name.strip().casefold()
    key = _hub_names().get(key, key) if "/" in key else key
    if key in shipped_models():
        return model_from_config(read_json(SHIPPED / f"{key}.json"), name=key)
    published = hub_model(name)
    if published is None:
        return None
    called, row = published
    model = model_from_config(row.shape(), name=called)
    notes = (f"not modelled: {row.left_out}",) if row.left_out else ()
    return replace(model, assumed=(*model.assumed, *notes))


def is_known(name: str) -> bool:
    """Return whether `load_model` knows a name without a file, models that it refuses included."""
    key = name.strip().casefold()
    try:
        return key in shipped_models() or key in _hub_names() or hub_model(name) is not None
    except BadModel:
        return True


def unknown_model(name: str) -> BadModel:
    """Return the error for a name that is not known, with near names."""
    if name.endswith(".json") or Path(name).name == "config.json":
        return BadModel(f"there is no file {show(name)}", remedy="check the path of the config.json")
    known, key = shipped_models(), name.strip().casefold()
    near = difflib.get_close_matches(key[:80].rsplit("/", 1)[-1], known, n=3, cutoff=0.5) + hub_names_near(name)
    why = f"nearest: {', '.join(near)}" if near else ""
    if match := ON_THE_HUB.fullmatch(name.strip()):
        repository, revision = match.groups()
        pinned = f" --revision {revision}" if revision else ""
        folder = repository.rpartition("/")[2]
        return BadModel(
            f"no model called {show(name)} is in the table of names",
            why=why,
            remedy=f"--online fetches its config.json; or: hf download {repository} config.json{pinned} "
            f"--local-dir {folder}, and pass --model {folder}",
        )
    return BadModel(
        f"no model called {show(name)}",
        why=why,
        remedy=f"pass a name on the Hub, a config.json or its directory, or one of: {', '.join(known)}",
    )


@cache
def shipped_models() -> tuple[str, ...]:
    """Return the names of the models that come with the package, in alphabetical order."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json") if not path.stem.isupper()))


@cache
def _hub_names() -> dict[str, str]:
    """Return the names under which the shipped models are published, lower case, with ours."""
    sources = read_json(SHIPPED / "SOURCES.json")
    return {entry["hub"].casefold(): name for name, entry in sources.items() if entry["hub"]}


def hub_name(name: str) -> str:
    """Return where a shipped model is published; any other name is returned as it is."""
    sources = read_json(SHIPPED / "SOURCES.json")
    return str(sources.get(name, {}).get("hub") or name)


def _refuse_family(config: JsonObject, model_type: object, name: str) -> None:
    known = ", ".join(sorted(FAMILIES))
    if isinstance(config.get("text_config"), dict):
        raise BadModel(
            f"model {show(name)} is a multi-modal wrapper of type {show(model_type)}",
            why="its language model is described under 'text_config'; the other towers are not modelled",
            remedy="pass the 'text_config' object as a config.json of its own",
        )
    if model_type is None:
        raise BadModel(f"model {show(name)}: 'model_type' is missing", remedy=f"set it to one of: {known}")
    near = difflib.get_close_matches(str(model_type)[:80], FAMILIES, n=3, cutoff=0.5) if type(model_type) is str else []
    raise BadModel(
        f"model {show(name)}: unknown model_type {show(model_type)}",
        why=f"nearest: {', '.join(near)}" if near else "",
        remedy=f"if its layers have the shapes of a known family, set model_type to that: {known}",
    )


def _read(reader: ConfigReader) -> Model:
    """Read every key that has a meaning for the family, in the order of a forward pass."""
    family = reader.family
    layers = reader.size("num_hidden_layers", *(["n_layer"] if family.positions_default else []), high=MAX_LAYERS)
    hidden = reader.size("hidden_size", *(["n_embd"] if family.positions_default else []))
    vocab = reader.size("vocab_size")
    heads = reader.size("num_attention_heads", *(["n_head"] if family.positions_default else []))
    latent = latent_attention(reader) if family.latent else None
    kv_heads, head_dim = _heads(reader, hidden, heads, latent)
    moe = _experts(reader, layers)
    gated = reader.flag("gated_mlp", default=family.gated_mlp) if reader.family.generic else family.gated_mlp
    ffn = _feed_forward(reader, hidden, moe, gated=gated, all_sparse=moe is not None and not moe.dense_layers)
    linear = linear_attention(reader, layers) if family.linear else None
    window, sliding = (0, ()) if linear else _sliding(reader, layers)
    stated = reader.count("max_position_embeddings", *(["n_positions"] if family.positions_default else []))
    max_positions = max(stated, _stretched(reader))
    norm, norm_bias = _norm(reader)
    qkv_bias, out_bias, mlp_bias = _biases(reader)
    if moe and reader.family.generic:
        moe = replace(moe, expert_bias=mlp_bias)
    learned, rotary = _positions(reader, max_positions)
    parallel = family.parallel_residual
    if parallel:
        parallel = reader.flag("use_parallel_residual", default=True)
    qk_norm = reader.flag(family.qk_norm_key, default=family.qk_norm) if family.qk_norm_key else family.qk_norm
    if qk_norm and reader.config.get("use_qk_norm") is True:
        reader.read.add("use_qk_norm")  # some files of the family repeat what its class always does
    tied = reader.flag("tie_word_embeddings", default=family.tied)
    if reader.config.get("tie_word_embeddings") is None:
        reader.assume("tie_word_embeddings", family.tied)
    return Model(
        name=reader.name,
        family=reader.model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        gated_mlp=gated,
        tied_embeddings=tied,
        learned_positions=learned,
        norm=norm,
        norm_bias=norm_bias,
        norms_per_layer=family.norms_per_layer,
        qk_norm=qk_norm,
        qk_norm_wide=family.qk_norm_wide,
        qkv_bias=qkv_bias,
        attention_out_bias=out_bias,
        mlp_bias=mlp_bias,
        head_bias=family.head_bias,
        latent=latent,
        attention_gate=family.attention_gate,
        linear=linear,
        moe=moe,
        sliding_window=window,
        sliding_layers=len(sliding) if sliding == evenly(len(sliding), layers) else sliding,
        max_positions=max_positions or learned,
        multi_token_layers=reader.count(*_NEXT_TOKEN_KEYS, high=MAX_LAYERS),
        rotary=rotary,
        parallel_residual=parallel,
    )


def _heads(reader: ConfigReader, hidden: int, heads: int, latent: LatentAttention | None) -> tuple[int, int]:
    """Return (key/value heads, head width)."""
    family = reader.family
    stated_kv, stated_dim = reader.integer("num_key_value_heads", "num_kv_heads"), reader.integer("head_dim")
    if latent:
        # Keys and values are expanded for every query head; `head_dim`, where written, is only the rotary part.
        return heads, latent.qk_nope_head_dim + latent.qk_rope_head_dim
    kv_heads = stated_kv
    if kv_heads is None:
        explicit_null = "num_key_value_heads" in reader.config
        kv_heads = heads if family.kv_heads is None or explicit_null else family.kv_heads
        if not family.multi_head_only and not explicit_null:
            reader.assume("num_key_value_heads", kv_heads)
    if heads % kv_heads:
        raise reader.bad(
            f"{heads} attention heads cannot share {kv_heads} key/value heads",
            why="num_key_value_heads must divide num_attention_heads",
            remedy="state both as the checkpoint has them",
        )
    head_dim = stated_dim
    if head_dim is None and family.head_dim is not None:
        head_dim = family.head_dim
        reader.assume("head_dim", head_dim)
    if head_dim is None:
        if hidden % heads:
            raise reader.bad(
                f"hidden_size {hidden} is not a multiple of {heads} attention heads",
                why="without head_dim a head is hidden_size / num_attention_heads wide",
                remedy="state 'head_dim'",
            )
        head_dim = hidden // heads
    if family.multi_head_only and (kv_heads != heads or heads * head_dim != hidden):
        raise reader.bad(
            f"{heads} heads of {head_dim} with {kv_heads} key/value heads do not make up hidden_size {hidden}",
            why=f"{reader.model_type!r} has neither grouped queries nor a head width of its own",
            remedy="correct the sizes, or set model_type to a family that has them",
        )
    return kv_heads, head_dim


def _experts(reader: ConfigReader, layers: int) -> MixtureOfExperts | None:
    """Return the sparse layers, or None for a dense model."""
    family = reader.family
    if family.experts == "required":
        experts = reader.integer(*EXPERT_KEYS, low=0)
        if experts is None:
            experts = reader.size(*EXPERT_KEYS)
    elif reader.family.generic:
        experts = reader.count(*EXPERT_KEYS)
    else:
        return None
    # Placement keys say which layers stay dense: HF Qwen2MoeDecoderLayer and DeepseekV3DecoderLayer.
    only_dense = reader.indices("mlp_only_layers", layers)
    step = reader.integer("decoder_sparse_step", *_STEP_KEYS * reader.family.generic, high=MAX_LAYERS) or 1
    first = reader.count("first_k_dense_replace", default=family.dense_first, high=MAX_LAYERS)
    if family.dense_first and reader.config.get("first_k_dense_replace") is None:
        reader.assume("first_k_dense_replace", first)
    every = reader.integer("moe_layer_freq", high=MAX_LAYERS) or 1
    dense = tuple(i for i in range(layers) if i in only_dense or (i + 1) % step or i < first or i % every)
    listed = layers_of_type(reader, layers, "mlp_layer_types", ("sparse", "dense"))
    dense = dense if listed is None else listed
    per_token = reader.integer("num_experts_per_tok", "num_experts_per_token", "moe_topk", "experts_per_token")
    width = reader.integer(*family.expert_width_keys)
    shared = _shared_experts(reader, width)
    if experts == 0 or len(dense) == layers:
        if experts:
            reader.assumed.append("no layer is sparse: expert keys ignored")
        return None
    if per_token is None:
        raise reader.bad("'num_experts_per_tok' is missing", remedy="say how many experts each token visits")
    if per_token > experts:
        raise reader.bad(f"each token visits {per_token} experts, but there are only {experts}")
    if width is None and reader.family.generic:
        width = reader.size("intermediate_size")
        reader.assumed.append("moe_intermediate_size not stated: experts are as wide as intermediate_size")
    groups = reader.integer("n_group") or 1
    return MixtureOfExperts(
        experts=experts,
        groups=groups,
        groups_per_token=min(reader.integer("topk_group") or groups, groups),
        experts_per_token=per_token,
        ffn=width if width is not None else reader.size(*family.expert_width_keys),
        shared_ffn=shared,
        shared_gate=family.shared_gate and shared > 0,
        router_bias=family.router_bias,
        expert_bias=family.expert_bias,
        dense_layers=len(dense),
        dense_layer_ids=dense,
    )


def _shared_experts(reader: ConfigReader, expert_width: int | None) -> int:
    """Return the total width of the shared experts, which every token visits."""
    family = reader.family
    width = reader.integer("shared_expert_intermediate_size", low=0)
    if width is None and family.shared_expert_width is not None:
        width = family.shared_expert_width
        reader.assume("shared_expert_intermediate_size", width)
    number = reader.integer("n_shared_experts", "num_shared_experts", low=0, high=MAX_LAYERS)
    if number is None and family.shared_experts is not None and "n_shared_experts" not in reader.config:
        number = family.shared_experts
        reader.assume("n_shared_experts", number)
    return width if width is not None else (number or 0) * (expert_width or 0)


def _feed_forward(
    reader: ConfigReader, hidden: int, moe: MixtureOfExperts | None, *, gated: bool, all_sparse: bool
) -> int:
    """Return the width of a dense feed-forward layer."""
    keys = ["intermediate_size", *(["n_inner"] if reader.family.positions_default else [])]
    width = reader.integer(*keys)
    if width is None and reader.family.inner_is_4h and not gated:
        width = 4 * hidden
    if width is None and moe is not None and all_sparse:
        width = moe.ffn  # no layer is dense
    return reader.size(*keys) if width is None else width


def _sliding(reader: ConfigReader, layers: int) -> tuple[int, tuple[int, ...]]:
    """Return (window in tokens, the layers that attend within it only); (0, ()) when every layer is full.

    The rules of the config classes are: `all` layers; `qwen` layers from max_window_layers on, `qwen-moe` every other
    layer below it and `qwen-all` all, each only if use_sliding_window; `every-other`, from the first; `three-of-four`;
    `five-of-six`. Where the family has `layer_types`, it decides.
    """
    family, kind = reader.family, reader.family.sliding
    stated = layers_of_type(reader, layers, "layer_types", ("full_attention", "sliding_attention"))
    if kind == "none":
        if stated:
            raise reader.bad(
                f"{len(stated)} layers are said to slide, which {reader.model_type!r} does not have",
                remedy="set model_type to the family that has a sliding window",
            )
        return 0, ()
    window = reader.integer("sliding_window", low=0)
    if window is None and "sliding_window" not in reader.config:
        window = family.sliding_window
        if window and not kind.startswith("qwen"):
            reader.assume("sliding_window", window)
    if kind.startswith("qwen"):
        window = window if reader.flag("use_sliding_window", default=False) else 0
        if window and kind != "qwen-all" and reader.stated("max_window_layers") is None:
            reader.assume("max_window_layers", 28)
        first = min(layers, reader.count("max_window_layers", default=28))
        by_kind = {"qwen": range(first, layers), "qwen-moe": range(0, first, 2), "qwen-all": range(layers)}
        chosen = list(by_kind[kind])
    else:
        pattern = {"all": layers + 1, "every-other": 2, "three-of-four": 4, "five-of-six": 6}[kind]
        if kind == "five-of-six":
            pattern = reader.integer("sliding_window_pattern", "_sliding_window_pattern", high=MAX_LAYERS) or pattern
        chosen = [i for i in range(layers) if (i + 1) % pattern]
    ids = tuple(chosen) if stated is None else stated
    return (window, ids) if window and ids else (0, ())


def _norm(reader: ConfigReader) -> tuple[str, bool]:
    """Return the kind of norm and whether it has a bias."""
    norm = reader.family.norm
    if reader.family.generic:
        norm = reader.word("normalization", ("layernorm", "rmsnorm"), default=norm)
    bias = norm == "layernorm"
    return norm, reader.flag("norm_bias", default=bias) if reader.family.generic else bias


def _biases(reader: ConfigReader) -> tuple[bool, bool, bool]:
    """Return whether the query/key/value, the attention output and the feed-forward projections have biases."""
    family = reader.family
    biases = family.biases
    if reader.model_type == "gpt":  # --disable-bias-linear, inverted, is the default of the finer keys
        biases = (reader.flag("use_bias", default=True),) * 3
        if reader.config.get("use_bias") is None:
            reader.assumed.append("use_bias not stated: every linear layer has a bias (Megatron-LM's default)")
    stated = zip(family.bias_keys, biases, strict=True)
    qkv, out, mlp = (reader.flag(key, default=bias) if key else bias for key, bias in stated)
    return qkv, out, mlp


def _stretched(reader: ConfigReader) -> int:
    """Return the positions that a scaled rotary embedding reaches: the factor times the number it was trained with.

    0 for Llama 3.1's kind and where no original number is given: there `max_position_embeddings` includes the factor.
    """
    scaling = reader.config.get("rope_scaling") or reader.config.get("rope_parameters")
    kinds = ("yarn", "linear", "dynamic")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) not in kinds:
        return 0
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not isinstance(original, int):
        return 0
    return int(factor * original) if 1 <= factor <= 1024 and 0 < original <= MAX_WIDTH else 0


def _positions(reader: ConfigReader, max_positions: int) -> tuple[int, bool]:
    """Return (rows of a learned position table, whether queries and keys are rotated)."""
    family = reader.family
    if family.positions_default:
        if not max_positions:
            reader.assume("n_positions", family.positions_default)
        return max_positions or family.positions_default, False
    if reader.model_type != "gpt":
        return 0, family.rotary
    kinds = ("learned_absolute", "rope", "alibi", "none")
    kind = reader.word("position_embedding_type", kinds, default="learned_absolute")
    if kind != "learned_absolute":
        return 0, kind == "rope"
    if not max_positions:
        reader.assumed.append(
            "max_position_embeddings not stated: the learned position table (hidden_size elements a row) is left out"
        )
    return max_positions, False
