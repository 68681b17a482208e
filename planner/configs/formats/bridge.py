"""Megatron-Bridge's recipe dumps (`ConfigContainer.to_yaml`) as the flags of Megatron-LM, and flags back as their keys.

Source: Megatron-Bridge's `src/megatron/bridge/training/config.py`: most fields are Megatron-LM's arguments with
underscores; those with another name or the opposite meaning are below.
"""

from __future__ import annotations

from planner.export.frameworks.megatron_types import WIDE, WIDE_ENDS
from planner.export.mapping import Settings
from topology.codec import JsonObject

# Sections of fields that a file does not have yet.
SECTIONS = {
    "global_batch_size": "train",
    "micro_batch_size": "train",
    "seq_length": "model",
    "use_distributed_optimizer": "ddp",
    "overlap_grad_reduce": "ddp",
    "overlap_param_gather": "ddp",
    "use_megatron_fsdp": "ddp",
    "data_parallel_sharding_strategy": "ddp",
    "num_distributed_optimizer_instances": "ddp",
    "grad_reduce_in_bf16": "",
    "tp_comm_overlap": "comm_overlap",
    "overlap_moe_expert_parallel_comm": "comm_overlap",
    "delay_wgrad_compute": "comm_overlap",
}
RENAMED = {
    "--num-experts": "num_moe_experts",
    "--num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "--swiglu": "gated_linear_unit",
    "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "--fp8-format": "fp8",
    "--fp4-format": "fp4",
}
# Fields with the opposite meaning of a flag.
OPPOSITE = {
    "--untie-embeddings-and-output-weights": "share_embeddings_and_output_weights",
    "--disable-bias-linear": "add_bias_linear",
}
# Names in NeMo 1's YAML (`nemo/collections/nlp/models/language_modeling/`), which also has other sections.
NEMO = {
    "activations_checkpoint_granularity": "--recompute-granularity",
    "activations_checkpoint_method": "--recompute-method",
    "activations_checkpoint_num_layers": "--recompute-num-layers",
    "ub_tp_comm_overlap": "--tp-comm-overlap",
}
SEQUENCES = ("encoder_seq_length", "sequence_length", "seq_length", "seq_len")


def is_bridge(settings: Settings) -> bool:
    """Return whether a file's keys are those of a recipe dump."""
    return "model.tensor_model_parallel_size" in settings or str(settings.get("_target_", "")).startswith(
        "megatron.bridge"
    )


def flags_of(settings: Settings) -> tuple[Settings, dict[str, str]]:
    """Return a dump's settings as flags, and the path that each flag was read from."""
    flags: Settings = {}
    paths: dict[str, str] = {}
    by_field = {**NEMO, **{field: flag for flag, field in RENAMED.items()}}
    opposite = {field: flag for flag, field in OPPOSITE.items()}
    for path, said in settings.items():
        value, name = said, path.rpartition(".")[2]
        if path == "model.tokenizer.type" and value:
            flags["--tokenizer-type"] = value
        if (
            value is None
            or name.startswith("_")
            or path.startswith(("tokenizer.", "model.tokenizer.", "logger.", "checkpoint."))
        ):
            continue
        if path == "mixed_precision":
            flags |= precision_flags(str(value))
            continue
        if name in SEQUENCES:
            flag = "--seq-length"
        elif path == "model.activation":
            flag, value = "--swiglu", "swiglu" in str(value)
        elif path == "model.bias":
            flag, value = "--disable-bias-linear", not value
        elif path in {"trainer.precision", "optim.name", "model.optim.name"}:
            flags |= _nemo(str(value))
            continue
        elif name in opposite:
            flag, value = opposite[name], not value
        else:
            flag = by_field.get(name, f"--{name.replace('_', '-')}")
        if value is False and flag not in paths:
            paths[flag] = path
            flags.pop(flag, None)  # of a precision's name
            continue
        flags[flag], paths[flag] = value, path
    if settings.get("model.fp8") is True:
        flags["--fp8-format"] = "hybrid"
    elif settings.get("model.fp8") is False:  # its other words about float8 then have no effect
        flags.pop("--fp8-hybrid", None)
    if "--num-query-groups" in flags:
        flags["--group-query-attention"] = flags["--num-query-groups"] != flags.get("--num-attention-heads")
    return flags, paths


def _nemo(word: str) -> Settings:
    """Return the flags for NeMo's name of a precision or an optimizer."""
    if word.startswith(("bf16", "16")):
        return {"--bf16" if word.startswith("bf16") else "--fp16": True}
    return {"--use-distributed-optimizer": True} if word.startswith("distributed_fused") else {}


# Parts of names of precisions, and Megatron-LM's word for the recipe (Megatron-Bridge, training/mixed_precision.py).
_SCALINGS = {
    "nanov2": "blockwise",
    "current_scaling": "tensorwise",
    "subchannel_scaling": "blockwise",
    "mxfp8": "mxfp8",
}
_TWO_WIDE = ("nemotron_h", "nanov2")


def precision_flags(word: str) -> Settings:
    """Return the flags of a precision such as `bf16_with_fp8_current_scaling_mixed`, as recipes name it."""
    flags: Settings = {"--fp16" if word.startswith("fp16") else "--bf16": True}
    flags |= {"--fp8-format": "hybrid"} if "fp8" in word else {}
    flags |= {"--fp4-format": "e2m1"} if "fp4" in word else {}
    recipe = next((recipe for part, recipe in _SCALINGS.items() if part in word), None)
    flags |= {"--fp8-recipe": recipe} if recipe else {}
    if "current_scaling" in word:  # the first and the last layers stay in 16 bits
        flags |= {WIDE: True, **dict.fromkeys(WIDE_ENDS, 2 if word.startswith(_TWO_WIDE) else 1)}
    return flags


def fields_of(changes: JsonObject, paths: dict[str, str], *, flat: bool = False) -> JsonObject:
    """Return changes of flags as changes of a dump's paths, without flags that only command lines need.

    A `flat` file has no sections.
    """
    found: JsonObject = {}
    for flag, value in changes.items():
        name = RENAMED.get(flag, OPPOSITE.get(flag, flag.removeprefix("--").replace("-", "_")))
        path = paths.get(flag)
        if path is None:
            if flag in {"--ckpt-format", "--no-gradient-accumulation-fusion", "--bf16", "--fp16", "--fp8-param-gather"}:
                continue
            section = "" if flat else SECTIONS.get(name, "model")
            path = f"{section}.{name}" if section else name
        plain = value is True or value is None or value is False
        written = bool(value) if plain and (value is True or flag in _SWITCHES) else value
        found[path] = (not written) if flag in OPPOSITE else "null" if written is None else written
    return found


_SWITCHES = frozenset(
    {
        "--sequence-parallel",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--use-megatron-fsdp",
        "--tp-comm-overlap",
        "--overlap-moe-expert-parallel-comm",
        "--delay-wgrad-compute",
    }
)
