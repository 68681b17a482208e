"""Kinds of files: how each is recognised, and read into a `Configuration`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from planner.configs import bridge
from planner.configs.command_line import CommandLine, option_kinds, typed
from planner.configs.configuration import Configuration, NotAConfiguration, Told, not_understood, preset
from planner.configs.documents import TomlDocument, YamlDocument
from planner.configs.named_models import model_of_flavor
from planner.configs.transformers_fields import LENGTHS, MICRO, PROGRAM, STEPS
from planner.configs.transformers_fields import TABLE as TRANSFORMERS
from planner.export.frameworks import accelerate_fields, deepspeed_fields, megatron_fields, torchtitan_fields
from planner.export.frameworks.megatron_model import MODEL_KEYS, model_of_flags
from planner.export.mapping import Facts, Settings, keys_of
from planner.export.schema import schema
from simulator.config.model import Model
from topology.errors import BadInput, PlannerError

WHOLE = {"pp": ((1, 1),), "ep": ((1, 1),)}  # limits of files that hold neither pipelines nor experts


def read_configuration(text: str, where: str, told: Told) -> Configuration:
    """Return what a configuration says. Raises BadInput (exit 2) where it cannot be read or is of no known kind."""
    name = Path(where).name.lower()
    if name.endswith(".toml"):
        return _toml(text, where)
    if name.endswith((".yaml", ".yml")):
        return _yaml(text, where)
    if name.endswith(".json") or text.lstrip().startswith("{"):
        return _json(text, where, told)
    return _script(text, where)


def _toml(text: str, where: str) -> Configuration:
    document = TomlDocument(text, where)
    settings = document.settings
    if not any(key.startswith(("parallelism.", "training.", "model.")) for key in settings):
        raise _unknown(where, "its tables are not torchtitan's (training, parallelism, model)")
    gpus, machine = preset(text)
    harmless = (
        r"(job|profiling|metrics|optimizer|lr_scheduler|checkpoint|validation|comm|fault_tolerance|debug|memory_estimation"
        r"|experimental)\..*|training\.(dataset.*|steps|max_norm|gc_.*|dataloader\..*|mixed_precision_reduce|seed|deterministic"
        r"|warmup_steps|data_parallel_type)|model\.(name|flavor|hf_assets_path|tokenizer_path|print_after_conversion"
        r"|norm_type)|compile\.backend|activation_checkpoint\.(early_stop|debug|preserve_rng_state"
        r"|determinism_check|visualize.*|memory_budget|per_op_sac_force_recompute_mm_shapes_by_fqns|selective_ac_option)"
        r"|parallelism\.(disable_loss_parallel|context_parallel_load_balancer|expert_parallel_comm_backend"
        r"|pipeline_parallel_schedule_csv|pipeline_parallel_expert_parallel_overlap)"
    )
    known = keys_of(torchtitan_fields.TOML)
    assumed = []
    # Until 0.1 they had other names.
    spelled: dict[str, str] = {}
    for old, new in _OLD_TITAN.items():
        if old in settings and new not in settings:
            settings[new], spelled[new] = settings.pop(old), old
            assumed.append(f"{old} is read as {new}, its later name")

    def edit(changes: Settings) -> str:
        return document.edited({spelled.get(key, key): value for key, value in changes.items()})

    optimizer = settings.get("optimizer.name", "AdamW")
    model: Model | str | None = None
    if "model.name" in settings and "model.flavor" in settings:
        model = _flavor("0.2.2", str(settings["model.name"]), str(settings["model.flavor"]))
    return Configuration(
        framework="torchtitan",
        version="0.2.2",
        rules="torchtitan",
        document=document,
        settings=settings,
        table=torchtitan_fields.TOML,
        edit=edit,
        model=model,
        gpus=_product(settings, gpus),
        given={"optimizer_said": optimizer},
        unknown=not_understood(settings, known, harmless),
        assumed=(*assumed, *([f"{gpus} GPUs (the file's own comment)"] if gpus else [])),
        cluster=machine,
    )


_OLD_TITAN = {
    "training.batch_size": "training.local_batch_size",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.context_parallel_degree": "parallelism.context_parallel_degree",
    "training.compile": "compile.enable",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "model.tokenizer_path": "model.hf_assets_path",
}


def _flavor(version: str, module: str, flavor: str) -> str | None:
    try:
        return model_of_flavor(version, module, flavor)
    except PlannerError:
        return None


def _product(settings: Settings, stated: int | None) -> int | None:
    """Return the GPUs that torchtitan's degrees make, where none of them is left open."""
    degrees = [settings.get(f"parallelism.{name}_degree", 1) for name in ("data_parallel_replicate", *_INNER)]
    shard = settings.get("parallelism.data_parallel_shard_degree", -1)
    if not isinstance(shard, int) or shard < 1 or not all(isinstance(degree, int) for degree in degrees):
        return stated
    product = shard
    for degree in degrees:
        product *= degree
    return product


