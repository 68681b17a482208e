"""verl's configurations, as Hydra's YAML or as overrides of a command: the step of its actor, or of its SFT trainer.

Keys and defaults: `verl/trainer/config/` of verl at 1dda039; a step is a mini batch of prompts, each answered
`rollout.n` times (`trainer/ppo/ray_trainer.py`). Weights that verl offloads between phases are on the GPUs during a
phase. The degrees of rollout and reference are checked as in verl; their time is not part of a step.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from planner.configs.formats import bridge, megatron
from planner.configs.formats.adapters import verl_adapters
from planner.configs.formats.command_line import Overrides
from planner.configs.formats.configuration import CheckFlags, Configuration, not_understood, unknown_kind
from planner.configs.formats.documents import Document
from planner.configs.formats.launch import launch_of
from planner.configs.formats.yaml_format import DATA_PARALLEL, FLAT, Described, YamlFormat, constant, named, types
from planner.export.mapping import Entry, Facts, NotStated, Settings, Table, truth, whole
from topology.errors import BadInput

PROGRAMS = ("verl.trainer.main_ppo", "verl.trainer.sft_trainer", ".main_dapo")
ENGINES = ("fsdp", "fsdp2", "dp", "megatron")
PLAIN = frozenset({"engine", "model_engine"})
_ACTOR, _ROLLOUT, _REFERENCE = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "ref"))
_MODEL = "actor_rollout_ref.model."
_MEGATRON, _FSDP = f"{_ACTOR}megatron.", f"{_ACTOR}fsdp_config."
_OTHER_ENGINES = tuple(f"{_ACTOR}{name}." for name in ("engine", "veomni", "torchtitan", "automodel"))
_TRANSFORMER = f"{_MEGATRON}override_transformer_config."
_LENGTHS = ("data.max_prompt_length", "data.max_response_length")
_BATCH = (
    "data.train_batch_size",
    f"{_ACTOR}ppo_mini_batch_size",
    f"{_ROLLOUT}n",
    f"{_ACTOR}ppo_micro_batch_size_per_gpu",
    f"{_ACTOR}ppo_micro_batch_size",
    f"{_ACTOR}use_dynamic_bsz",
    f"{_ACTOR}ppo_max_token_len_per_gpu",
)
_SFT_BATCH = (
    "data.train_batch_size",
    "data.micro_batch_size_per_gpu",
    "data.use_dynamic_bsz",
    "data.max_token_len_per_gpu",
    "data.max_length",
)
_DEGREES = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
_ROLLOUT_KEYS = tuple(f"{_ROLLOUT}{name}" for name in _DEGREES)
# Degrees of `McoreEngineConfig`, whose defaults differ from Megatron-LM's.
# Fields of `McoreEngineConfig` and of its transformer's; it has fields of its own for what FSDP and the optimizer
# overlap.
FIELDS = frozenset(
    {
        *(f"{name}_model_parallel_size" for name in ("tensor", "expert", "pipeline", "virtual_pipeline")),
        *("context_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "use_distributed_optimizer"),
        *("recompute_granularity", "recompute_method", "recompute_num_layers"),
    }
)
IMPLIED = frozenset({"--overlap-grad-reduce", "--overlap-param-gather"})
OLDER = {f"{_ACTOR}ulysses_sequence_parallel_size": f"{_FSDP}ulysses_sequence_parallel_size"}
MEGATRON: Settings = {"--bf16": True, "--use-distributed-optimizer": True, "--sequence-parallel": True}
_REST = "the step is the actor's update: rollout, reference and rewards are no part of it"
HARMLESS = (
    r"(algorithm|trainer|reward\w*|custom_reward_function|critic|global_profiler|ray_kwargs|ray_init|checkpoint|optim"
    r"|transfer_queue|distillation|hydra|env|async_training)\..*|data\.(?!max_|train_batch|micro|use_dynamic).*"
    r"|actor_rollout_ref\.(hybrid_engine|nccl_timeout|rollout\..*|ref\..*)"
    r"|(actor_rollout_ref\.)?model\.(path|use_remove_padding|trust_remote_code|use_shm|external_lib|tokenizer_path"
    r"|custom_chat_template|target_modules|use_fused_kernels|fused_kernel_options.*|mtp\..*|override_config.*|lora_\w+)"
    r"|actor_rollout_ref\.actor\.(optim\..*|clip_\w+|grad_clip|entropy_\w+|calculate_entropy|use_kl_loss|kl_loss_\w+|loss_\w+"
    r"|policy_loss\..*|ppo_epochs|shuffle|data_loader_seed|checkpoint\..*|profiler\..*|router_replay\..*|use_torch_compile"
    r"|use_remove_padding|tau_\w+|model_engine|strategy|load_weight|freeze_vision_tower|rollout_n|_target_)"
    r"|(actor_rollout_ref\.actor\.fsdp_config|engine)\.(param_offload|optimizer_offload|forward_prefetch|use_orig_params|seed"
    r"|wrap_policy.*|mixed_precision\.\w+|entropy_\w+|use_torch_compile|full_determinism|strategy|_target_|forward_only)"
    r"|actor_rollout_ref\.actor\.megatron\.(param_offload|grad_offload|optimizer_offload|use_dist_checkpointing|dist_ckpt\w*"
    r"|dist_checkpointing_\w+|use_mbridge|vanilla_mbridge|seed|entropy_\w+|override_ddp_config.*|_target_|forward_only"
    r"|override_transformer_config\.(attention_backend|apply_rope_fusion|gradient_accumulation_fusion|(moe_(permute|router|aux|z_)|bias_|masked_|persist_|use_f)\w*))"
    r"|engine|model_engine"
)


def is_verl(settings: Settings) -> bool:
    """Return whether a file's keys are those of verl's trainers."""
    return f"{_MODEL}path" in settings or {"data.micro_batch_size_per_gpu", "model.path"} <= settings.keys()


def read_command(text: str, where: str, flags: CheckFlags) -> Configuration:
    """Return the configuration of a command's overrides."""
    document = Overrides(text, where, dict(flags.variables), PLAIN)
    settings = {key: value for key, value in document.settings.items() if not key.startswith("--")}
    unsure = tuple(f"{key} (which a condition sets)" for key in document.conditional)
    return read(document, settings, where, gpus=launch_of(document).get("gpus"), unsure=unsure)


