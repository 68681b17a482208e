"""MaxText's configuration on GPUs: its YAML, and `key=value` after its program.

Keys and defaults: `src/maxtext/configs/base.yml` of MaxText at e591f30; the division of a batch is in
`logical_axis_rules` there, what a policy keeps in `layers/decoders.py`. It runs on XLA, for which there is no runtime
description.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from planner.configs.formats.command_line import Overrides
from planner.configs.formats.configuration import CheckFlags, Configuration
from planner.configs.formats.yaml_format import FLAT, Described, YamlFormat, constant, length, types
from planner.export.mapping import Entry, Facts, NotModelled, NotStated, Settings, Table, one_of, truth, whole
from planner.export.named_models import model_said, model_spelt
from topology.errors import BadInput

PROGRAMS = ("maxtext.trainers.pre_train", "MaxText.train", "MaxText/train.py")  # the last two before 2026
NEAREST = "MaxText is predicted as torchtitan compiled, the nearest runtime that is described: XLA's kernels are not"
# Axes of its mesh, within a slice (ici) and between slices (dcn), that correspond to a plan's degree.
AXES = {
    "data": "dp_replicate",
    "fsdp": "dp_shard",
    "fsdp_transpose": "dp_shard",
    "tensor": "tp",
    "tensor_sequence": "tp",
    "context": "cp",
    "sequence": "cp",
    "expert": "ep",
}
OTHERS = ("pipeline", "diloco", "autoregressive", "context_autoregressive", "tensor_transpose")
LEVELS = ("ici", "dcn")
FILLED = {"ici_fsdp_parallelism": -1, "dcn_data_parallelism": -1}  # the degree that takes all remaining GPUs
REMAT = {"none": "none", "full": "full", "selective-op": "minimal_with_context"}
KEEPS_PRODUCTS = ("minimal", "minimal_flash", "minimal_with_context")
_REMAT, _MICRO, _STEPS = "remat_policy", "per_device_batch_size", "gradient_accumulation_steps"
_TYPES = ("dtype", "weight_dtype", "grad_dtype", "quantization")
_HOST = ("optimizer_memory_host_offload", "parameter_memory_host_offload")
FLOAT8 = ("fp8", "fp8_full", "te_fp8_delayedscaling", "te_fp8_currentscaling", "te_mxfp8", "nanoo_fp8", "fp8_gpu")


def _key(level: str, axis: str) -> str:
    return f"{level}_{axis}_parallelism"


_KEYS = tuple(_key(level, axis) for level in LEVELS for axis in (*AXES, *OTHERS))


def _read_mesh(settings: Settings, facts: Facts) -> Facts:
    used = [
        _key(level, axis) for level in LEVELS for axis in OTHERS if whole(settings, _key(level, axis), 1, least=-1) > 1
    ]
    if used:
        raise NotModelled(f"{used[0]} has no place in a plan", remedy=f"{used[0]} of 1")
    gpus = facts["gpus"]
    sizes = {key: whole(settings, key, FILLED.get(key, 1), least=-1) for key in _KEYS}
    within = {key: size for key, size in sizes.items() if key.startswith("ici")}
    between = {key: size for key, size in sizes.items() if key.startswith("dcn")}
    stated = math.prod(size for size in within.values() if size > 0)
    slices = math.prod(size for size in between.values() if size > 0)
    node = min(facts.get("gpus_per_node") or gpus, gpus)
    each = gpus // slices if -1 not in between.values() else node if -1 in within.values() else stated
    if not each or gpus % each:
        raise BadInput(f"{gpus} GPUs are no {slices} slices of {each or stated}", remedy="--gpus")
    for group, total, name in ((within, each, "ici"), (between, gpus // each, "dcn")):
        rest = math.prod(size for size in group.values() if size > 0)
        for key in (key for key, size in group.items() if size == -1):
            group[key] = max(1, total // rest)
        if math.prod(group.values()) != total:
            raise BadInput(f"the {name} degrees make {math.prod(group.values())} of {total} GPUs", remedy="--gpus")
    found = dict.fromkeys(AXES.values(), 1)
    for axis, fact in AXES.items():
        found[fact] *= within[_key("ici", axis)] * between[_key("dcn", axis)]
    # An axis of experts also divides the batch, and all other parameters are replicated on its ranks.
    return found | {"dp_replicate": found["dp_replicate"] * found["ep"], "reshard_after_forward": True}


def _write_mesh(facts: Facts) -> Settings:
    """Return the degrees within one slice; the remaining ranks belong to FSDP or to replicas."""
    values = {"fsdp": facts["dp_shard"], "tensor": facts["tp"], "context": facts["cp"], "expert": facts["ep"]}
    return {_key("ici", axis): size for axis, size in values.items()} | {
        _key("ici", "data"): 1,
        _key("dcn", "data"): facts["dp_replicate"] // facts["ep"],
    }


def _read_batch(settings: Settings, facts: Facts) -> Facts:
    try:
        each = float(str(settings.get(_MICRO, 12.0)))
    except ValueError:
        raise BadInput(f"{_MICRO} is {str(settings[_MICRO])[:40]!r}", why="it must be a number") from None
    dp = facts["dp_replicate"] * facts["dp_shard"]
    micro = each * facts["gpus"] / dp
    if micro < 1 or micro != int(micro):
        raise NotModelled(
            f"{_MICRO} {each:g} is {micro:g} sequences of a group of ranks", remedy=f"a whole number in {_MICRO}"
        )
    steps = whole(settings, _STEPS, 1)
    return {"micro_batch_size": int(micro), "global_batch_size": int(micro) * steps * dp}


def _write_batch(facts: Facts) -> Settings:
    dp = facts["dp_replicate"] * facts["dp_shard"]
    micro, steps = facts["micro_batch_size"] * dp, facts["global_batch_size"] // (dp * facts["micro_batch_size"])
    return {_MICRO: micro / facts["gpus"] if micro % facts["gpus"] else micro // facts["gpus"], _STEPS: steps}


def _read_recompute(settings: Settings, _: Facts) -> Facts:
    word = str(settings.get(_REMAT, "full"))
    if word in KEEPS_PRODUCTS:
        return {"recompute": "selective-op"}
    if word not in REMAT.values():
        raise NotModelled(f"{_REMAT} {word[:40]!r} is not modelled", remedy="full, minimal_with_context or none")
    return {"recompute": one_of({_REMAT: word}, _REMAT, REMAT, "full")}


def _read_types(settings: Settings, _: Facts) -> Facts:
    compute = str(settings.get("dtype", "bfloat16"))
    word = str(settings.get("quantization") or "")
    if word and word not in FLOAT8:
        raise NotModelled(f"quantization {word[:40]!r} is not modelled", remedy=f"none, or {', '.join(FLOAT8)}")
    stored = str(settings.get("weight_dtype", "float32"))
    return types(stored, "float8" if word else compute, str(settings.get("grad_dtype", "float32")))


def _read_host(settings: Settings, _: Facts) -> Facts:
    used = [key for key in _HOST if truth(settings, key)]
    if used:
        raise NotModelled(f"{used[0]} is not modelled", remedy=f"{used[0]} off")
    return {"offload": "none"}


def _read_optimizer(settings: Settings, _: Facts) -> Facts:
    word = str(settings.get("opt_type", "adamw"))
    return {"optimizer": "adamw" if word in {"adamw", "adam_pax"} else word}


TABLE: Table = (
    constant({name: value for name, value in FLAT.items() if name != "ep"}),
    Entry(keys=_KEYS, write=_write_mesh, read=_read_mesh),
    Entry(keys=(_MICRO, _STEPS), write=_write_batch, read=_read_batch),
    length("max_target_length"),
    Entry(
        keys=(_REMAT,),
        write=lambda facts: {_REMAT: REMAT[facts["recompute"]]} if facts["recompute"] in REMAT else {},
        read=_read_recompute,
    ),
    Entry(keys=_TYPES, read=_read_types),
    Entry(keys=_HOST, read=_read_host),
    Entry(keys=("opt_type",), read=_read_optimizer),
    constant({"compile": True}),
)


def _describe(settings: Settings) -> Described:
    name = str(settings.get("model_name") or "")
    own = [key for key in settings if key.startswith("base_") and key not in {"base_config", "base_output_directory"}]
    model = model_spelt(name) or model_said(name)[0]
    if model is None or own:
        why = f"{own[0]} of its own" if own else f"MaxText's {name[:60]} is none whose shapes are known" if name else ""
        return Described(unknown=why, assumed=(NEAREST,))
    return Described(model=model, assumed=(NEAREST,))


def _gpus(settings: Settings) -> int | None:
    """Return the number of GPUs that its degrees give, if none is open."""
    sizes = [settings.get(key, FILLED.get(key, 1)) for key in _KEYS]
    return math.prod(sizes) if all(type(size) is int and size > 0 for size in sizes) else None


FORMAT = YamlFormat(
    framework="maxtext",
    runtime="torchtitan",
    rules="any",
    marks=(
        frozenset({"base_config", "model_name"}),
        frozenset({"model_name", "per_device_batch_size"}),
        frozenset({"ici_fsdp_parallelism"}),
    ),
    table=TABLE,
    describe=_describe,
    gpus=_gpus,
    limits={"pp": ((1, 1),)},
    harmless=(
        r"(base_\w+|model_name|run_name|hardware|steps|attention|use_iota_embed|dataset_\w+|reuse_example_batch|\w*profiler\w*"
        r"|(enable|async|single)_\w*checkpoint\w*|checkpoint_\w+|max_segments_per_seq|tokenizer_\w+|scan_layers|megablox|sparse_matmul"
        r"|capacity_factor|hf_\w+|log_\w+|learning_rate\w*|enable_goodput\w*|monitor_goodput|save_config_to_gcs"
        r"|skip_first_n_steps_for_profiler|profile_\w+|logits_dot_in_fp32|packing|use_\w*logging|override_model_config|max_\w+"
        r"|eval_\w+|enable_\w+|gcs_metrics|metrics_file|adam_\w+|warmup_\w+|trainable|\w*sink_level|logits_via_embedding"
        r"|load_\w+|sharding_tolerance|normalize_embedding_logits|init_weights_seed|data_\w+|decoder_block|use_qk_norm|rope_\w+)"
    ),
)


def read_command(text: str, where: str, flags: CheckFlags) -> Configuration:
    """Return the configuration of a command whose file is named after its model, such as `llama2_7b.yml`."""
    document = Overrides(text, where, dict(flags.variables))
    settings = {key: value for key, value in document.settings.items() if not key.startswith("--")}
    file = next((match[1] for word in document.words if (match := re.search(r"(\w[\w.]{0,200})\.yml", word.text))), "")
    named = {} if "model_name" in settings or file in {"", "base"} else {"model_name": file.replace("_", "-")}
    found = FORMAT.configuration(document, {**named, **settings})
    other = (f"{file}.yml",) if file else ()

    def read_other(said: Settings, facts: Facts) -> Facts:
        if other and not {_MICRO, "max_target_length"} <= said.keys():
            raise NotStated(
                f"the batch is in {file}.yml, which is not read", remedy="check it, with these values in it"
            )
        return facts

    found = replace(found, table=(Entry(read=read_other), *found.table))
    return replace(found, unknown=(*found.unknown, *(f"what {one} says" for one in other)), elsewhere=other)