_INNER = ("tensor_parallel", "context_parallel", "pipeline_parallel")


def _yaml(text: str, where: str) -> Configuration:
    document = YamlDocument(text, where)
    settings = document.settings
    if bridge.is_bridge(settings):
        return _bridge(document, where)
    if "distributed_type" in settings or "mixed_precision" in settings:
        return _accelerate(document)
    if MICRO in settings:
        return _transformers(document, settings, "")
    raise _unknown(where, "its keys are neither accelerate's, nor a Megatron-Bridge recipe's, nor TrainingArguments'")


def _accelerate(document: YamlDocument) -> Configuration:
    settings = document.settings
    zero = str(settings.get("distributed_type", "")).upper() == "DEEPSPEED"
    harmless = (
        r"compute_environment|debug|downcast_bf16|main_.*|machine_rank|num_machines|rdzv_backend|same_network|tpu_.*|use_cpu"
        r"|gpu_ids|enable_cpu_affinity|commands?|dynamo_config\..*|fsdp_config\.fsdp_(auto_wrap_policy|transformer_layer.*"
        r"|state_dict_type|use_orig_params|sync_module_states|cpu_ram_efficient_loading|backward_prefetch.*|forward_prefetch"
        r"|min_num_params)|deepspeed_config\.(deepspeed_multinode_launcher|zero3_(init_flag|save_16bit_model)"
        r"|gradient_clipping|deepspeed_hostfile)|parallelism_config\.parallelism_config_(cp_backend|sp_.*)"
    )
    known = keys_of(accelerate_fields.TABLE) | {"deepspeed_config.gradient_accumulation_steps"}
    offload = {key for key in settings if "offload" in key and str(settings[key]).lower() in {"none", "false"}}
    count = settings.get("num_processes")
    return Configuration(
        framework="accelerate",
        version="1.15.0",
        rules="deepspeed" if zero else "pytorch",
        document=document,
        settings=settings,
        table=accelerate_fields.TABLE,
        edit=document.edited,
        gpus=count if isinstance(count, int) and count > 0 else None,
        unknown=tuple(key for key in not_understood(settings, known, harmless) if key not in offload),
        limits={
            **WHOLE,
            "micro_batch": None,
            **({"tp": ((1, 1),), "cp": ((1, 1),), "recomputes": None} if zero else {}),
        },
    )


def _bridge(document: YamlDocument, where: str) -> Configuration:
    flags, paths = bridge.flags_of(document.settings)
    model, assumed = _flag_model(flags, where)
    understood = keys_of(megatron_fields.TABLE) | MODEL_KEYS
    # A dump has hundreds of fields, most at defaults that cost nothing; these are what a step or its memory depends on.
    costly = re.compile(
        r".*\.(fp8|fp4|.*cpu_offload.*|.*_offload_.*|enable_cuda_graph|cuda_graph_impl|overlap_moe_expert.*|delay_wgrad.*"
        r"|window_size|mtp_num_layers|moe_.*(capacity|deepep|overlap).*|heterogeneous.*|hierarchical_context.*|use_torch_fsdp2"
        r"|use_precision_aware.*|rampup_batch_size|moe_layer_recompute|symmetric_ar_type|nccl_ub)"
    )
    at = {path: flag for flag, path in paths.items()}
    unknown = tuple(
        path
        for path, value in document.settings.items()
        if value not in (None, False, 0, 0.0, "") and costly.fullmatch(path) and at.get(path) not in understood
    )

    def edit(changes: Settings) -> str:
        return document.edited(bridge.fields_of(changes, paths))

    return Configuration(
        framework="megatron-bridge",
        version=None,
        rules="megatron-lm",
        document=document,
        settings=flags,
        table=megatron_fields.TABLE,
        edit=edit,
        model=model,
        given=_megatron_given(model),
        unknown=unknown,
        assumed=assumed,
    )


def _flag_model(flags: Settings, where: str) -> tuple[Model | None, tuple[str, ...]]:
    try:
        return model_of_flags(flags, Path(where).stem[:60])
    except BadInput:
        return None, ()


