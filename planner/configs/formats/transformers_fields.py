"""Convert between plans and Hugging Face's `TrainingArguments`.

Source: transformers 5, `training_args.py`: names and defaults. The number of processes is the launcher's. A DeepSpeed
section inside is read by DeepSpeed's own table; the key for the sequence length belongs to the trainer (TRL,
LLaMA-Factory).
"""

from __future__ import annotations

import re

from planner.configs.formats.adapters import LOADED, TRAINER, loaded_in
from planner.configs.formats.savers import TRAINER as SAVERS
from planner.export.mapping import Entry, Facts, Settings, Table, switch, truth, whole

MICRO, STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
MODEL_NAMES = ("model_name_or_path", "model_name", "pretrained_model_name_or_path", "model_id", "model", "base_model")
LENGTHS = ("max_length", "max_seq_length", "model_max_length", "cutoff_len", "block_size", "seq_length")
FSDP_VERSION = ("fsdp_config.fsdp_version", "fsdp_config.version")
FSDP_RESHARD = ("fsdp_config.reshard_after_forward", "fsdp_config.fsdp_reshard_after_forward")
REENTRANT = "gradient_checkpointing_kwargs.use_reentrant"
FACTORY_RECOMPUTE = ("disable_gradient_checkpointing", "use_reentrant_gc")
FSDP_RECOMPUTE = ("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing")


def _first(settings: Settings, keys: tuple[str, ...]) -> str:
    """Return the spelling that a file uses; by default the first."""
    return next((key for key in keys if key in settings), keys[0])


def _read_mesh(settings: Settings, facts: Facts) -> Facts:
    gpus = facts["gpus"]
    found: Facts = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1, "pp": 1, "ep": 1, "zero_stage": None}
    said = settings.get("fsdp") or ""
    words = " ".join(map(str, said)) if isinstance(said, list) else "full_shard" if said is True else str(said)
    if "shard" not in words or "no_shard" in words:
        return found | {"dp_replicate": gpus, "reshard_after_forward": None}
    replicas = gpus // min(gpus, facts.get("gpus_per_node") or gpus) if "hybrid" in words else 1
    keeps = "shard_grad_op" in words or "zero2" in words
    if whole(settings, _first(settings, FSDP_VERSION), 1) == 2:
        keeps = not truth(settings, _first(settings, FSDP_RESHARD), default=True)
    return found | {"dp_replicate": replicas, "dp_shard": gpus // replicas, "reshard_after_forward": not keeps}


def _write_mesh(facts: Facts) -> Settings:
    if facts["dp_shard"] == 1:
        return {"fsdp": ""}
    word = "shard_grad_op" if facts["reshard_after_forward"] is False else "full_shard"
    if facts["dp_replicate"] > 1:
        word = "hybrid_shard_zero2" if word == "shard_grad_op" else "hybrid_shard"
    return {"fsdp": f"{word} auto_wrap"}


def write_batch(facts: Facts) -> Settings:
    dp = facts["dp_replicate"] * facts["dp_shard"]
    return {MICRO: facts["micro_batch_size"], STEPS: facts["global_batch_size"] // (dp * facts["micro_batch_size"])}


def read_batch(settings: Settings, facts: Facts) -> Facts:
    micro, steps = whole(settings, MICRO, 8), whole(settings, STEPS, 1)
    return {"micro_batch_size": micro, "global_batch_size": micro * steps * facts["dp_replicate"] * facts["dp_shard"]}


def read_length(settings: Settings, facts: Facts) -> Facts:
    stated = next((key for key in LENGTHS if settings.get(key) is not None), None)
    return {"seq_len": whole(settings, stated) if stated else facts.get("seq_len")}


def _read_types(settings: Settings, facts: Facts) -> Facts:
    stored = facts.get("param_dtype", "float32")
    mixed = "bfloat16" if truth(settings, "bf16") else "float16" if truth(settings, "fp16") else ""
    # What is trained stays as it was loaded, which LLaMA-Factory's `pure_bf16` and TRL's `dtype` say. With mixed
    # precision, though, accelerate's FSDP makes it float32 (accelerator.py, fsdp_utils.py), as PEFT does of adapters.
    if truth(settings, "pure_bf16"):
        stored, mixed = "bfloat16", ""
    elif not (mixed and facts["dp_shard"] > 1) and not truth(settings, "use_peft"):
        stored = loaded_in(settings) or stored
    compute = mixed or stored
    # FSDP reduces in the type of mixed precision; replicas hold gradients in the type of the parameters.
    return {
        "param_dtype": stored,
        "compute_dtype": compute,
        "reduce_dtype": compute if facts["dp_shard"] > 1 else stored,
    }


def _write_types(facts: Facts) -> Settings:
    # Replicas compute in a loaded type of 16 bits with or without mixed precision; FSDP would first make it float32.
    mixed = facts["param_dtype"] != facts["compute_dtype"] or facts["dp_shard"] == 1
    return {
        "bf16": mixed and facts["compute_dtype"] == "bfloat16",
        "fp16": mixed and facts["compute_dtype"] == "float16",
    }


def _read_recompute(settings: Settings, _: Facts) -> Facts:
    on = truth(settings, "gradient_checkpointing") or truth(settings, _first(settings, FSDP_RECOMPUTE))
    reentrant = truth(settings, REENTRANT)
    if "finetuning_type" in settings:
        # LLaMA-Factory checkpoints blocks by default, reentrant except with FSDP2 (hparams/model_args.py;
        # model/model_utils/checkpointing.py).
        on = on or not truth(settings, "disable_gradient_checkpointing")
        fsdp2 = bool(settings.get("fsdp")) and whole(settings, _first(settings, FSDP_VERSION), 1) == 2
        reentrant = truth(settings, "use_reentrant_gc", default=not fsdp2)
    return {"recompute": "full" if on else "none", "reentrant": (on and reentrant) or None}


def _read_optimizer(settings: Settings, _: Facts) -> Facts:
    return {"optimizer": named_optimizer(str(settings.get("optim", "adamw_torch_fused")))}


def named_optimizer(word: str) -> str:
    """Return the optimizer that a word of transformers means; torchao's low-bit ones are named after torch's."""
    narrow = re.fullmatch(r"adamw_torch_(\d+bit)", word)
    if narrow:
        return f"adamw{narrow[1]}"
    return "adamw" if word.startswith("adamw_torch") or word == "adamw_apex_fused" else word


PROGRAM: Table = (
    Entry(
        keys=("gradient_checkpointing", REENTRANT, *FACTORY_RECOMPUTE, *FSDP_RECOMPUTE),
        write=lambda facts: {"gradient_checkpointing": facts["recompute"] != "none"},
        read=_read_recompute,
    ),
    switch("torch_compile", "compile"),
    Entry(keys=("optim",), read=_read_optimizer),
    Entry(keys=LENGTHS, read=read_length),
    TRAINER,
    SAVERS,
)

TABLE: Table = (
    Entry(keys=("fsdp", *FSDP_VERSION, *FSDP_RESHARD), write=_write_mesh, read=_read_mesh),
    Entry(keys=(MICRO, STEPS), write=write_batch, read=read_batch),
    Entry(keys=("bf16", "fp16", *LOADED), write=_write_types, read=_read_types),
    *PROGRAM,
)
