"""OLMo's YAML of `scripts/train.py`.

Keys and defaults: `olmo/config.py` of OLMo at 59a53e3. torch's first FSDP runs it, or replicas.
"""

from __future__ import annotations

from planner.configs.formats.yaml_format import (
    DATA_PARALLEL,
    FLAT,
    Described,
    YamlFormat,
    constant,
    in_all,
    length,
    types,
)
from planner.export.mapping import Entry, Facts, NotModelled, Settings, Table, one_of, truth, whole
from simulator.config.hf_config import model_from_config
from simulator.config.model import Model
from topology.errors import BadInput, BadModel

_F = "fsdp."
_MESH = ("distributed_strategy", f"{_F}sharding_strategy", f"{_F}hybrid_sharding_num_model_replicas")
_RECOMPUTE = "activation_checkpointing"
RECOMPUTE = {"none": "None", "full": "whole_layer", "selective": "one_in_two"}
AUTOCAST = {"bfloat16": "amp_bf16", "float16": "amp_fp16", "float32": "fp32"}
# Keys of variants that a Model cannot express.
OTHERS = ("alibi", "clip_qkv", "embedding_layer_norm", "scale_emb_init", "block_group_size", "multi_query_attention")


def _read_mesh(settings: Settings, facts: Facts) -> Facts:
    gpus = facts["gpus"]
    word = str(settings.get(_MESH[1]) or "FULL_SHARD").upper()
    if settings.get(_MESH[0]) == "ddp" or word == "NO_SHARD":
        return {"dp_replicate": gpus, "dp_shard": 1, "reshard_after_forward": None}
    hybrid = "HYBRID" in word
    nodes = max(1, gpus // min(gpus, facts.get("gpus_per_node") or gpus))
    replicas = whole(settings, _MESH[2], nodes) if hybrid else 1
    if gpus % replicas:
        raise BadInput(f"{gpus} GPUs are not a multiple of {replicas} replicas", remedy="--gpus")
    keeps = word in {"SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"}
    return {"dp_replicate": replicas, "dp_shard": gpus // replicas, "reshard_after_forward": not keeps}


def _write_mesh(facts: Facts) -> Settings:
    if facts["dp_shard"] == 1:
        return {_MESH[1]: "NO_SHARD"}
    if facts["dp_replicate"] > 1:
        return {_MESH[1]: "HYBRID_SHARD", _MESH[2]: facts["dp_replicate"]}
    return {_MESH[1]: "SHARD_GRAD_OP" if facts["reshard_after_forward"] is False else "FULL_SHARD"}


def _read_smaller(_: Settings, facts: Facts) -> Facts:
    """Return the micro batch of a rank that has fewer sequences in a whole step."""
    each = facts["global_batch_size"] // (facts["dp_replicate"] * facts["dp_shard"])
    return {"micro_batch_size": min(facts["micro_batch_size"], max(1, each))}


def _read_recompute(settings: Settings, _: Facts) -> Facts:
    word = str(settings.get(_RECOMPUTE) or None)
    if word == "True":
        word = "whole_layer"
    if word not in RECOMPUTE.values():
        raise NotModelled(f"{_RECOMPUTE} {word[:40]!r} is not modelled", remedy="whole_layer, one_in_two or null")
    return {"recompute": one_of({_RECOMPUTE: word}, _RECOMPUTE, RECOMPUTE, "None")}


def _write_recompute(facts: Facts) -> Settings:
    word = RECOMPUTE.get(facts["recompute"])
    return {} if word is None else {_RECOMPUTE: None if word == "None" else word}


def _read_types(settings: Settings, facts: Facts) -> Facts:
    compute = one_of(settings, "precision", AUTOCAST, "amp_bf16")
    pure = settings.get(f"{_F}precision", "pure") == "pure"
    return types("float32", compute, compute if pure and facts["dp_shard"] > 1 else "float32")


def _read_optimizer(settings: Settings, _: Facts) -> Facts:
    return {"optimizer": str(settings.get("optimizer.name", "lionw"))}


TABLE: Table = (
    constant(FLAT | {"tp": 1, "cp": 1}),
    Entry(keys=_MESH, write=_write_mesh, read=_read_mesh),
    in_all("device_train_microbatch_size", "global_train_batch_size"),
    Entry(read=_read_smaller),
    length("model.max_sequence_length"),
    Entry(keys=(_RECOMPUTE,), write=_write_recompute, read=_read_recompute),
    Entry(keys=("precision", f"{_F}precision"), read=_read_types),
    Entry(keys=("optimizer.name",), read=_read_optimizer),
    Entry(keys=("compile",), read=lambda settings, _: {"compile": any(key.startswith("compile.") for key in settings)}),
)


def _describe(settings: Settings) -> Described:
    own = {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
    other = [key for key in OTHERS if own.get(key) and own[key] != 1]
    affine = own.get("layer_norm_type") == "rms" and own.get("layer_norm_with_affine", True)
    if other or not affine or not own.get("rope") or own.get("activation_type", "swiglu") != "swiglu":
        return Described(unknown=f"a network with {other[0] if other else 'other norms or positions'} than OLMo 2's")
    after, normed = (truth(own, key) for key in ("norm_after", "attention_layer_norm"))
    if after is not normed:
        return Described(unknown="norms of queries and keys without norms after attention, or the other way round")
    try:
        return Described(model=_model(own, "olmo2" if after else "llama"))
    except (BadInput, BadModel) as error:
        return Described(unknown=error.what)


def _model(own: Settings, family: str) -> Model:
    """Return the model of `olmo/model.py` with these sizes."""
    hidden, heads = whole(own, "d_model"), whole(own, "n_heads")
    wide = whole(own, "mlp_hidden_size", whole(own, "mlp_ratio", 4) * hidden)
    config = {
        "model_type": family,
        "num_hidden_layers": whole(own, "n_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": whole(own, "n_kv_heads", heads),
        "intermediate_size": wide // 2,  # the gate and the up projection are one product
        "vocab_size": whole(own, "embedding_size", whole(own, "vocab_size")),
        "max_position_embeddings": whole(own, "max_sequence_length"),
        "tie_word_embeddings": truth(own, "weight_tying", default=True),
    }
    return model_from_config(config, name="olmo")


FORMAT = YamlFormat(
    framework="olmo",
    runtime="pytorch",
    marks=(frozenset({"device_train_microbatch_size", "global_train_batch_size"}),),
    table=TABLE,
    describe=_describe,
    limits={**DATA_PARALLEL, "tp": ((1, 1),), "cp": ((1, 1),)},
    harmless=(
        r"(model|optimizer|scheduler|tokenizer|data|evaluators|speed_monitor|wandb|console_log\w*|compile)(\..*)?"
        r"|fsdp\.(wrapping_strategy|use_orig_params)|(run_name|seed|epoch|dry_run|softmax_auxiliary_loss"
        r"|auxiliary_loss_multiplier|fused_loss|save_\w+|sharded_checkpointer|load_\w+|max_duration|max_grad_norm\w*|remote_\w+"
        r"|gen1_gc_interval|eval_\w+|device_eval_batch_size|try_load_latest_save|reset_\w+|restore_\w+|no_pre_train_checkpoint"
        r"|force_save_unsharded|python_profiling|torch_profiling|early_stopping_factor|hf_datasets_cache_dir|stop_\w+"
        r"|ddp\.grad_sync_mode|time_limit|extra_steps_after_cancel|new_style_checkpoints|module_outputs_save_steps|single|activation_\w+_log)"
    ),
)
