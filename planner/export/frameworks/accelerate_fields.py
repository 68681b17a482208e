"""Convert between plans and accelerate's YAML.

Keys: `commands/config/config_args.py` (ClusterConfig), `commands/launch.py` and `parallelism_config.py` of 1.15.0. Its
mesh axes are dp_replicate, dp_shard, cp, sp, tp, the last fastest.
"""

from __future__ import annotations

from planner.export.mapping import Entry, Facts, Settings, Table, one_of, truth, whole
from topology.errors import BadInput

ROTATE = {"ring": "alltoall", "all_gather": "allgather"}
_MESH = "parallelism_config.parallelism_config_{}_size"
_SHARDS = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1}
_STRATEGY = "fsdp_config.fsdp_sharding_strategy"
_RESHARD = "fsdp_config.fsdp_reshard_after_forward"
_VERSION = "fsdp_config.fsdp_version"
_RECOMPUTE = "fsdp_config.fsdp_activation_checkpointing"
_ROTATE = "parallelism_config.parallelism_config_cp_comm_strategy"
ULYSSES = "parallelism_config.parallelism_config_sp_size"  # DeepSpeed's, the only backend
_ZERO = "deepspeed_config.zero_stage"
_OFFLOAD = "fsdp_config.fsdp_offload_params"
# FSDP1's strategies, by name or number (torch.distributed.fsdp.ShardingStrategy), with what keeps parameters gathered.
STRATEGIES = {
    "FULL_SHARD": True,
    "1": True,
    "SHARD_GRAD_OP": False,
    "2": False,
    "NO_SHARD": None,
    "3": None,
    "HYBRID_SHARD": True,
    "4": True,
    "HYBRID_SHARD_ZERO2": False,
    "5": False,
}


_WORDS = {
    (False, True): "FULL_SHARD",
    (False, False): "SHARD_GRAD_OP",
    (True, True): "HYBRID_SHARD",
    (True, False): "HYBRID_SHARD_ZERO2",
}  # by (replicas, parameters are gathered again)


def kind(facts: Facts) -> str:
    """Return the distributed type; with replicas only, nothing is sharded."""
    if facts["zero_stage"] is not None:
        return "DEEPSPEED"
    if facts["dp_shard"] * facts["tp"] * facts["cp"] > 1:
        return "FSDP"
    return "MULTI_GPU" if facts["dp_replicate"] > 1 else "NO"


def _write_mesh(facts: Facts) -> Settings:
    settings: Settings = {"distributed_type": kind(facts), "num_processes": facts["gpus"]}
    if settings["distributed_type"] == "DEEPSPEED":
        settings[_ZERO] = facts["zero_stage"]
        if facts["cp"] > 1:  # the degrees must multiply to all processes
            settings |= {ULYSSES: facts["cp"], _MESH.format("dp_shard"): facts["dp_replicate"]}
    if settings["distributed_type"] == "FSDP" and _first_version(facts):
        settings[_STRATEGY] = _WORDS[facts["dp_replicate"] > 1, facts["reshard_after_forward"] is not False]
    elif settings["distributed_type"] == "FSDP":
        settings |= {_MESH.format(axis): facts[axis] for axis in _SHARDS}
        settings |= {_VERSION: 2, _RESHARD: facts["reshard_after_forward"] is not False}
    return settings


def _first_version(facts: Facts) -> bool:
    """Return whether a file for FSDP 1 can stay so."""
    plain = facts["tp"] == facts["cp"] == 1 and facts["dp_replicate"] in {1, facts.get("hosts")}
    return plain and facts.get("fsdp_version") == 1


