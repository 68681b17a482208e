"""Convert between plans and DeepSpeed's JSON.

Keys and defaults: `deepspeed/runtime/constants.py`, `runtime/config.py`, `runtime/zero/config.py`,
`runtime/tensor_parallel/config.py`, `module_inject/auto_ep_config.py` of 0.19.8.
"""

from __future__ import annotations

from planner.export.mapping import Entry, Facts, NotModelled, Settings, Table, one_of, truth, whole
from topology.errors import BadInput

COMMUNICATION = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_CONTEXT = ("sequence_parallel_size", "data_parallel_size")
_EXPERTS = ("expert_parallel.enabled", "expert_parallel.autoep_size")
_STAGE = "zero_optimization.stage"
_HPZ = "zero_optimization.zero_hpz_partition_size"
_OPTIMIZER = "optimizer.type"
_OFFLOADS = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
_ON_HOST = {"device": "cpu", "pin_memory": True}


def write_batch(facts: Facts) -> Settings:
    dp = facts["dp_replicate"] * facts["dp_shard"]
    steps = facts["global_batch_size"] // (dp * facts["micro_batch_size"])
    settings = {"train_micro_batch_size_per_gpu": facts["micro_batch_size"], "gradient_accumulation_steps": steps}
    # DeepSpeedConfig checks the three against all ranks before AutoTP makes its groups, and would refuse the right
    # total. With a pipeline it takes the number of ranks from the pipeline's grid.
    return (
        settings
        if facts["tp"] > 1 and facts["pp"] == 1
        else {"train_batch_size": facts["global_batch_size"], **settings}
    )


def read_batch(settings: Settings, facts: Facts) -> Facts:
    """As DeepSpeedConfig completes the three sizes (`_set_batch_related_parameters`): "auto" counts as absent."""
    stated = {key: None if settings.get(key) == "auto" else settings.get(key) for key in _BATCH}
    dp = facts["dp_replicate"] * facts["dp_shard"]
    total, micro, steps = (whole(stated, key, 0) if stated[key] is not None else 0 for key in _BATCH)
    if not total and not micro:  # Transformers fills them in from the program's arguments
        return {"steps": steps} if steps else {}
    if total and not micro:
        micro = total // dp // (steps or 1)
    if not total:
        total = micro * (steps or 1) * dp
    if not micro or total % (micro * dp):
        raise BadInput(f"train_batch_size {total} is not a multiple of micro batch {micro} x data parallel {dp}")
    if steps and steps != total // (micro * dp):
        raise BadInput(
            f"train_batch_size {total} != {micro} a GPU x {steps} accumulated x {dp} data-parallel ranks",
            why="DeepSpeed checks the three",
        )
    return {"global_batch_size": total, "micro_batch_size": micro}


def _write_context(facts: Facts) -> Settings:
    if facts["cp"] == 1:
        return {}
    # Without the data-parallel size there is no mesh, and every rank reads different sequences.
    return {"sequence_parallel_size": facts["cp"], "data_parallel_size": facts["dp_replicate"] * facts["dp_shard"]}


def _read_context(settings: Settings, _: Facts) -> Facts:
    cp = whole(settings, "sequence_parallel_size", 1)
    if cp > 1 and "data_parallel_size" not in settings:
        return {"cp": 1, "cp_method": None}  # without it DeepSpeed makes no mesh and ignores the degree
    return {"cp": cp, "cp_method": "all_to_all" if cp > 1 else None}


def _write_experts(facts: Facts) -> Settings:
    return dict(zip(_EXPERTS, (True, facts["ep"]), strict=True)) if facts["ep"] > 1 else {}


def _read_experts(settings: Settings, _: Facts) -> Facts:
    return {"ep": whole(settings, _EXPERTS[1], 1) if truth(settings, _EXPERTS[0]) else 1}


def _read_stage(settings: Settings, facts: Facts) -> Facts:
    others = facts["tp"] * facts["cp"] * facts["pp"]
    if facts["gpus"] % others:
        raise BadInput(
            f"{facts['gpus']} GPUs are not a multiple of the other degrees, {others}",
            remedy="say with --gpus how many the configuration is for",
        )
    dp = facts["gpus"] // others
    section, _, _ = _STAGE.partition(".")
    said = settings.get(section, False)
    if not isinstance(said, (bool, dict)):
        raise BadInput(f"{section} is {str(said)[:40]!r}", why="it must be a section with a stage")
    stage = whole(settings, _STAGE, int(said is True), least=0)  # once a switch of stage 1, which DeepSpeed still reads
    # hpZ (ZeRO++) keeps a second copy of the parameters within groups of this size, which is not predicted.
    inner = whole(settings, _HPZ, 1)
    return {"zero_stage": stage, "dp_replicate": dp, "dp_shard": 1, "hpz": inner if stage == 3 and inner > 1 else None}


def _write_stage(facts: Facts) -> Settings:
    settings: Settings = {_STAGE: facts["zero_stage"] or 0}
    if facts["zero_stage"]:
        settings |= {"zero_optimization.overlap_comm": True, "zero_optimization.contiguous_gradients": True}
    return settings | ({_HPZ: facts["hpz"]} if facts["zero_stage"] == 3 and facts.get("hpz") else {})