def _megatron_given(model: Model | None) -> Facts:
    return {} if model is None else {"moe": model.moe is not None, "max_positions": model.max_positions}


def _json(text: str, where: str, told: Told) -> Configuration:
    document = YamlDocument(text, where, is_json=True)
    settings = document.settings
    if MICRO in settings or "output_dir" in settings:
        return _transformers(document, settings, told.launch)
    if any(key.startswith(("zero_optimization", "train_")) for key in settings):
        return _deepspeed(document, settings, told)
    if "tensor_model_parallel_size" in settings or bridge.is_bridge(settings):
        return _bridge(document, where)
    raise _unknown(where, "its keys are neither DeepSpeed's nor those of TrainingArguments")


def _deepspeed(document: YamlDocument, settings: Settings, told: Told) -> Configuration:
    launch = launch_facts(told.launch)
    harmless = (
        r"meshwright.*|optimizer\..*|scheduler\..*|steps_per_print|wall_clock_breakdown|gradient_clipping|fp16\..*|bf16\..*"
        r"|zero_optimization\.(overlap_comm|contiguous_gradients|reduce_scatter|reduce_bucket_size|allgather_.*|sub_group_size"
        r"|stage3_.*|round_robin_gradients|memory_efficient_linear|load_from_fp32_weights)|zero_allow_untested_optimizer"
        r"|prescale_gradients|tensorboard\..*|wandb\..*|csv_monitor\..*|flops_profiler\..*|dump_state|amp\.enabled"
        r"|comms_logger\..*|zero_force_ds_cpu_optimizer|checkpoint\..*|expert_parallel\.preset_model|data_types\..*"
        r"|aio\..*|elasticity\..*|seed|gradient_predivide_factor|disable_allgather|comms_config\..*|monitor_config\..*|_\w+"
    )
    offload = [
        key for key in settings if "offload" in key and str(settings[key]).lower() not in {"none", "false", "true"}
    ]
    known = keys_of(deepspeed_fields.TABLE)
    unknown = [key for key in not_understood(settings, known, harmless) if "offload" not in key]
    unknown += [key for key in offload if key.endswith("device")]
    return Configuration(
        framework="deepspeed",
        version="0.19.8",
        rules="deepspeed",
        document=document,
        settings=settings
        | {key: launch[name] for key, name in _FROM_LAUNCH.items() if name in launch and _open(settings, key)},
        table=deepspeed_fields.TABLE,
        edit=document.edited,
        gpus=launch.get("gpus"),
        given={name: launch[name] for name in ("seq_len", "recompute") if name in launch},
        unknown=tuple(unknown),
        limits={"pp": ((1, 1),), "recomputes": None},
    )


# DeepSpeed's keys that Transformers fills in where they are "auto" or absent (integrations/deepspeed.py).
_FROM_LAUNCH = {
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "steps",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
}


def _open(settings: Settings, key: str) -> bool:
    return bool(settings.get(key, "auto") == "auto")


def launch_facts(line: str) -> dict[str, Any]:
    """Return what a launch line says: GPUs, and the program's arguments in the words of Transformers."""
    if not line:
        return {}
    said = CommandLine(line, "--launch", lambda _: None)
    return launch_of(said)


def launch_of(said: CommandLine) -> dict[str, Any]:
    """Return what a command line says of its GPUs and, in the words of Transformers, of its batch."""
    values = said.settings
    found: dict[str, Any] = {}

    def count(*names: str) -> int | None:
        return next((values[name] for name in names if type(values.get(name)) is int), None)

    each = count("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--gpus-per-node")
    each = each or said.variable("GPUS_PER_NODE", "NPROC_PER_NODE", "GPUS", "NUM_GPUS")
    each = each or _directive(said, "gpus-per-node", "ntasks-per-node", "gres")
    nodes = count("--nnodes", "--num_nodes", "--nodes", "--num_machines") or said.variable("NNODES", "NUM_NODES")
    nodes = nodes or _directive(said, "nodes")
    total = count("--num_processes") or said.variable("WORLD_SIZE")
    if total or each:
        found["gpus"] = total or (each or 1) * (nodes or 1)
    for name, key in (("micro_batch", MICRO), ("steps", STEPS)):
        if (value := count(f"--{key}")) is not None:
            found[name] = value
    for key in LENGTHS:
        if (value := count(f"--{key}")) is not None:
            found["seq_len"] = value
    if values.get("--gradient_checkpointing") is True:
        found["recompute"] = "full"
    for name in ("bf16", "fp16"):
        if values.get(f"--{name}") is True:
            found[name] = True
    return found