def read(
    document: Document, settings: Settings, where: str, *, gpus: int | None = None, unsure: tuple[str, ...] = ()
) -> Configuration:
    """Return the configuration of the training step."""
    settings = {**settings, **({"launched": gpus} if gpus else {})}
    tunes = f"{_MODEL}path" not in settings
    words = ("engine",) if tunes else ("model_engine", f"{_ACTOR}strategy", f"{_ACTOR}model_engine")
    others = (key.removeprefix(_ACTOR).partition(".")[0] for key in settings if key.startswith(_OTHER_ENGINES))
    engine = next(others, str(next((settings[word] for word in words if settings.get(word)), "fsdp")))
    uses = engine == "megatron" or any(key.startswith(_MEGATRON) for key in settings)
    if engine not in ENGINES or (tunes and uses):
        raise unknown_kind(where, f"verl's engine {engine[:40]!r} is none that is read")
    if not uses:
        found = (SFT if tunes else FSDP).configuration(document, settings)
        spread = found.settings.get(f"{'engine.' if tunes else _FSDP}ulysses_sequence_parallel_size", 1) != 1
        # Ulysses is not one of torch's methods of context parallelism.
        found = replace(found, rules="any") if spread else found
    else:
        found = _of_megatron(document, settings, where)
    return replace(found, unknown=(*found.unknown, *unsure), elsewhere=unsure)


def _gpus(settings: Settings) -> int | None:
    """Return the GPUs of all nodes; for an SFT trainer, those of its launcher."""
    if "launched" in settings or f"{_MODEL}path" not in settings:
        return settings.get("launched")
    each, nodes = settings.get("trainer.n_gpus_per_node", 8), settings.get("trainer.nnodes", 1)
    return each * nodes if type(each) is int and type(nodes) is int else None