def _write_offload(facts: Facts) -> Settings:
    count = {"none": 0, "optimizer": 1, "parameters": 2}[facts["offload"]]
    return {f"{key}.{name}": value for key in _OFFLOADS[:count] for name, value in _ON_HOST.items()}


def _read_offload(settings: Settings, facts: Facts) -> Facts:
    away = {key: _device(settings, key) == "cpu" for key in _OFFLOADS}
    # "Valid only with stage 3" (runtime/zero/config.py: offload_param); without ZeRO no optimizer of it runs.
    least = dict(zip(_OFFLOADS, (1, 3), strict=True))
    works = [
        name
        for name, key in zip(("optimizer", "parameters"), _OFFLOADS, strict=True)
        if away[key] and facts["zero_stage"] >= least[key]
    ]
    idle = [key for key in _OFFLOADS if away[key] and facts["zero_stage"] < least[key]]
    unused = tuple(f"{key} changes nothing below ZeRO stage {least[key]}" for key in idle)
    return {"offload": works[-1] if works else "none", "unused": unused}


def _device(settings: Settings, key: str) -> str:
    """Return the device that a kind of state is offloaded to. Raises BadInput for a device that is unknown or not
    modelled.
    """
    device = str(settings.get(f"{key}.device") or "none").lower()
    if device == "nvme":
        raise NotModelled(f"{key}.device nvme is not modelled", remedy="cpu or none in its place")
    if device not in {"none", "cpu"}:
        raise BadInput(f"{key}.device is {device[:40]!r}", why="known: none, cpu and nvme")
    return device


def _write_types(facts: Facts) -> Settings:
    section = {"bfloat16": "bf16", "float16": "fp16"}.get(facts["compute_dtype"])
    settings: Settings = {f"{section}.enabled": True} if section else {}
    if facts["reduce_dtype"] in COMMUNICATION:
        settings["communication_data_type"] = COMMUNICATION[facts["reduce_dtype"]]
        if facts["cp"] > 1:
            settings["seq_parallel_communication_data_type"] = COMMUNICATION[facts["reduce_dtype"]]
    return settings


def _read_types(settings: Settings, _: Facts) -> Facts:
    on = [name for name in ("bf16", "fp16") if truth(_without_auto(settings), f"{name}.enabled")]
    if len(on) > 1:
        raise BadInput("bf16 and fp16 are both enabled", why="DeepSpeed trains in one of them")
    compute = {"bf16": "bfloat16", "fp16": "float16"}[on[0]] if on else "float32"
    # By default gradients are communicated in the type of the model.
    stated = settings.get("communication_data_type")
    reduce = one_of(settings, "communication_data_type", COMMUNICATION, "fp32") if stated is not None else compute
    return {"compute_dtype": compute, "param_dtype": compute, "reduce_dtype": reduce}


def _without_auto(settings: Settings) -> Settings:
    return {key: value for key, value in settings.items() if value != "auto"}


_TP = ("tensor_parallel.autotp_size", "tensor_parallel.tp_overlap_comm")


def _read_optimizer(settings: Settings, _: Facts) -> Facts:
    """Return the optimizer that the file names, if it names one; `adam` decouples its weight decay."""
    word = str(settings.get(_OPTIMIZER) or "auto").lower()
    return {} if word == "auto" else {"optimizer": "adamw" if word == "adam" else word}


TABLE: Table = (
    # JSON has no keys for pipelines; they are in the program's PipelineModule.
    Entry(
        read=lambda _, facts: {
            "pp": facts.get("pp", 1),
            "virtual_stages": 1,
            "schedule": "1F1B" if facts.get("pp", 1) > 1 else None,
        }
    ),
    Entry(
        keys=_TP,
        write=lambda facts: {_TP[0]: facts["tp"], _TP[1]: facts["tp_overlap"] != "none"} if facts["tp"] > 1 else {},
        read=lambda settings, facts: {
            "tp": max(1, whole(settings, _TP[0], facts.get("tp", 1), least=0)),
            "sequence_parallel": False,
            "tp_overlap": "none",
        },
    ),
    Entry(keys=_CONTEXT, write=_write_context, read=_read_context),
    Entry(keys=_EXPERTS, write=_write_experts, read=_read_experts),
    Entry(
        keys=(
            "zero_optimization",
            _STAGE,
            _HPZ,
            "zero_optimization.overlap_comm",
            "zero_optimization.contiguous_gradients",
        ),
        write=_write_stage,
        read=_read_stage,
    ),
    Entry(
        keys=tuple(f"{key}.{name}" for key in _OFFLOADS for name in _ON_HOST), write=_write_offload, read=_read_offload
    ),
    Entry(keys=_BATCH, write=write_batch, read=read_batch),
    Entry(
        keys=("bf16.enabled", "fp16.enabled", "communication_data_type", "seq_parallel_communication_data_type"),
        write=_write_types,
        read=_read_types,
    ),
    Entry(keys=(_OPTIMIZER,), read=_read_optimizer),
)