def _directive(said: CommandLine, *names: str) -> int | None:
    for name in names:
        value = typed(str(said.directives.get(name, "")).rpartition(":")[2])
        if type(value) is int:
            return value
    return None


def _transformers(document: YamlDocument, settings: Settings, line: str) -> Configuration:
    launch = launch_facts(line)
    zero = settings.get("deepspeed")
    inner = {key.removeprefix("deepspeed."): value for key, value in settings.items() if key.startswith("deepspeed.")}
    if isinstance(zero, str) and zero:
        raise BadInput(
            f"the arguments name a DeepSpeed file, {zero[:80]!r}",
            why="the stage and the types are in it",
            remedy="check that file, with these arguments as --launch",
        )
    understood = keys_of(TRANSFORMERS)
    # TrainingArguments have some 130 fields, most of which cost nothing; these are what a step or its memory depends on.
    costly = re.compile(
        r"optim_target_modules|neftune.*|tf32|torch_empty_cache_steps|auto_find_batch_size|use_liger_kernel|fp16_full_eval"
        r"|tp_size|parallelism_config.*|fsdp_config\..*offload.*|half_precision_backend|lora_.*|finetuning_type|packing"
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

    def edit(changes: Settings) -> str:
        return document.edited(
            {f"deepspeed.{key}" if inner and key not in settings else key: v for key, v in changes.items()}
        )

    return Configuration(
        framework="transformers",
        version=str(settings["transformers_version"]) if "transformers_version" in settings else None,
        rules="deepspeed" if inner else "pytorch",
        document=document,
        settings=merged,
        table=table,
        edit=edit,
        gpus=launch.get("gpus"),
        given={name: launch[name] for name in ("seq_len",) if name in launch},
        unknown=tuple(
            key
            for key in settings
            if key not in understood and costly.fullmatch(key) and settings[key] not in {None, False, ""}
        ),
        limits={**WHOLE, "tp": ((1, 1),), "cp": ((1, 1),)},
    )


def _script(text: str, where: str) -> Configuration:
    flags = schema("megatron", "0.19.2")["keys"]
    document = CommandLine(text, where, option_kinds(flags))
    if "--module" in document.settings or "torchtitan.train" in text:
        return _titan_command(text, where)
    if "--tensor-model-parallel-size" in document.settings or "--num-layers" in document.settings:
        return _megatron(document, where, flags)
    raise _unknown(where, "it has neither Megatron-LM's flags nor torchtitan's")


def _megatron(document: CommandLine, where: str, flags: dict[str, Any]) -> Configuration:
    settings = document.settings
    model, assumed = _flag_model(settings, where)
    understood = keys_of(megatron_fields.TABLE) | MODEL_KEYS
    harmless = (
        r"--(lr.*|min-lr|train-(iters|samples)|weight-decay.*|adam-.*|clip-grad|init-method-std|seed|split|data-.*|mock-data"
        r"|tokenizer.*|vocab-file|merge-file|save.*|load|log-.*|eval-.*|tensorboard.*|wandb.*|timing-.*|distributed-.*"
        r"|norm-epsilon|layernorm-epsilon|rotary-.*|use-rot.*|rope-.*|no-(load|save|position|masked|bias|rope|async).*"
        r"|use-mcore-models|transformer-impl|use-flash-attn|attention-(softmax|backend).*|num-workers|nproc.per.node|nnodes"
        r"|node.rank|master.*|rdzv.*|standalone|max-restarts|num_gpus|num_nodes|hostfile|moe-(aux|z-loss|router|permute"
        r"|token-drop).*|initial-loss-scale|override-opt.*|exit-.*|manual-gc.*|make-vocab.*|encoder-seq-length"
        r"|dist-ckpt.*|ckpt-.*|async-save|use-dist-ckpt|auto-detect.*|local.ranks.filter|tee|role|log.dir|redirects"
        r"|untie.*|attention-dropout|hidden-dropout|apply-.*|no-create.*|no-check.*|use-checkpoint-args|optimizer|loss-scale.*"
        r"|kv-channels|no-mmap.*|disable-.*|bf16|fp16|sequence-parallel|recompute-activations|accumulate-allreduce.*"
        r"|container.*|nodes|gpus.*|ntasks.*|time|job.*|export|mpi|output|error|help|enable-one-logger|vocab-size)"
    )
    unknown = not_understood(settings, understood, harmless)
    later = [f"{flag} is not a flag of Megatron-LM 0.19" for flag in unknown if flag not in flags]
    launch = launch_of(document)
    return Configuration(
        framework="megatron-lm",
        version="0.19.2",
        rules="megatron-lm",
        document=document,
        settings=settings,
        table=megatron_fields.TABLE,
        edit=document.edited,
        model=model,
        gpus=launch.get("gpus"),
        given=_megatron_given(model),
        unknown=unknown,
        assumed=(*assumed, *later),
    )


def _titan_command(text: str, where: str) -> Configuration:
    document = CommandLine(text, where, lambda _: None)
    said = document.settings
    module, function = (str(said.get(flag, document.expanded(f"${name}"))) for flag, name in _TITAN_CHOICE)
    configs = schema("torchtitan", "0.3.0")["configs"]
    base = configs.get(f"{module}.{function}") or _own_module(text)
    settings: Settings = dict(base["settings"]) if base else {}
    plain = {flag.removeprefix("--"): value for flag, value in said.items() if "." in flag}
    for key, value in plain.items():
        section, _, name = key.rpartition(".")
        no = name.startswith("no_")
        settings[f"{section}.{name.removeprefix('no_')}" if no else key] = (value is not True) if no else value
    mode = next((word.text for word in document.words if word.text.startswith("activation_checkpoint:")), "")
    if mode:
        settings[torchtitan_fields.SUBCOMMAND] = mode.partition(":")[2].replace("-", "_")
    module = base.get("module", module) if base else module
    assumed = () if base else (f"configuration {module[:40]}.{function[:40]} is not torchtitan's own: class defaults",)
    harmless = (
        r"(training\.(steps|dataset.*|max_norm|gc_.*|disable_cuda_graphs)|(checkpoint|metrics|profil\w+|optimizer|comm|debug"
        r"|lr_scheduler|validator|dataloader|hf_assets_path)\..*|compile\.(components|backend)|parallelism\.(spmd_backend"
        r"|context_parallel_.*|disable_.*|pipeline_parallel_schedule_csv)|activation_checkpoint\..*)"
    )
    model = _flavor("0.3.0", module, str(base["flavor"])) if base else None
    launch = launch_of(document)

    def edit(changes: Settings) -> str:
        edited = document.edited({f"--{key}": v for key, v in changes.items() if key != torchtitan_fields.SUBCOMMAND})
        wanted = changes.get(torchtitan_fields.SUBCOMMAND)
        if not wanted:
            return edited
        word = f"{torchtitan_fields.SUBCOMMAND}:{wanted}"
        if mode:
            return edited.replace(mode, word)
        last = max(
            flag.end for flag in CommandLine(edited, where, lambda _: None).flags.values()
        )  # it ends the options
        return f"{edited[:last]} {word}{edited[last:]}"

    return Configuration(
        framework="torchtitan",
        version="0.3.0",
        rules="torchtitan",
        document=document,
        settings=settings,
        table=torchtitan_fields.COMMAND_LINE,
        edit=edit,
        model=model,
        gpus=_product(settings, launch.get("gpus") or document.variable("NGPU")),
        unknown=not_understood(
            {key.replace(".no_", "."): 0 for key in plain}, keys_of(torchtitan_fields.COMMAND_LINE), harmless
        ),
        assumed=(*assumed, _CHUNKED) if base and "module" not in base else assumed,
    )


_CHUNKED = "the loss in one piece: torchtitan 0.3.0's own configurations compute it in chunks, which needs less memory"


def _own_module(text: str) -> dict[str, Any] | None:
    """Return what the configuration module inside an exported script says of its model, where there is one."""
    module = re.search(r"^from torchtitan\.models import (\w+) as models$", text, re.MULTILINE)
    flavor = re.search(r"models\.model_registry\(\"([^\"]+)\"\)", text)
    if module is None or flavor is None:
        return None
    return {"flavor": flavor[1], "settings": {}, "module": module[1]}


_TITAN_CHOICE = (("--module", "MODULE"), ("--config", "CONFIG"))


def _unknown(where: str, why: str) -> NotAConfiguration:
    return NotAConfiguration(
        f"{where} is no configuration of a kind that is known",
        why=why,
        remedy="a torchtitan TOML or command, a Megatron-LM command line or script, a Megatron-Bridge recipe dump, a DeepSpeed "
        "JSON, an accelerate YAML, or TrainingArguments as JSON",
    )