def _read_mesh(settings: Settings, facts: Facts) -> Facts:
    gpus = whole(settings, "num_processes", facts["gpus"])
    same: Facts = {**_SHARDS, "gpus": gpus, "pp": 1, "ep": 1, "zero_stage": None, "reshard_after_forward": None}
    word = str(settings.get("distributed_type", "NO")).upper()
    if word in {"NO", "MULTI_GPU"}:
        return same | {"dp_replicate": gpus}
    if word == "DEEPSPEED":
        cp = whole(settings, ULYSSES, 1)
        if gpus % cp:
            raise BadInput(f"{gpus} processes are not a multiple of {ULYSSES} {cp}")
        return same | {"dp_replicate": gpus // cp, "cp": cp, "zero_stage": whole(settings, _ZERO, 2, least=0)}
    if word != "FSDP":
        raise BadInput(
            f"distributed_type {word[:40]!r} is not described", why="known: NO, MULTI_GPU, FSDP and DEEPSPEED"
        )
    axes = {axis: whole(settings, _MESH.format(axis), 1) for axis in _SHARDS}
    meshed = any(_MESH.format(axis) in settings for axis in _SHARDS)
    if whole(settings, _VERSION, 1) == 2:
        reshard = truth(settings, _RESHARD, default=True)
        return same | (axes if meshed else {"dp_shard": gpus}) | {"reshard_after_forward": reshard}
    hosts = whole(settings, "num_machines", 1)
    same |= {"fsdp_version": 1, "hosts": hosts}
    strategy = str(settings.get(_STRATEGY, "FULL_SHARD")).upper()
    if strategy not in STRATEGIES:
        raise BadInput(f"{_STRATEGY} is {strategy[:40]!r}", why=f"known: {', '.join(STRATEGIES)}")
    gathered_again = STRATEGIES[strategy]
    if gathered_again is None:
        return same | {"dp_replicate": gpus}
    replicas = hosts if strategy.startswith("HYBRID") or strategy in {"4", "5"} else 1
    if gpus % replicas:
        raise BadInput(f"{gpus} processes are not a multiple of {hosts} machines")
    return same | {"dp_replicate": replicas, "dp_shard": gpus // replicas, "reshard_after_forward": gathered_again}


def _write_types(facts: Facts) -> Settings:
    # FSDP2 stores parameters in float32 wherever mixed precision is on (utils/fsdp_utils.py, fsdp2_prepare_model).
    words = {"bfloat16": "bf16", "float16": "fp16", "float8": "fp8"}
    mixed = facts["param_dtype"] != facts["compute_dtype"] or facts["zero_stage"] is not None
    return {"mixed_precision": words.get(facts["compute_dtype"], "no") if mixed else "no"}


def _read_types(settings: Settings, facts: Facts) -> Facts:
    words = {"bfloat16": "bf16", "float16": "fp16", "float8": "fp8", None: "no"}
    lowered = {key: str(value).lower() if value is not False else "no" for key, value in settings.items()}
    compute = one_of(lowered, "mixed_precision", words, "no")
    if compute is None:  # everything has the type in which the program loads the model
        stored = facts.get("param_dtype", "float32")
        return {"compute_dtype": stored, "param_dtype": stored, "reduce_dtype": stored}
    if facts["zero_stage"] is not None:  # DeepSpeed keeps 16-bit parameters and masters in float32
        return {"compute_dtype": compute, "param_dtype": compute, "reduce_dtype": compute}
    # FSDP reduces in the type of mixed precision; replicas hold gradients in float32.
    sharded = facts["dp_shard"] * facts["cp"] * facts["tp"] > 1
    return {"compute_dtype": compute, "param_dtype": "float32", "reduce_dtype": compute if sharded else "float32"}


def _write_rotate(facts: Facts) -> Settings:
    method = facts["cp_method"] or "all_gather"
    return {_ROTATE: ROTATE[method]} if facts["cp"] > 1 and method in ROTATE else {}


def _write_recompute(facts: Facts) -> Settings:
    return {_RECOMPUTE: facts["recompute"] == "full"} if kind(facts) == "FSDP" else {}


def _read_recompute(settings: Settings, facts: Facts) -> Facts:
    if truth(settings, _RECOMPUTE):
        return {"recompute": "full"}
    return {"recompute": facts.get("recompute", "none")}  # the program's gradient_checkpointing_enable()


def _read_compile(settings: Settings, _: Facts) -> Facts:
    backend = str(settings.get("dynamo_config.dynamo_backend", "no")).lower()
    return {"compile": backend not in {"no", "false"}}


TABLE: Table = (
    Entry(
        keys=(
            "distributed_type",
            "num_processes",
            *(_MESH.format(axis) for axis in _SHARDS),
            _VERSION,
            _RESHARD,
            _STRATEGY,
            _ZERO,
            ULYSSES,
        ),
        write=_write_mesh,
        read=_read_mesh,
    ),
    Entry(
        keys=(_ROTATE,),
        write=_write_rotate,
        read=lambda settings, facts: {
            "cp_method": None
            if facts["cp"] == 1
            else "all_to_all"
            if facts["zero_stage"] is not None
            else one_of(settings, _ROTATE, ROTATE, "allgather")
        },
    ),
    Entry(
        keys=(_OFFLOAD,),
        write=lambda facts: {_OFFLOAD: facts["offload"] == "parameters"} if kind(facts) == "FSDP" else {},
        read=lambda settings, facts: {
            "offload": "parameters" if kind(facts) == "FSDP" and truth(settings, _OFFLOAD) else "none"
        },
    ),
    Entry(keys=("mixed_precision",), write=_write_types, read=_read_types),
    Entry(keys=(_RECOMPUTE,), write=_write_recompute, read=_read_recompute),
    Entry(
        keys=("dynamo_config.dynamo_backend",),
        write=lambda facts: {"dynamo_config.dynamo_backend": "inductor"} if facts["compile"] else {},
        read=_read_compile,
    ),
)
