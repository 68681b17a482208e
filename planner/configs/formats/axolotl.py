"""axolotl's YAML.

Keys: `src/axolotl/utils/schemas/` of axolotl 0.12. It runs Transformers' Trainer under accelerate: with `bf16` the
model is loaded in it, and FSDP holds it in float32 (accelerate's `fsdp2_prepare_model`).
"""

from __future__ import annotations

import shlex
from dataclasses import replace

from planner.configs.formats.adapters import AXOLOTL
from planner.configs.formats.launch import as_options
from planner.configs.formats.savers import AXOLOTL as SAVERS
from planner.configs.formats.transformers_fields import FSDP_RECOMPUTE, MICRO, REENTRANT, STEPS, named_optimizer
from planner.configs.formats.yaml_format import (
    DATA_PARALLEL,
    FLAT,
    Described,
    YamlFormat,
    accumulated,
    compiled,
    constant,
    degree,
    length,
    named,
    on,
    types,
)
from planner.export.mapping import Entry, Facts, NotModelled, NotStated, Settings, Table, truth, whole

_OFFLOAD = ("fsdp_config.offload_params", "fsdp_config.fsdp_offload_params")
_RESHARD = ("fsdp_config.reshard_after_forward", "fsdp_config.fsdp_reshard_after_forward")
_STRATEGY = ("fsdp_config.sharding_strategy", "fsdp_config.fsdp_sharding_strategy")
_VERSION = ("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version")
_ARGUMENTS = {
    "base_model": "model_name_or_path",
    "sequence_len": "max_length",
    "micro_batch_size": MICRO,
    "gradient_accumulation_steps": STEPS,
}
_SIZES = ("dp_shard_size", "dp_replicate_size")


def _shards(settings: Settings) -> bool:
    return bool(settings.get("fsdp")) or any(key.startswith("fsdp_config.") for key in settings)


def _as_arguments(settings: Settings) -> Settings:
    """Return the settings as TrainingArguments, by which a line that starts a DeepSpeed file says them."""
    said = {theirs: settings[ours] for ours, theirs in _ARGUMENTS.items() if settings.get(ours)}
    recompute = _read_recompute(settings, {})["recompute"] != "none"
    adapter = AXOLOTL.read(settings, {})["adapter"]
    if adapter is not None:
        targets = adapter["target_modules"]
        said |= {"use_peft": True, "load_in_4bit": adapter["base_weights"] == "nf4", "lora_r": adapter["rank"]}
        said |= {"lora_target_modules": targets if isinstance(targets, str) else ",".join(targets)} if targets else {}
    return {**said, "bf16": settings.get("bf16") in {"auto", "full", True}, "gradient_checkpointing": recompute}


