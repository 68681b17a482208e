"""Convert between plans and torchtitan's keys: those of 0.2.2 (TOML) and of 0.3.0 (command line).

Sources: torchtitan 0.2.2 `config/job_config.py`, 0.3.0 `config/configs.py` and `trainer.py`. Its mesh axes are
pp, dp_replicate, dp_shard, cp, tp, the last fastest (`distributed/parallel_dims.py`), as `rank_grid` does. Defaults
that readers fill in are those of these classes.
"""

from __future__ import annotations

from planner.export.mapping import (
    Entry,
    Facts,
    NotModelled,
    Settings,
    Table,
    data_parallel_rest,
    layers_of,
    number,
    one_of,
    truth,
    whole,
    words,
)
from simulator.config.plan import Plan
from simulator.config.savers import OPTIMIZER_IN_BACKWARD
from simulator.pipeline.schedules.registry import SCHEDULES, schedules_that
from simulator.pipeline.stages import stage_layers
from simulator.runtimes.library import runtime_spec
from topology.errors import BadInput

# `alltoall` passes keys and values around a ring; `allgather` gathers them first.
ROTATE = {"ring": "alltoall", "all_gather": "allgather"}
PARAM_DTYPES = {"float32": "float32", "bfloat16": "bfloat16"}
RESHARD = {None: "default", True: "always", False: "never"}
# Modes of 0.2.2: (mode, selective_ac_option); every second block, or by operator
# (distributed/activation_checkpoint.py).
RECOMPUTE = {
    "none": ("none", None),
    "full": ("full", None),
    "selective": ("selective", "2"),
    "selective-op": ("selective", "op"),
}
SUBCOMMAND = "activation_checkpoint"
# 0.3.0 only selects operators; every second block is written as that, with a note.
RECOMPUTE_0_3 = {"none": "none", "full": "full", "selective-op": "selective"}

