"""NeMo AutoModel's YAML.

Keys: `nemo_automodel/recipes/llm/train_ft.py` and `examples/` of 2025: FSDP2 over the ranks that the other degrees
leave.
"""

from __future__ import annotations

import re

from planner.configs.formats.adapters import AUTOMODEL
from planner.configs.formats.yaml_format import Described, YamlFormat, compiled, degree, in_all, length, named, types
from planner.export.mapping import Entry, Facts, NotModelled, Settings, Table, truth, whole
from simulator.legality.muon import WHY_NOT
from simulator.pipeline.schedules.registry import SCHEDULES
from topology.errors import BadInput

_D = "distributed."
_RECOMPUTE = ("parallelizer.activation_checkpointing", f"{_D}activation_checkpointing")
_SCHEDULES = ("autopipeline.pp_schedule", f"{_D}pipeline.pp_schedule")
_MICRO, _EACH = (
    tuple(f"{part}.{name}" for part in ("autopipeline", f"{_D}pipeline"))
    for name in ("pp_microbatch_size", "layers_per_stage")
)
_TYPE = "model.torch_dtype"
_BACKEND = "model.backend."  # components/models/common/utils.py: BackendConfig
_DISPATCHER, _BALANCED = f"{_BACKEND}dispatcher", f"{_BACKEND}fake_balanced_gate"
_RESHARD, _OFFLOAD = f"{_D}reshard_after_forward", f"{_D}offload_policy._target_"