def _read_mesh(settings: Settings, facts: Facts) -> Facts:
    if isinstance(named_file := settings.get("deepspeed"), str) and named_file:
        raise NotStated(
            f"the file names a DeepSpeed file, {named_file[:80]!r}",
            why="the ZeRO stage is in it",
            remedy=f"planner check {shlex.quote(named_file[:200])} --launch {as_options(_as_arguments(settings))}",
        )
    rest = facts["gpus"] // (facts["tp"] * facts["cp"])
    if not _shards(settings):
        if facts["cp"] > 1:
            raise NotModelled(
                "context parallelism without FSDP is not modelled",
                why="each rank of a sequence then holds all parameters",
                remedy="fsdp_version: 2 and fsdp_config in the file have a prediction",
            )
        return {"dp_replicate": max(1, rest), "dp_shard": 1, "reshard_after_forward": None}
    replicas = whole(settings, _SIZES[1], 1)
    strategy = str(next((settings[key] for key in _STRATEGY if settings.get(key)), "FULL_SHARD")).upper()
    again = truth(settings, next((key for key in _RESHARD if key in settings), _RESHARD[0]), default=True)
    return {
        "dp_replicate": replicas,
        "dp_shard": whole(settings, _SIZES[0], max(1, rest // replicas)),
        "reshard_after_forward": again and "GRAD_OP" not in strategy,
    }


def _write_mesh(facts: Facts) -> Settings:
    return {_SIZES[1]: facts["dp_replicate"]} if facts["dp_replicate"] > 1 and facts["dp_shard"] > 1 else {}


def _read_types(settings: Settings, facts: Facts) -> Facts:
    half = on(settings, "fp16")
    low = not half and settings.get("bf16") in {"auto", "full", True}
    compute = "float16" if half else "bfloat16" if low else "float32"
    sharded = _shards(settings) and facts["dp_shard"] * facts["cp"] > 1
    stored = "float32" if sharded or half else compute
    return types(stored, compute, compute)


def _read_recompute(settings: Settings, _: Facts) -> Facts:
    wraps = settings.get("gradient_checkpointing") not in {None, False, "none"}
    wrapped = any(on(settings, key) for key in FSDP_RECOMPUTE) and _shards(settings)  # by accelerate
    said = any(key.startswith("gradient_checkpointing_kwargs") for key in settings)
    # utils/config/__init__.py: reentrant by default, unless something unusual is trained
    usual = not said and not settings.get("unfrozen_parameters") and not settings.get("rl")
    return {
        "recompute": "full" if wraps or wrapped else "none",
        "reentrant": (wraps and truth(settings, REENTRANT, default=usual)) or None,
    }


def _read_optimizer(settings: Settings, _: Facts) -> Facts:
    return {"optimizer": named_optimizer(str(settings.get("optimizer", "adamw_torch_fused")))}


def _read_offload(settings: Settings, _: Facts) -> Facts:
    away = any(on(settings, key) for key in _OFFLOAD) and _shards(settings)
    return {"offload": "parameters" if away else "none"}


TABLE: Table = (
    constant(FLAT),
    degree("tensor_parallel_size", "tp"),
    degree("context_parallel_size", "cp"),
    Entry(keys=("fsdp", "deepspeed", *_SIZES, *_RESHARD, *_STRATEGY, *_VERSION), write=_write_mesh, read=_read_mesh),
    accumulated("micro_batch_size", "gradient_accumulation_steps"),
    length("sequence_len"),
    Entry(
        keys=("gradient_checkpointing", REENTRANT, "unfrozen_parameters", *FSDP_RECOMPUTE),
        write=lambda facts: {"gradient_checkpointing": facts["recompute"] != "none"},
        read=_read_recompute,
        exclusive=FSDP_RECOMPUTE,
    ),
    compiled("torch_compile"),
    Entry(keys=_OFFLOAD, read=_read_offload),
    Entry(keys=("bf16", "fp16"), read=_read_types),
    Entry(keys=("optimizer",), read=_read_optimizer),
    AXOLOTL,
    SAVERS,
)


def _behaves_as(settings: Settings) -> str:
    """Return the newest version of transformers that is described with FSDP1, for a file that does not state FSDP2
    (`setup_fsdp_envs` of `utils/trainer.py`; accelerate's own default is 1).
    """
    return "4.53" if _shards(settings) and all(str(settings.get(key)) != "2" for key in _VERSION) else ""


def _describe(settings: Settings) -> Described:
    found, version = named(settings, "base_model"), _behaves_as(settings)
    return replace(found, assumed=(f"FSDP1: a step as in transformers {version}",)) if version else found


FORMAT = YamlFormat(
    framework="axolotl",
    runtime="transformers",
    marks=(frozenset({"base_model", "micro_batch_size"}), frozenset({"base_model", "sequence_len"})),
    table=TABLE,
    describe=_describe,
    behaves_as=_behaves_as,
    limits={**DATA_PARALLEL, "tp": None, "cp": None},
    harmless=(
        r"(lora_(alpha|fan_in_fan_out|model_dir|\w+_kernel)|peft\w*|sample_packing|eval_sample_packing"
        r"|base_model.*|model_type|tokenizer.*|datasets|test_datasets|pretraining_dataset|dataset_.*|val_set_size|output_dir"
        r"|chat_template.*|wandb_.*|mlflow_.*|comet_.*|hub_.*|num_epochs|max_steps|lr_scheduler.*|learning_rate|weight_decay"
        r"|warmup_\w+|\w+_per_epoch|save_\w+|eval_\w+|logging_steps|special_tokens.*|tokens|resume_from_checkpoint"
        r"|gradient_checkpointing_kwargs.*|flash_attention|sdp_attention|attention|attn_implementation|tf32|strict|seed"
        r"|pad_to_sequence_len|train_on_inputs|group_by_length|trust_remote_code|max_grad_norm|adam_\w+|debug|local_rank"
        r"|fsdp_config\.(fsdp_)?(auto_wrap_policy|transformer_layer_cls_to_wrap|state_dict_type|sync_module_states"
        r"|use_orig_params|cpu_ram_efficient_loading|limit_all_gathers|backward_prefetch|forward_prefetch"
        r"|final_state_dict_type)|plugins|ddp_\w+|shuffle_\w+|excess_length_strategy|rl|use_wandb|dataloader_\w+)"
    ),
)