_DEGREE = "parallelism.{}_degree"
_SHARD = _DEGREE.format("data_parallel_shard")
_OFFLOAD = "training.enable_cpu_offload"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_MICRO_BATCH = "parallelism.pipeline_parallel_microbatch_size"
_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
_MODULES = "parallelism.module_fqns_per_model_part"
_LESS = tuple(f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
_SPLITS = (_MODULES, _PER_STAGE, *_LESS)


def _read_shard(settings: Settings, facts: Facts) -> Facts:
    product = facts["dp_replicate"] * facts["tp"] * facts["cp"] * facts["pp"]
    return {"dp_shard": data_parallel_rest(settings, facts, _SHARD, product)}


DEGREES: Table = (
    number(_DEGREE.format("data_parallel_replicate"), "dp_replicate"),
    number(_DEGREE.format("tensor_parallel"), "tp"),
    number(_DEGREE.format("context_parallel"), "cp"),
    number(_DEGREE.format("pipeline_parallel"), "pp"),
    number(_DEGREE.format("expert_parallel"), "ep"),
    Entry(keys=(_SHARD,), write=lambda facts: {_SHARD: facts["dp_shard"]}, read=_read_shard),
    words("parallelism.fsdp_reshard_after_forward", "reshard_after_forward", RESHARD, "default"),
    Entry(
        keys=(_OFFLOAD,),
        write=lambda facts: {_OFFLOAD: True} if facts["offload"] == "parameters" else {},
        # Only parameters that FSDP wraps are offloaded.
        read=lambda settings, facts: {
            "offload": "parameters" if truth(settings, _OFFLOAD) and facts["dp_shard"] * facts["cp"] > 1 else "none"
        },
    ),
)


def _write_batch(facts: Facts) -> Settings:
    """With a pipeline, all micro batches run in one pass, so the local batch is the rank's share of the global batch;
    without one it is a micro batch, and gradients are accumulated up to the global batch.
    """
    share = facts["global_batch_size"] // (facts["dp_replicate"] * facts["dp_shard"])
    return {
        "training.local_batch_size": share if facts["pp"] > 1 else facts["micro_batch_size"],
        "training.global_batch_size": facts["global_batch_size"],
    }


def _read_batch(settings: Settings, facts: Facts) -> Facts:
    local = whole(settings, "training.local_batch_size", 8)
    dp = facts["dp_replicate"] * facts["dp_shard"]
    stated = whole(settings, "training.global_batch_size", -1, least=-1)
    if stated > 0 and stated % (local * dp):
        raise BadInput(
            f"training.global_batch_size {stated} is not a multiple of local_batch_size {local} x data parallel {dp}"
        )
    micro = whole(settings, _MICRO_BATCH, 1) if facts["pp"] > 1 else local
    return {"global_batch_size": stated if stated > 0 else local * dp, "micro_batch_size": micro}


BATCH: Table = (
    Entry(keys=("training.local_batch_size", "training.global_batch_size"), write=_write_batch, read=_read_batch),
    number("training.seq_len", "seq_len", 2048),
    words("training.dtype", "param_dtype", PARAM_DTYPES, "float32"),
    Entry(
        keys=("training.mixed_precision_param",),
        write=lambda facts: {
            "training.mixed_precision_param": "bfloat16"
            if facts["compute_dtype"] == "float8"
            else facts["compute_dtype"]
        },
        read=lambda settings, _: {
            "compute_dtype": one_of(settings, "training.mixed_precision_param", PARAM_DTYPES, "bfloat16")
        },
    ),
    # Not a choice: the field has one value.
    words("training.mixed_precision_reduce", "reduce_dtype", {"float32": "float32"}, "float32"),
)


def stage_modules(facts: Facts, plan: Plan, head: str) -> list[list[str]]:
    """Return the modules of each stage; empty if torchtitan splits the model in the same way.

    `head` is the name of the output projection in this version.
    """
    kind = SCHEDULES.get(plan.schedule or "")
    if plan.pp == 1 or (not plan.layers_per_stage and plan.virtual_stages == (kind.least_stages if kind else 1)):
        return []
    counts = stage_layers(facts["layers"], plan, runtime_spec("torchtitan").pipeline)
    parts: list[list[str]] = []
    start = 0
    for count in counts:
        parts.append([f"layers.{index}" for index in range(start, start + count)])
        start += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return parts


def _plan(facts: Facts) -> Plan:
    """Return the part of a plan that decides its stages."""
    names = ("pp", "schedule", "virtual_stages", "layers_per_stage")
    return Plan(**{name: facts[name] for name in names})


def pipeline(head: str) -> Entry:
    """The pipeline settings of a version whose output projection is called `head`."""

    def write(facts: Facts) -> Settings:
        if facts["pp"] == 1:
            return {}
        settings = {_SCHEDULE: facts["schedule"] or "1F1B", _MICRO_BATCH: facts["micro_batch_size"]}
        modules = stage_modules(facts, _plan(facts), head)
        return settings | ({_MODULES: modules} if modules else {})

    return Entry(keys=(_SCHEDULE, _MICRO_BATCH, *_SPLITS), exclusive=_SPLITS, write=write, read=_read_pipeline)


def _read_pipeline(settings: Settings, facts: Facts) -> Facts:
    if facts["pp"] == 1:
        return {"schedule": None, "virtual_stages": 1, "layers_per_stage": ()}
    schedule = settings.get(_SCHEDULE, "1F1B")
    kinds = {name.lower(): name for name in SCHEDULES}
    if not isinstance(schedule, str) or schedule.lower() not in kinds:
        raise BadInput(f"{_SCHEDULE} is {str(schedule)[:60]!r}", why=f"known: {', '.join(SCHEDULES)}")
    kind = SCHEDULES[kinds[schedule.lower()]]
    found: Facts = {"schedule": kind.name, "virtual_stages": kind.least_stages, "layers_per_stage": ()}
    modules = settings.get(_MODULES)
    if modules:
        counts = _layer_counts(modules)
        if len(counts) % facts["pp"]:
            raise BadInput(f"{_MODULES} has {len(counts)} stages for {facts['pp']} pipeline ranks")
        return _listed(found, counts, facts)
    less = [whole(settings, key, 1, least=0) for key in _LESS]
    if settings.get(_PER_STAGE) is not None:
        # pipeline_parallel.py, pipeline_llm: the embedding and the head count as layers.
        per_stage = whole(settings, _PER_STAGE)
        stages = -(-(layers_of(facts, _PER_STAGE) + sum(less)) // per_stage)
        if stages % facts["pp"]:
            raise BadInput(
                f"{_PER_STAGE} {per_stage} makes {stages} stages, not a multiple of {facts['pp']} pipeline ranks"
            )
        found["virtual_stages"] = stages // facts["pp"]
    if less != [1, 1]:
        counts = _uneven(layers_of(facts, _LESS[0]), facts["pp"] * found["virtual_stages"], less)
        return _listed(found, counts, facts)
    return found


def _layer_counts(modules: object) -> list[int]:
    if not isinstance(modules, list) or not all(isinstance(part, list) for part in modules):
        raise BadInput(f"{_MODULES} is not a list of lists of module names")
    return [sum(str(name).startswith("layers.") for name in part) for part in modules]


def _listed(found: Facts, counts: list[int], facts: Facts) -> Facts:
    """Return facts with the layers by stage, which are empty if torchtitan would split the model in the same way."""
    stages = len(counts) // facts["pp"]
    even = Plan(pp=facts["pp"], virtual_stages=stages, schedule=found["schedule"])
    same = stage_layers(facts.get("layers", sum(counts)), even, runtime_spec("torchtitan").pipeline) == tuple(counts)
    return found | {"virtual_stages": stages, "layers_per_stage": () if same else tuple(counts)}


def _uneven(layers: int, stages: int, less: list[int]) -> list[int]:
    """Return the layers by stage if the ends hold `less` layers (pipeline_parallel.py,
    generate_llm_fqn_per_model_part).
    """
    total = layers + sum(less)
    counts = [total // stages + (1 if i < total % stages else 0) for i in range(stages)]
    counts[0] -= less[0]
    counts[-1] -= less[1]
    return counts


def _read_compile(settings: Settings, _: Facts) -> Facts:
    # The loss may be compiled alone. A command line joins the parts with commas.
    parts = settings.get("compile.components", ["model", "loss"])
    parts = parts.split(",") if isinstance(parts, str) else parts
    if not isinstance(parts, (list, tuple)):
        raise BadInput(f"compile.components is {str(parts)[:60]!r}", why="it must be a list, such as ['model', 'loss']")
    return {"compile": truth(settings, "compile.enable") and "model" in parts}


COMPILE = Entry(
    keys=("compile.enable", "compile.components"),
    write=lambda facts: {"compile.enable": bool(facts["compile"]), "compile.components": ["model", "loss"]},
    read=_read_compile,
)
LOGS = Entry(
    keys=("metrics.log_freq",),
    write=lambda facts: {"metrics.log_freq": 1} if facts["logs_each_step"] else {},
    read=lambda settings, _: {"logs_each_step": settings.get("metrics.log_freq") in {1, "1"}},
)


# 0.2.2

_AC_MODE, _AC_OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"


def _write_recompute(facts: Facts) -> Settings:
    mode, option = RECOMPUTE.get(facts["recompute"], ("none", None))
    return {_AC_MODE: mode} | ({_AC_OPTION: option} if option else {})


def _read_recompute(settings: Settings, _: Facts) -> Facts:
    mode = settings.get(_AC_MODE, "selective")
    option = str(settings.get(_AC_OPTION, "2")) if mode == "selective" else None
    for ours, theirs in RECOMPUTE.items():
        if theirs == (mode, option):
            return {"recompute": ours}
    if mode == "selective" and option == "1":  # every block
        return {"recompute": "full"}
    if mode == "memory_budget" or (option or "").isdecimal():
        raise NotModelled(
            f"{_AC_MODE} {mode} of {option or 'a budget'} is not modelled", remedy="selective with 1, 2 or op"
        )
    raise BadInput(
        f"{_AC_MODE} {str(mode)[:40]!r} with selective_ac_option {str(option)[:40]!r} is not described",
        why="known: none, full, selective with a number or op",
    )


def _write_async(key: str, *, always: bool) -> Entry:
    def write(facts: Facts) -> Settings:
        used = facts["tp_overlap"] == "async"
        return {key: used} if used or always else {}

    def read(settings: Settings, _: Facts) -> Facts:
        return {"tp_overlap": "async" if truth(settings, key) else "none"}

    return Entry(keys=(key,), write=write, read=read)


_BESIDE = "parallelism.pipeline_parallel_expert_parallel_overlap"


def _pairs(facts: Facts) -> bool:
    """Return whether 0.2.2 would overlap the all-to-all of experts by default
    (distributed/dual_pipe_v.py).
    """
    return bool(facts["pp"] > 1 and facts["ep"] > 1 and facts["schedule"] in schedules_that(lambda kind: kind.pairs))


def _write_experts_beside(facts: Facts) -> Settings:
    return {_BESIDE: facts["ep_overlap"] != "none"} if _pairs(facts) else {}


def _read_experts_beside(settings: Settings, facts: Facts) -> Facts:
    return {"ep_overlap": "combined" if _pairs(facts) and truth(settings, _BESIDE, default=True) else "none"}


def _write_context(facts: Facts) -> Settings:
    method = facts["cp_method"] or "all_gather"
    key = "parallelism.context_parallel_rotate_method"
    return {key: ROTATE[method]} if facts["cp"] > 1 and method in ROTATE else {}


def _read_context(settings: Settings, facts: Facts) -> Facts:
    if facts["cp"] == 1:
        return {"cp_method": None}
    return {"cp_method": one_of(settings, "parallelism.context_parallel_rotate_method", ROTATE, "allgather")}


_FLOAT8, _MX = "quantize.linear.float8.recipe_name", "quantize.linear.mx.recipe_name"
_FILTERS = ("quantize.linear.float8.filter_fqns", "quantize.linear.mx.filter_fqns")
_GATHERS = "quantize.linear.float8.enable_fsdp_float8_all_gather"
_PRECOMPUTES = "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
# Parts of names of modules that are counted in 16 bits whatever is stated.
_WIDE_ANYWAY = ("output", "lm_head", "router")
_RECIPES = {name: name for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")}


def _read_converters(settings: Settings, _: Facts) -> Facts:
    """Read which products are in float8, and by which recipe, if one is stated."""
    kind = _converter(settings)
    if kind == "mx":
        mx = str(settings.get(_MX) or "mxfp8")
        if not mx.startswith("mxfp8"):
            raise NotModelled(f"{_MX} {mx[:40]!r} is not modelled", remedy="mxfp8")
        return {"compute_dtype": "float8", "low_precision_recipe": "mxfp8"}
    if not kind:
        return {}
    if settings.get(_FLOAT8) and truth(settings, _GATHERS):
        raise BadInput(
            f"{_FLOAT8} and {_GATHERS} are both set",
            why="torchtitan asserts that only one is (components/quantization/float8.py)",
            remedy="leave one of the two out",
        )
    stated = {"low_precision_recipe": one_of(settings, _FLOAT8, _RECIPES, "")} if settings.get(_FLOAT8) else {}
    return {"compute_dtype": "float8", **stated}


def _converter(settings: Settings) -> str:
    """Return the kind of linear layers that the model's converters make: `mx`, `float8` or, for neither, nothing."""
    converters = settings.get("model.converters") or []
    names = [str(name) for name in (converters if isinstance(converters, list) else [converters])]
    return next((kind for kind in ("mx", "float8") if any(kind in name for name in names)), "")


def float8_assumed(settings: Settings) -> tuple[str, ...]:
    """Return in what a step's products in float8 are counted otherwise than a file says: which modules stay in 16 bits
    (a part of their name is in `filter_fqns`), and the type in which parameters are gathered.
    """
    kind = _converter(settings)
    if not kind:
        return ()
    key = _FILTERS[kind == "mx"]
    stated = settings.get(key) or []
    parts = [str(part) for part in (stated if isinstance(stated, list) else str(stated).split(","))]
    assumed = []
    if counted := [part for part in parts if not any(name in part for name in _WIDE_ANYWAY)]:
        assumed.append(f"{key}: {', '.join(counted)[:120]} counted in float8, like all products of layers")
    if not any(part in "output" for part in parts if part):
        assumed.append(f"{key} has no output: the output product is counted in 16 bits all the same")
    if truth(settings, _GATHERS):
        assumed.append(f"{_GATHERS}: parameters are counted as gathered in 16 bits")
    return tuple(assumed)


_IN_BACKWARD = "optimizer.early_step_in_backward"  # a key of 0.2.2 that 0.3 does not have
SAVERS = Entry(
    keys=(_IN_BACKWARD,),
    write=lambda facts: {_IN_BACKWARD: True} if OPTIMIZER_IN_BACKWARD in facts["savers"] else {},
    read=lambda settings, _: {"savers": (OPTIMIZER_IN_BACKWARD,) if truth(settings, _IN_BACKWARD) else ()},
)
TOML: Table = (
    *DEGREES,
    *BATCH,
    pipeline("output"),
    Entry(keys=("parallelism.context_parallel_rotate_method",), write=_write_context, read=_read_context),
    _write_async("parallelism.enable_async_tensor_parallel", always=False),
    Entry(keys=(_BESIDE,), write=_write_experts_beside, read=_read_experts_beside),
    Entry(keys=(_AC_MODE, _AC_OPTION), write=_write_recompute, read=_read_recompute),
    COMPILE,
    LOGS,
    # Converters replace layers by low-precision ones; which to name depends on torchao, so none is written.
    SAVERS,
    Entry(keys=("model.converters", _FLOAT8, _MX, *_FILTERS, _GATHERS, _PRECOMPUTES), read=_read_converters),
    # 0.2.2 has no switch: tensor parallelism always includes sequence parallelism.
    Entry(read=lambda _, facts: {"sequence_parallel": facts["tp"] > 1}),
    Entry(read=lambda *_: {"optimizer": "adamw", "zero_stage": None}),
)


# 0.3.0

_SEQUENCE = "parallelism.enable_sequence_parallel"

COMMAND_LINE: Table = (
    *DEGREES,
    *BATCH,
    pipeline("lm_head"),
    Entry(
        keys=(_SEQUENCE,),
        write=lambda facts: {_SEQUENCE: facts["sequence_parallel"]},
        read=lambda settings, facts: {
            "sequence_parallel": facts["tp"] > 1 and truth(settings, _SEQUENCE, default=True)
        },
    ),
    COMPILE,
    LOGS,
    _write_async("compile.enable_async_tensor_parallel", always=True),
    Entry(
        keys=(SUBCOMMAND,),
        write=lambda facts: {SUBCOMMAND: RECOMPUTE_0_3.get(facts["recompute"], "selective")},
        read=lambda settings, _: {"recompute": one_of(settings, SUBCOMMAND, RECOMPUTE_0_3, "selective")},
    ),
    Entry(
        read=lambda _, facts: {
            "optimizer": "adamw",
            "zero_stage": None,
            "cp_method": "all_gather" if facts["cp"] > 1 else None,
        }
    ),
)
