"""Kinds of files: how each is recognised and read into a `Configuration`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from planner.configs.formats import (
    automodel,
    axolotl,
    bridge,
    bridge_recipe,
    gpt_neox,
    litgpt,
    maxtext,
    megatron,
    nanotron,
    olmo,
    primus,
    torchtitan,
    torchtune,
    verl,
)
from planner.configs.formats.configuration import CheckFlags, Configuration, not_understood, unknown_kind
from planner.configs.formats.documents import Document, YamlDocument
from planner.configs.formats.launch import (
    TrainerCommand,
    as_options,
    is_trainer_command,
    launch_facts,
    named_file,
    started_by,
)
from planner.configs.formats.savers import TRL_KEYS
from planner.configs.formats.transformers_fields import LENGTHS, MICRO, MODEL_NAMES, PROGRAM, STEPS
from planner.configs.formats.transformers_fields import TABLE as TRANSFORMERS
from planner.export.frameworks import accelerate_fields, deepspeed_fields
from planner.export.mapping import Facts, Settings, keys_of
from planner.export.named_models import model_said
from planner.export.planned import planned_in
from topology.errors import BadInput

YAML_FORMATS = (
    axolotl.FORMAT,
    torchtune.FORMAT,
    litgpt.FORMAT,
    nanotron.FORMAT,
    gpt_neox.FORMAT,
    automodel.FORMAT,
    maxtext.FORMAT,
    olmo.FORMAT,
)
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")
ATTENTION = ("attn_implementation", "flash_attn")  # named as not read where scores are written to memory
WHOLE = {"pp": ((1, 1),), "ep": ((1, 1),)}  # limits of files that express neither pipelines nor experts


def read_configuration(text: str, where: str, flags: CheckFlags) -> Configuration:
    """Return a configuration together with the line that starts it.

    Raises BadInput (exit 2) if it cannot be read, is of no known kind, or if the line states something that the file
    states too.
    """
    name = Path(where).name.lower()
    if name.endswith(".toml"):
        found = torchtitan.read_toml(text, where, dict(flags.variables))
    elif name.endswith(".py"):
        found = bridge_recipe.read(text, where, flags)
    elif name.endswith((".yaml", ".yml")):
        found = _yaml(text, where, flags)
    elif name.endswith(".json") or text.lstrip().startswith("{"):
        found = _json(text, where, flags)
    else:
        found = _script(text, where, flags)
    found = _as_planned(found, text)
    return started_by(found, flags, where) if flags.launch else found


def _as_planned(found: Configuration, text: str) -> Configuration:
    """Return a configuration completed from the header of an export, where the file itself does not state otherwise."""
    planned = planned_in(text)
    model = planned.model_of(found.model)
    facts = {name: value for name, value in planned.facts.items() if name != "gpus"}
    return replace(
        found,
        rules=planned.runtime or found.rules,
        model=model,
        unknown_model="" if model else found.unknown_model,
        gpus=found.gpus or planned.facts.get("gpus"),
        given={**facts, **found.given},
        assumed=(*found.assumed, *_repeated(found.document)),
    )


def _repeated(document: Document) -> list[str]:
    """Return a line for each key that stands more than once."""
    keys = document.repeated if isinstance(document, YamlDocument) else []
    return [f"{key[:80]} stands twice: the last is read, as PyYAML does" for key in dict.fromkeys(keys)]


def _yaml(text: str, where: str, flags: CheckFlags) -> Configuration:
    document = YamlDocument(text, where)
    document.fill(dict(flags.variables))
    settings = document.settings
    if bridge.is_bridge(settings):
        return megatron.read_dump(document, where)
    if any(key.startswith(f"{megatron.TEST_ARGS}--") for key in settings):
        return megatron.read_test(document, where)
    if verl.is_verl(settings):
        return verl.read(document, settings, where)
    if primus.is_primus(settings):
        return primus.read(document, where, flags)
    if "distributed_type" in settings or ("mixed_precision" in settings and MICRO not in settings):
        return _accelerate(document, flags)
    if MICRO in settings and "tensor_model_parallel_size" in settings:
        raise unknown_kind(where, "its Trainer is that of Megatron-Bridge or MCA, which LLaMA-Factory starts")
    if MICRO in settings:
        return _transformers(document, settings, where, flags)
    for known in YAML_FORMATS:
        if known.knows(settings):
            return known.configuration(document)
    tools = ", ".join(known.framework for known in YAML_FORMATS)
    raise unknown_kind(
        where, f"its keys are none of accelerate's, a Megatron-Bridge recipe's, TrainingArguments', nor of {tools}"
    )


def _accelerate(document: YamlDocument, flags: CheckFlags) -> Configuration:
    launch = launch_facts(flags.launch)
    settings = dict(document.settings)
    # Flags of `accelerate launch` override its file; TrainingArguments pass their precision to accelerate.
    for key, name in (("num_processes", "gpus"), ("num_machines", "nodes")):
        settings |= {key: launch[name]} if name in launch else {}
    for name in ("bf16", "fp16"):
        settings |= {"mixed_precision": name} if launch.get(name) else {}
    steps = settings.get("deepspeed_config.gradient_accumulation_steps")
    said = {"steps": launch.get("steps", steps if isinstance(steps, int) else None)}
    said |= {"micro_beside": launch.get("micro_batch"), "seq_len": launch.get("seq_len")}
    said |= {name: launch.get(name) for name in ("recompute", "adapter", "savers")}
    machines = settings.get("num_machines")
    zero = str(settings.get("distributed_type", "")).upper() == "DEEPSPEED"
    harmless = (
        r"compute_environment|debug|downcast_bf16|main_.*|machine_rank|num_machines|rdzv_backend|same_network|tpu_.*|use_cpu"
        r"|gpu_ids|enable_cpu_affinity|commands?|dynamo_config\..*|fsdp_config\.fsdp_(auto_wrap_policy|transformer_layer.*"
        r"|state_dict_type|use_orig_params|sync_module_states|cpu_ram_efficient_loading|backward_prefetch.*|forward_prefetch"
        r"|min_num_params)|deepspeed_config\.(deepspeed_multinode_launcher|zero3_(init_flag|save_16bit_model)"
        r"|gradient_clipping|deepspeed_hostfile)|parallelism_config\.parallelism_config_(cp_backend|sp_(backend|seq_length|attn).*)"
    )
    known = keys_of(accelerate_fields.TABLE) | {"deepspeed_config.gradient_accumulation_steps"}
    offload = {key for key in settings if "offload" in key and str(settings[key]).lower() in {"none", "false"}}
    count = settings.get("num_processes")
    said_context = settings.get(accelerate_fields.ULYSSES)
    context = said_context if type(said_context) is int and said_context > 0 else 1
    return Configuration(
        framework="accelerate",
        version="1.15.0",
        rules="deepspeed" if zero else "transformers",
        document=document,
        settings=settings,
        table=accelerate_fields.TABLE,
        edit=document.edited,
        gpus=count if isinstance(count, int) and count > 0 else None,
        machines=machines if isinstance(machines, int) and machines > 0 else None,
        given={name: value for name, value in said.items() if value is not None},
        unknown=tuple(key for key in not_understood(settings, known, harmless) if key not in offload),
        leaves_open=frozenset({"global_batch"} | ({"seq_len"} - launch.keys())),
        limits={
            **WHOLE,
            "micro_batch_size": None,
            # Sequence parallelism over DeepSpeed needs the program's loss as well.
            **({"tp": ((1, 1),), "cp": ((context, context),), "recompute": None} if zero else {}),
        },
    )


def _json(text: str, where: str, flags: CheckFlags) -> Configuration:
    try:
        document = YamlDocument(text, where, is_json=True)
    except BadInput:
        # Only DeepSpeed reads Hjson, which has comments (runtime/config.py: DeepSpeedConfig).
        document = YamlDocument(text, where, is_json=True, commented=True)
        if not _is_deepspeed(document.settings):
            raise
    document.fill(dict(flags.variables))
    settings = document.settings
    if MICRO in settings or "output_dir" in settings:
        return _transformers(document, settings, where, flags)
    if _is_deepspeed(settings):
        return _deepspeed(document, settings, flags)
    if "tensor_model_parallel_size" in settings or bridge.is_bridge(settings):
        return megatron.read_dump(document, where)
    raise unknown_kind(where, "its keys are neither DeepSpeed's nor those of TrainingArguments")


def _is_deepspeed(settings: Settings) -> bool:
    return any(key.startswith(("zero_optimization", "train_")) for key in settings)


def _deepspeed(document: YamlDocument, settings: Settings, flags: CheckFlags) -> Configuration:
    if document.repeated:
        raise BadInput(f"{document.repeated[0][:80]} stands twice", why="DeepSpeed refuses duplicate keys")
    launch = launch_facts(flags.launch)
    harmless = (
        r"meshwright.*|optimizer\..*|scheduler\..*|steps_per_print|wall_clock_breakdown|gradient_clipping|fp16\..*|bf16\..*"
        r"|zero_optimization\.offload_(optimizer|param)\.(buffer_.*|fast_init|max_in_cpu|pipeline_.*)"
        r"|zero_optimization\.(overlap_comm|contiguous_gradients|reduce_scatter|reduce_bucket_size|allgather_.*|sub_group_size"
        r"|stage3_.*|round_robin_gradients|memory_efficient_linear|load_from_fp32_weights)|zero_allow_untested_optimizer"
        r"|prescale_gradients|tensorboard\..*|wandb\..*|csv_monitor\..*|flops_profiler\..*|dump_state|amp\.enabled"
        r"|comms_logger\..*|zero_force_ds_cpu_optimizer|checkpoint\..*|expert_parallel\.preset_model|data_types\..*"
        r"|activation_checkpointing\.(partition_activations|contiguous_memory_optimization|number_checkpoints|profile"
        r"|synchronize_checkpoint_boundary)|aio\..*|elasticity\..*|seed|gradient_predivide_factor|disable_allgather|comms_config\..*|monitor_config\..*|_\w+"
    )
    known = keys_of(deepspeed_fields.TABLE)
    unknown = [
        key
        for key in not_understood(settings, known, harmless)
        if not (key in _OFF and settings[key] in {False, "none"})
    ]
    filled = {**settings, **_filled(settings, launch, flags)}
    assumed = _types_assumed(filled)
    said = settings.get("sequence_parallel_size")
    context = said if isinstance(said, int) and said > 0 and "data_parallel_size" in settings else 1
    return Configuration(
        framework="deepspeed",
        version="0.19.8",
        rules="deepspeed",
        document=document,
        settings=filled,
        table=deepspeed_fields.TABLE,
        edit=document.edited,
        gpus=launch.get("gpus"),
        given={name: launch[name] for name in ("seq_len", "recompute", "adapter", "savers") if name in launch},
        leaves_open=frozenset({"seq_len"} - launch.keys())
        | frozenset(
            {"global_batch"} if "micro_batch" not in launch and all(_open(settings, key) for key in SIZES) else ()
        ),
        unknown=tuple(unknown),
        assumed=assumed,
        # Context parallelism needs the program's attention as well.
        limits={"pp": ((1, 1),), "cp": ((context, context),), "recompute": None},
    )


_OFF = frozenset({"activation_checkpointing.cpu_checkpointing"})  # has a cost if it is on
# DeepSpeed's keys that Transformers fills in where they are "auto" or absent (integrations/deepspeed.py).
_FROM_LAUNCH = {
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "steps",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
}


def _filled(settings: Settings, launch: Facts, flags: CheckFlags) -> Settings:
    """Return the sizes and types that a DeepSpeed file leaves open, as the flags state them."""
    stated = {
        "train_batch_size": flags.global_batch,
        "train_micro_batch_size_per_gpu": flags.micro_batch,
        **{key: launch[name] for key, name in _FROM_LAUNCH.items() if name in launch},
    }
    return {key: value for key, value in stated.items() if value is not None and _open(settings, key)}


def _types_assumed(settings: Settings) -> tuple[str, ...]:
    """Assume bfloat16 if the type is left to the program's arguments, and list the assumption."""
    if any(settings.get(f"{name}.enabled") != "auto" for name in ("bf16", "fp16") if f"{name}.enabled" in settings):
        return ()
    if settings.get("bf16.enabled") != "auto" and settings.get("fp16.enabled") != "auto":
        return ()
    settings["bf16.enabled"] = True
    return ("bfloat16 (the types are auto: the program's arguments decide, with --launch)",)