def _at_once(settings: Settings, sizes: tuple[str, str], *, dynamic: bool, tokens: int, length: int) -> int | None:
    """Return the micro batch: that of a key, or as many full-length sequences as the token limit of a GPU allows."""
    micro, held = sizes
    if dynamic:
        return max(1, whole(settings, held, tokens) // length)
    return whole(settings, micro) if settings.get(micro) is not None else None


def _even(micro: int, each: int) -> int:
    """Return the largest micro batch that divides a rank's sequences; verl's last one may be smaller."""
    return next((count for count in range(min(micro, each), 1, -1) if each % count == 0), 1)


def _check_parts(settings: Settings, facts: Facts) -> Facts:
    """Read no fact; raise BadInput for degrees and batches of other parts at which verl stops."""
    product = 1
    for key, default in zip(_ROLLOUT_KEYS, (2, 1, 1), strict=True):
        product *= whole(settings, key, default)
    apart = any(key.startswith(("rollout.nnodes", "rollout.n_gpus", f"{_ROLLOUT}nnodes")) for key in settings)
    if not apart and facts["gpus"] % product:
        raise BadInput(
            f"the rollout's {product} GPUs of an engine do not divide {facts['gpus']}",
            why="engines share the actor's GPUs (verl's rollout workers assert it)",
            remedy=f"another {_ROLLOUT_KEYS[0]}",
        )
    asked, mini = whole(settings, _BATCH[0], 1024), whole(settings, _BATCH[1], 256)
    if asked < mini:
        raise BadInput(f"{_BATCH[0]} {asked} < {_BATCH[1]} {mini}", why="ActorConfig.validate refuses it")
    return {}


def _read_length(settings: Settings, _: Facts) -> Facts:
    return {"seq_len": sum(whole(settings, key, 512) for key in _LENGTHS)}


def _read_batch(settings: Settings, facts: Facts) -> Facts:
    dp = facts["dp_replicate"] * facts["dp_shard"]
    total = whole(settings, _BATCH[1], 256) * whole(settings, _BATCH[2], 1)
    dynamic = truth(settings, _BATCH[5])
    held = facts["seq_len"] // facts["cp"]
    micro = _at_once(settings, (_BATCH[3], _BATCH[6]), dynamic=dynamic, tokens=16384, length=held)
    if micro is None and settings.get(_BATCH[4]) is not None:
        micro = max(1, whole(settings, _BATCH[4]) // dp)
    if micro is None:
        raise NotStated(f"{_BATCH[3]} is not stated", remedy=f"it, or {_BATCH[5]}=true, in the file")
    return {"micro_batch_size": _even(micro, total // dp), "global_batch_size": total}


def _write_batch(facts: Facts) -> Settings:
    """Return the micro batch; when verl counts tokens it does not read this key."""
    return {_BATCH[3]: facts["micro_batch_size"]}


def _read_sft_batch(settings: Settings, facts: Facts) -> Facts:
    length = whole(settings, "data.max_length", 1024)
    dynamic = truth(settings, "data.use_dynamic_bsz", default=True)
    keys = ("data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu")
    micro = _at_once(settings, keys, dynamic=dynamic, tokens=8192, length=max(1, length // facts["cp"])) or 4
    total = whole(settings, "data.train_batch_size", 256)
    each = total // (facts["dp_replicate"] * facts["dp_shard"])
    return {"micro_batch_size": _even(micro, each), "global_batch_size": total, "seq_len": length}


def _read_mesh(engine: str, settings: Settings, facts: Facts) -> Facts:
    gpus, sequence = facts["gpus"], whole(settings, f"{engine}ulysses_sequence_parallel_size", 1)
    shard = whole(settings, f"{engine}fsdp_size", -1, least=-1)
    shard = gpus if shard in {-1, 0} else min(shard, gpus)
    if gpus % sequence or gpus % shard or shard % sequence:
        raise BadInput(f"{gpus} GPUs do not divide by {engine}fsdp_size {shard} and sequence parallelism of {sequence}")
    return {
        "cp": sequence,
        "cp_method": "all_to_all" if sequence > 1 else None,
        "dp_replicate": gpus // shard,
        "dp_shard": shard // sequence,
        "reshard_after_forward": truth(settings, f"{engine}reshard_after_forward", default=True),
        "offload": "parameters" if truth(settings, f"{engine}offload_policy") else "none",
    }


def _write_mesh(engine: str, facts: Facts) -> Settings:
    size = facts["dp_shard"] * facts["cp"]
    return {
        f"{engine}ulysses_sequence_parallel_size": facts["cp"],
        f"{engine}fsdp_size": -1 if size == facts["gpus"] else size,
        f"{engine}reshard_after_forward": facts["reshard_after_forward"] is not False,
        f"{engine}offload_policy": facts["offload"] == "parameters",
    }


def _read_types(engine: str, settings: Settings, _: Facts) -> Facts:
    word = str(settings.get(f"{engine}model_dtype", "fp32"))
    stored = {"fp32": "float32", "bf16": "bfloat16"}.get(word, word)
    return types(stored, str(settings.get(f"{engine}dtype", "bfloat16")), "float32")


def _table(engine: str, model: str, batch: tuple[Entry, ...]) -> Table:
    """Return the table of a trainer; the keys of its engine begin with `engine`, those of its model with `model`."""
    names = ("ulysses_sequence_parallel_size", "fsdp_size", "reshard_after_forward", "offload_policy")
    checkpoints = f"{model}enable_gradient_checkpointing"
    return (
        constant(FLAT | {"tp": 1}),
        Entry(
            keys=tuple(f"{engine}{name}" for name in names),
            write=partial(_write_mesh, engine),
            read=partial(_read_mesh, engine),
        ),
        *batch,
        Entry(
            keys=(checkpoints,),
            write=lambda facts: {checkpoints: facts["recompute"] != "none"},
            read=lambda settings, _: {"recompute": "full" if truth(settings, checkpoints, default=True) else "none"},
        ),
        Entry(keys=(f"{engine}model_dtype", f"{engine}dtype"), read=partial(_read_types, engine)),
        constant({"optimizer": "adamw", "compile": False}),
        verl_adapters(_MODEL),
    )


def _describe(model: str, assumed: tuple[str, ...], settings: Settings) -> Described:
    return replace(named(settings, f"{model}path"), assumed=assumed)


_PARTS: Table = (
    Entry(keys=_LENGTHS, read=_read_length),
    Entry(keys=_BATCH, write=_write_batch, read=_read_batch),
    Entry(keys=_ROLLOUT_KEYS, read=_check_parts),
)
FSDP = YamlFormat(
    framework="verl",
    runtime="pytorch",
    marks=(frozenset({f"{_MODEL}path"}),),
    table=_table(_FSDP, _MODEL, _PARTS),
    describe=partial(_describe, _MODEL, (_REST,)),
    gpus=_gpus,
    limits={**DATA_PARALLEL, "tp": ((1, 1),), "cp": None},
    harmless=f"launched|{HARMLESS}",
    ready=lambda said: {OLDER.get(key, key): value for key, value in said.items()},
)
SFT = YamlFormat(
    framework="verl",
    runtime="pytorch",
    marks=(frozenset({"data.micro_batch_size_per_gpu", "model.path"}),),
    table=_table("engine.", "model.", (Entry(keys=_SFT_BATCH, read=_read_sft_batch),)),
    describe=partial(_describe, "model.", ()),
    gpus=_gpus,
    limits={**DATA_PARALLEL, "tp": ((1, 1),), "cp": None, "micro_batch_size": None},
    harmless=f"launched|{HARMLESS}",
)


def _of_megatron(document: Document, settings: Settings, where: str) -> Configuration:
    """Return the configuration of a Megatron-LM actor; the fields of its engine are Megatron-LM's arguments."""
    own = {
        key.removeprefix(start): value
        for start in (_MEGATRON, _TRANSFORMER)
        for key, value in settings.items()
        if key.startswith(start) and "." not in key.removeprefix(start)
    }
    said, paths = bridge.flags_of(own)
    at = {path: f"{_TRANSFORMER if f'{_TRANSFORMER}{path}' in settings else _MEGATRON}{path}" for path in own}
    described = _describe(_MODEL, (_REST,), settings)
    flags, model = megatron.over_model(MEGATRON, said, paths, described.model)

    def edit(changes: Settings) -> str:
        fields = bridge.fields_of({flag: v for flag, v in changes.items() if flag not in IMPLIED}, paths, flat=True)
        if strange := fields.keys() - FIELDS:
            raise BadInput(f"verl has no key for {', '.join(sorted(strange))}")
        return document.edited({at.get(field, _place(field)): value for field, value in fields.items()})

    harmless = re.compile(HARMLESS)
    read_here = {*at.values(), *_BATCH, *_LENGTHS, *_ROLLOUT_KEYS, "launched", f"{_MODEL}enable_gradient_checkpointing"}
    strange = [flag for flag in said if flag not in megatron.UNDERSTOOD and not harmless.fullmatch(at[paths[flag]])]
    found = megatron.configured(
        document,
        flags,
        where,
        edit,
        framework="verl",
        model=model,
        gpus=_gpus(settings),
        no_cost=described.no_cost,
        unknown=(*(at[paths[flag]] for flag in strange), *not_understood(settings, frozenset(read_here), HARMLESS)),
        limits={"micro_batch_size": None},
    )
    parts = tuple(_beside(entry, settings) for entry in _PARTS)
    if described.model is None:
        found = replace(found, unknown_model=described.unknown)
    table = tuple(entry for entry in found.table if "--global-batch-size" not in entry.keys)
    return replace(found, table=(*table[:-1], *parts, table[-1]), assumed=(*described.assumed, *found.assumed))


def _beside(entry: Entry, settings: Settings) -> Entry:
    """Return an entry that reads keys of verl next to Megatron-LM's flags."""
    return replace(entry, read=lambda _, facts: entry.read(settings, facts))


def _place(field: str) -> str:
    return f"{_TRANSFORMER if field.startswith('recompute') else _MEGATRON}{field}"