def _read_shard(settings: Settings, facts: Facts) -> Facts:
    others = facts["tp"] * facts["cp"] * facts["pp"] * facts["dp_replicate"]
    if facts["gpus"] % others:
        raise BadInput(f"{facts['gpus']} GPUs are not a multiple of the other degrees, {others}")
    if str(settings.get(f"{_D}strategy")).lower() == "ddp":
        return {"dp_replicate": facts["gpus"], "dp_shard": 1, "zero_stage": None, "sequence_parallel": False}
    parallel = facts["tp"] > 1 and truth(settings, f"{_D}sequence_parallel")
    return {"dp_shard": facts["gpus"] // others, "zero_stage": None, "sequence_parallel": parallel}


def _read_schedule(settings: Settings, facts: Facts) -> Facts:
    if facts["pp"] == 1:
        return {"schedule": None, "virtual_stages": 1}
    known = {name.lower(): kind for name, kind in SCHEDULES.items()}
    word = str(next((settings[key] for key in _SCHEDULES if settings.get(key)), "1f1b")).lower()
    if word not in known:
        raise BadInput(f"{_SCHEDULES[0]} is {word[:40]!r}", why=f"known: {', '.join(SCHEDULES)}")
    return {"schedule": known[word].name, "virtual_stages": known[word].least_stages}


def _read_pipelined(settings: Settings, facts: Facts) -> Facts:
    """Return the micro batches and stages of a pipeline, which each local batch passes separately."""
    if facts["pp"] == 1:
        return {}
    local, together = facts["micro_batch_size"], facts["dp_replicate"] * facts["dp_shard"]
    if facts["global_batch_size"] > local * together:
        raise NotModelled(
            "pipelines that are filled again for each local batch are not modelled",
            remedy="step_scheduler.local_batch_size of the whole step",
        )
    found: Facts = {"micro_batch_size": next((whole(settings, key) for key in _MICRO if settings.get(key)), 1)}
    each = next((whole(settings, key) for key in _EACH if settings.get(key)), None)
    if each is not None and facts.get("layers"):
        found["virtual_stages"] = max(1, facts["layers"] // each // facts["pp"])
    return found


def _read_recompute(settings: Settings, _: Facts) -> Facts:
    return {"recompute": "full" if any(truth(settings, key) for key in _RECOMPUTE) else "none"}


def _read_types(settings: Settings, facts: Facts) -> Facts:
    word = str(settings.get(_TYPE) or "bfloat16").rpartition(".")[2]
    stored = {"bf16": "bfloat16", "fp32": "float32"}.get(word, word)
    # FSDP2 has a policy of its own; DDP reduces gradients as they are stored.
    return types(stored, "bfloat16", "float32" if facts["dp_shard"] * facts["cp"] > 1 else stored)


def _read_reshard(settings: Settings, facts: Facts) -> Facts:
    if facts["dp_shard"] * facts["cp"] == 1 or settings.get(_RESHARD) is None:
        return {"reshard_after_forward": None}
    return {"reshard_after_forward": truth(settings, _RESHARD)}


def _read_offload(settings: Settings, _: Facts) -> Facts:
    away = str(settings.get(_OFFLOAD) or "").endswith("CPUOffloadPolicy")
    return {"offload": "parameters" if away else "none"}


def _read_backend(settings: Settings, facts: Facts) -> Facts:
    """Return how tokens reach experts, and that these have equal loads where the file replaces the router."""
    word = settings.get(_DISPATCHER)
    found: Facts = {"moe_dispatcher": word} if facts.get("moe") and word in {"deepep", "hybridep"} else {}
    return found | ({"routing": "balanced"} if facts.get("moe") and truth(settings, _BALANCED) else {})


def _without_unused(settings: Settings) -> Settings:
    """Return the settings without parts of the backend that are off."""
    return {key: value for key, value in settings.items() if value not in (None, False) or not _NOT_READ.fullmatch(key)}


def _read_optimizer(settings: Settings, _: Facts) -> Facts:
    name = str(settings.get("optimizer._target_", "torch.optim.AdamW")).rpartition(".")[2].lower()
    if name == "muon":
        raise NotModelled(WHY_NOT["nemo-automodel"], remedy="optimizer._target_: torch.optim.AdamW")
    return {"optimizer": "adamw" if name in {"adam", "adamw", "fusedadam"} else name}


TABLE: Table = (
    degree(f"{_D}tp_size", "tp"),
    degree(f"{_D}cp_size", "cp"),
    degree(f"{_D}pp_size", "pp"),
    degree(f"{_D}ep_size", "ep"),
    degree(f"{_D}dp_replicate_size", "dp_replicate"),
    Entry(keys=(f"{_D}dp_size", f"{_D}strategy", f"{_D}sequence_parallel"), read=_read_shard),
    Entry(keys=_SCHEDULES, read=_read_schedule),
    in_all("step_scheduler.local_batch_size", "step_scheduler.global_batch_size"),
    Entry(keys=(*_MICRO, *_EACH), read=_read_pipelined),
    length("packed_sequence.packed_sequence_size", "dataset.seq_len", "dataset.seq_length"),
    Entry(keys=_RECOMPUTE, read=_read_recompute),
    Entry(keys=(_TYPE,), read=_read_types),
    Entry(keys=(_RESHARD,), read=_read_reshard),
    Entry(keys=(_OFFLOAD,), read=_read_offload),
    Entry(keys=("optimizer._target_",), read=_read_optimizer),
    Entry(keys=(_DISPATCHER, _BALANCED), read=_read_backend),
    compiled("compile.enabled"),
    AUTOMODEL,
)
# Parts of the backend that change a step and are not read.
_NOT_READ = re.compile(r"model\.backend\.(te_fp8|compile_attn|cuda_graph|mok)(\..*)?")


def _describe(settings: Settings) -> Described:
    return named(
        settings, "model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path", "model.config"
    )


FORMAT = YamlFormat(
    framework="nemo-automodel",
    runtime="nemo-automodel",
    rules="any",
    marks=(frozenset({"step_scheduler.local_batch_size", "step_scheduler.global_batch_size"}),),
    table=TABLE,
    describe=_describe,
    limits={"pp": None, "recompute": None},
    nodes="benchmark.num_nodes",
    ready=_without_unused,
    harmless=(
        r"(recipe|seed|benchmark|dist_env|checkpoint|loss_fn|dataset|dataloader|validation_\w+|optimizer|lr_scheduler|wandb"
        r"|rng|packed_sequence|autopipeline|parallelizer|step_scheduler|slurm|clip_grad_norm|tokenizer|mlflow|ci|peft|compile)(\..*)?"
        rf"|(?!{_NOT_READ.pattern}$)model(\..*)?|distributed\.pipeline\..*|distributed\.(_target_|use_hf_tp_plan|defer_\w+)"
    ),
)