def _open(settings: Settings, key: str) -> bool:
    return bool(settings.get(key, "auto") == "auto")


def _transformers(document: Document, settings: Settings, where: str, flags: CheckFlags) -> Configuration:
    launch = launch_facts(flags.launch)
    if error := named_file(settings, where, as_options(settings)):
        raise error
    inner = {key.removeprefix("deepspeed."): value for key, value in settings.items() if key.startswith("deepspeed.")}
    understood = keys_of(TRANSFORMERS)
    # TrainingArguments have some 130 fields, most without cost; these are the ones that change a step or its memory.
    costly = re.compile(
        r"optim_target_modules|neftune.*|tf32|torch_empty_cache_steps|auto_find_batch_size|fp16_full_eval"
        r"|tp_size|parallelism_config.*|fsdp_config\..*offload.*|half_precision_backend|packing"
    )
    table = (*deepspeed_fields.TABLE, *PROGRAM) if inner else TRANSFORMERS
    merged = dict(settings)
    if inner:
        merged |= inner
        for key, name in (("train_micro_batch_size_per_gpu", MICRO), ("gradient_accumulation_steps", STEPS)):
            if _open(merged, key) and name in settings:
                merged[key] = settings[name]
        for name in ("bf16", "fp16"):
            if _open(merged, f"{name}.enabled"):
                merged[f"{name}.enabled"] = bool(settings.get(name))

    model, unknown_model = model_said(next((settings[key] for key in MODEL_NAMES if settings.get(key)), None))

    def edit(changes: Settings) -> str:
        return document.edited(
            {f"deepspeed.{key}" if inner and key not in settings else key: v for key, v in changes.items()}
        )

    return Configuration(
        framework="transformers",
        version=str(settings["transformers_version"]) if "transformers_version" in settings else None,
        rules="deepspeed" if inner else "trl" if TRL_KEYS & settings.keys() else "transformers",
        document=document,
        settings=merged,
        table=table,
        edit=edit,
        model=model,
        unknown_model=unknown_model,
        gpus=launch.get("gpus"),
        given={name: launch[name] for name in ("seq_len",) if name in launch},
        leaves_open=frozenset({"seq_len"} - launch.keys() if not any(settings.get(key) for key in LENGTHS) else ()),
        unknown=tuple(
            key
            for key in settings
            if (key not in understood and costly.fullmatch(key) and settings[key] not in {None, False, ""})
            or (key in ATTENTION and settings[key] in {"eager", "disabled"})
        ),
        limits={**WHOLE, "tp": ((1, 1),), "cp": ((1, 1),)},
    )


def _script(text: str, where: str, flags: CheckFlags) -> Configuration:
    if any(program in text for program in verl.PROGRAMS):
        return verl.read_command(text, where, flags)
    if any(program in text for program in maxtext.PROGRAMS):
        return maxtext.read_command(text, where, flags)
    document = megatron.command_line(text, where, dict(flags.variables))
    if "openrlhf." in text or re.search(r"\b(swift|megatron) (sft|pt)\b|swift/cli/", text):
        raise unknown_kind(where, "OpenRLHF and ms-swift have options and defaults of their own, which are not read")
    if "--module" in document.settings or "torchtitan.train" in text:
        return torchtitan.read_command(text, where, flags)
    if document.settings.keys() & {"--tensor-model-parallel-size", "--num-layers"}:
        return megatron.read_script(document, where)
    if is_trainer_command(document.settings):
        command = TrainerCommand(document, where)
        if error := named_file(command.settings, where, f'"$(cat {where})"'):
            raise error
        found = _transformers(command, command.settings, where, replace(flags, launch=text))
        return replace(found, machines=launch_facts(text).get("nodes"))
    raise unknown_kind(where, "it has no flags of Megatron-LM, torchtitan or TrainingArguments")
