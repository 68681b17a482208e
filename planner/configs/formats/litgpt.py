"""LitGPT's YAML of `litgpt finetune_full` and `litgpt pretrain`.

Keys and strategies: `litgpt/finetune/full.py` and `litgpt/pretrain.py` of 0.5.13. Fine-tuning shards and recomputes
every block; pretraining shards within a host.
"""

from __future__ import annotations

from planner.configs.formats.adapters import LITGPT
from planner.configs.formats.yaml_format import (
    DATA_PARALLEL,
    FLAT,
    Described,
    YamlFormat,
    constant,
    in_all,
    length,
    named,
    types,
)
from planner.export.mapping import Entry, Facts, Settings, Table, whole
from topology.errors import BadInput

# Types of parameters, products and reduced gradients for a precision.
PRECISIONS = {
    "bf16-true": types("bfloat16", "bfloat16", "bfloat16"),
    "bf16-mixed": types("float32", "bfloat16", "float32"),
    "16-true": types("float16", "float16", "float16"),
    "16-mixed": types("float32", "float16", "float32"),
    "32-true": types("float32", "float32", "float32"),
}


def _pretrains(settings: Settings) -> bool:
    return "initial_checkpoint_dir" in settings or "tokenizer_dir" in settings


def _gpus(settings: Settings) -> int | None:
    devices, nodes = settings.get("devices"), settings.get("num_nodes") or 1
    return devices * nodes if type(devices) is int and type(nodes) is int else None


def _read_mesh(settings: Settings, facts: Facts) -> Facts:
    hosts = whole(settings, "num_nodes", 1) if _pretrains(settings) else 1
    same: Facts = {**FLAT, "tp": 1, "cp": 1, "reshard_after_forward": True}
    if facts["gpus"] == 1:
        return same | {"dp_replicate": 1, "dp_shard": 1, "recompute": "none"}
    recompute = "none" if _pretrains(settings) else "full"
    return same | {"dp_replicate": hosts, "dp_shard": facts["gpus"] // hosts, "recompute": recompute}


def _read_types(settings: Settings, _: Facts) -> Facts:
    word = settings.get("precision") or "bf16-true"
    if word not in PRECISIONS:
        raise BadInput(f"precision is {str(word)[:40]!r}", why=f"known: {', '.join(PRECISIONS)}")
    return PRECISIONS[word]


TABLE: Table = (
    Entry(keys=("devices", "num_nodes"), read=_read_mesh),
    in_all("train.micro_batch_size", "train.global_batch_size"),
    length("train.max_seq_length"),
    Entry(keys=("precision",), read=_read_types),
    constant({"optimizer": "adamw"}, "optimizer", "optimizer.class_path"),
    Entry(read=lambda settings, _: {"compile": _pretrains(settings)}),
    LITGPT,
)


def _describe(settings: Settings) -> Described:
    return named(settings, "checkpoint_dir", "model_name")


FORMAT = YamlFormat(
    framework="litgpt",
    runtime="pytorch",
    marks=(frozenset({"train.global_batch_size", "train.micro_batch_size"}),),
    table=TABLE,
    describe=_describe,
    gpus=_gpus,
    limits={**DATA_PARALLEL, "tp": ((1, 1),), "cp": ((1, 1),), "recompute": None},
    harmless=(
        r"(checkpoint_dir|initial_checkpoint_dir|model_name|model_config|out_dir|resume|data.*|eval\..*|logger_name|seed"
        r"|access_token|tokenizer_dir|optimizer\..*|log\..*|train\.(save_interval|log_interval|lr_\w+|epochs|max_tokens|max_steps"
        r"|max_norm|min_lr|tie_embeddings))"
    ),
)
