"""nanotron's YAML.

Keys and defaults: `src/nanotron/config/` of early 2025 (`ParallelismArgs`, `TokensArgs`, `LlamaConfig`).
"""

from __future__ import annotations

from planner.configs.formats.yaml_format import Described, YamlFormat, accumulated, constant, degree, length, types
from planner.export.mapping import Entry, Facts, Settings, Table, either, one_of, truth, whole
from simulator.config.hf_config import model_from_config
from topology.errors import BadInput, BadModel

_P = "parallelism."
_EXPERTS = f"{_P}expert_parallel_size"
_MODEL = "model.model_config."
SCHEDULES = {"1F1B": "1f1b", "GPipe": "afab"}
DTYPES = {"bfloat16": "bfloat16", "float32": "float32", "float16": "float16"}
# Sizes of LlamaConfig, which are Transformers'.
SHAPES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip


def _gpus(settings: Settings) -> int | None:
    product = 1
    for name in ("dp", "tp", "pp", "context_parallel_size", "expert_parallel_size"):
        size = settings.get(f"{_P}{name}", 1)
        if type(size) is not int or size < 1:
            return None
        product *= size
    return product


def _read_schedule(settings: Settings, facts: Facts) -> Facts:
    if facts["pp"] == 1:
        return {"virtual_stages": 1, "schedule": None}
    lowered = {f"{_P}pp_engine": str(settings.get(f"{_P}pp_engine", "1f1b")).lower()}
    return {"virtual_stages": 1, "schedule": one_of(lowered, f"{_P}pp_engine", SCHEDULES, "1f1b")}


def _read_sequence(settings: Settings, facts: Facts) -> Facts:
    mode = str(settings.get(f"{_P}tp_mode", "ALL_REDUCE")).upper()
    return {"sequence_parallel": facts["tp"] > 1 and mode == "REDUCE_SCATTER"}


def _read_types(settings: Settings, _: Facts) -> Facts:
    dtype = one_of(settings, "model.dtype", DTYPES, "bfloat16")
    whole_sums = truth(settings, "optimizer.accumulate_grad_in_fp32", default=True)
    return types(dtype, dtype, "float32" if whole_sums else dtype)


TABLE: Table = (
    degree(f"{_P}tp", "tp"),
    degree(f"{_P}pp", "pp"),
    degree(f"{_P}context_parallel_size", "cp"),
    constant({"ep": 1}, _EXPERTS),
    Entry(
        keys=(f"{_P}dp",),
        write=lambda facts: {f"{_P}dp": facts["dp_replicate"] * facts["dp_shard"]},
        read=lambda settings, _: {
            "dp_replicate": whole(settings, f"{_P}dp", 1) * whole(settings, _EXPERTS, 1),
            "dp_shard": 1,
        },
    ),
    Entry(
        keys=(f"{_P}pp_engine",),
        write=lambda facts: {f"{_P}pp_engine": SCHEDULES[facts["schedule"]]} if facts["schedule"] in SCHEDULES else {},
        read=_read_schedule,
    ),
    Entry(
        keys=(f"{_P}tp_mode",),
        write=lambda facts: (
            {f"{_P}tp_mode": "REDUCE_SCATTER" if facts["sequence_parallel"] else "ALL_REDUCE"}
            if facts["tp"] > 1
            else {}
        ),
        read=_read_sequence,
    ),
    Entry(
        keys=("optimizer.zero_stage",),
        write=lambda facts: {"optimizer.zero_stage": facts["zero_stage"] or 0},
        read=lambda settings, _: {"zero_stage": whole(settings, "optimizer.zero_stage", 0, least=0)},
    ),
    accumulated("tokens.micro_batch_size", "tokens.batch_accumulation_per_replica"),
    length("tokens.sequence_length"),
    either(f"{_P}recompute_layer", "recompute", "full", "none"),
    Entry(keys=("model.dtype", "optimizer.accumulate_grad_in_fp32"), read=_read_types),
    constant({"optimizer": "adamw", "compile": False}, "optimizer.optimizer_factory.name"),
)


def _describe(settings: Settings) -> Described:
    if settings.get(_EXPERTS) not in {None, 1}:
        return Described(no_cost="nanotron's expert parallelism is an axis of ranks of its own, which is not modelled")
    own = {key.removeprefix(_MODEL): value for key, value in settings.items() if key.startswith(_MODEL)}
    if any("moe" in key and value for key, value in own.items()) or own.get("sliding_window_size"):
        return Described(unknown="layers of experts or with a window in nanotron's own words")
    config = {key: own[key] for key in SHAPES if own.get(key) is not None}
    try:
        model = model_from_config({"model_type": "llama", **config}, name="nanotron")
    except (BadModel, BadInput) as error:
        return Described(unknown=error.what)
    return Described(model=model)


FORMAT = YamlFormat(
    framework="nanotron",
    runtime="nanotron",
    marks=(frozenset({"parallelism.dp", "tokens.micro_batch_size"}),),
    table=TABLE,
    describe=_describe,
    gpus=_gpus,
    limits={"tp": None, "cp": None, "ep": None},
    harmless=(
        r"(checkpoints|data_stages|data|general|lighteval|logging|profiler|tokenizer|s3_upload|metrics_logging)(\..*)?|model\..*"
        r"|optimizer\..*|tokens\.(limit_\w+|train_steps|val_check_interval)"
        r"|parallelism\.(tp_linear_async_communication|tp_recompute_allgather)"
    ),
)
