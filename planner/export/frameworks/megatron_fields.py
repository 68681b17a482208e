"""Convert between plans and flags of Megatron-LM's `pretrain_gpt.py`.

Flags and defaults: `megatron/training/arguments.py` and the dataclasses it reads, as megatron-core 0.19.2 ships them.
Its default rank order tp-cp-ep-dp-pp names the fastest axis first (`megatron/core/parallel_state.py`), which is that of
`rank_grid`. A flag without a value is True.
"""

from __future__ import annotations

import re

from planner.export.frameworks.megatron_experts import EXPERT_ENTRIES
from planner.export.frameworks.megatron_graphs import GRAPH_ENTRY
from planner.export.frameworks.megatron_model import set_flags
from planner.export.frameworks.megatron_stops import read_stops
from planner.export.frameworks.megatron_types import TYPE_ENTRIES
from planner.export.mapping import (
    Entry,
    Facts,
    NotModelled,
    Settings,
    Table,
    layers_of,
    number,
    one_of,
    require_said,
    truth,
    whole,
)
from simulator.config.overlap_sites import NONE, USERBUFFERS
from simulator.config.plan import Plan, default_schedule
from simulator.pipeline.stages import counted_ends, needs_layout, stage_layers
from simulator.runtimes.called import RECOMPUTE_SYNONYMS
from simulator.runtimes.library import are_modules, runtime_spec
from simulator.runtimes.parts import MODULES
from topology.errors import BadInput

SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
CONTEXT = {"ring": "p2p", "all_gather": "all_gather", "all_to_all": "a2a"}
_TP, _PP, _CP = (f"--{word}-size" for word in ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel"))
_LAYOUT = "--pipeline-model-parallel-layout"
_STAGES, _PER_STAGE = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"
_ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
_COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
_SPLITS = (_STAGES, _LAYOUT, _PER_STAGE, *_ENDS, *_COUNTED)
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
_RAMP, _STEPS = "--rampup-batch-size", "--step-batch-size-schedule"
_SHARD = (
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy",
    "--num-distributed-optimizer-instances",
    "--ckpt-format",
    "--no-gradient-accumulation-fusion",
)
# The hybrid optimizer of the first reuses the path of the second (Megatron-Core developer guide, optimizer CPU
# offload).
_OFFLOAD = ("--optimizer-cpu-offload", "--use-precision-aware-optimizer")
_AWAY_LAYERS = "--cpu-offloading-num-layers"
_FRACTION = "--optimizer-offload-fraction"
_OPTIMIZER = "--optimizer"
_RECOMPUTE = ("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-activations")
_MODULES = "--recompute-modules"


def pipeline_layout(layers: tuple[int, ...]) -> str:
    """Return the stages in Megatron-LM's layout notation: E embedding, t layer, L loss, | between stages."""
    stages = ["t" * count for count in layers]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}L"
    return "|".join(stages)


def _write_pipeline(facts: Facts) -> Settings:
    stages, spec = facts["pp"] * facts["virtual_stages"], runtime_spec("megatron-lm").pipeline
    listed: tuple[int, ...] = facts["layers_per_stage"] if facts["pp"] > 1 else ()
    if not listed and stages > 1 and needs_layout(facts["layers"], stages, spec):
        listed = stage_layers(facts["layers"], Plan(pp=facts["pp"], virtual_stages=facts["virtual_stages"]), spec)
    uneven = bool(listed)
    ends = (0, 0) if uneven or stages == 1 else counted_ends(facts["layers"], stages, spec)
    return set_flags(
        {
            _PP: facts["pp"],
            _STAGES: facts["virtual_stages"] if facts["virtual_stages"] > 1 and not uneven else None,
            _LAYOUT: pipeline_layout(listed) if uneven else None,
            **{flag: bool(counted) for flag, counted in zip(_COUNTED, ends, strict=True)},
        }
    )


def _read_pipeline(settings: Settings, facts: Facts) -> Facts:
    pp = whole(settings, _PP, 1)
    if pp == 1:
        return {"pp": 1, "virtual_stages": 1, "schedule": None, "layers_per_stage": ()}
    if _GROUP in settings and whole(settings, _GROUP) != pp:
        raise NotModelled(
            f"{_GROUP} {settings[_GROUP]} of {pp} ranks is not modelled", remedy=f"{_GROUP} {pp}, its default"
        )
    listed: tuple[int, ...] = ()
    virtual = whole(settings, _STAGES, 1)
    if _LAYOUT in settings:
        listed = layers_of_layout(settings[_LAYOUT])
        if len(listed) % pp:
            raise BadInput(f"{_LAYOUT} has {len(listed)} stages for {pp} pipeline ranks")
        virtual = len(listed) // pp
    elif _PER_STAGE in settings:
        per_stage = whole(settings, _PER_STAGE)
        layers = layers_of(facts, _PER_STAGE)
        if layers % (pp * per_stage):
            raise BadInput(f"{layers} layers are not a multiple of {pp} ranks x {_PER_STAGE} {per_stage}")
        virtual = layers // pp // per_stage
    elif any(flag in settings for flag in _ENDS):
        listed = _with_ends(settings, layers_of(facts, _ENDS[0]), pp, virtual)
    elif any(flag in settings for flag in _COUNTED):
        listed = _with_counted_ends(settings, layers_of(facts, _COUNTED[0]), pp * virtual)
    elif "layers" in facts and facts["layers"] % (pp * virtual):
        raise BadInput(
            f"{facts['layers']} layers do not divide by pp {pp} x virtual stages {virtual}",
            why="Megatron-LM stops at that",
            remedy=_spread(facts["layers"], pp, virtual),
        )
    schedule = default_schedule(virtual)
    even = stage_layers(
        facts.get("layers", sum(listed)),
        Plan(pp=pp, virtual_stages=virtual, schedule=schedule),
        runtime_spec("megatron-lm").pipeline,
    )
    return {
        "pp": pp,
        "virtual_stages": virtual,
        "schedule": schedule,
        "layers_per_stage": () if listed == even else listed,
    }


def _spread(layers: int, pp: int, virtual: int) -> str:
    """Return the flags that divide this number of layers over the stages."""
    facts: Facts = {"pp": pp, "virtual_stages": virtual, "layers": layers, "layers_per_stage": ()}
    settings = _write_pipeline(facts)
    if _LAYOUT in settings:
        return f"{_LAYOUT} {settings[_LAYOUT]!r}" + (f" in the place of {_STAGES}" if virtual > 1 else "")
    return " ".join(flag for flag in _COUNTED if settings.get(flag))


def layers_of_layout(said: object) -> tuple[int, ...]:
    """Return the layers of each stage of a layout such as `Et*3|(tt|)*29,m|L`, or of stages as lists of words such as
    `[[embedding, decoder], [decoder, loss]]`. Raises BadInput for another notation.
    """
    if isinstance(said, list) and all(isinstance(stage, list) for stage in said):
        return tuple(stage.count("decoder") for stage in said)
    text = str(said)
    out = re.sub(r"[ ,'\"]", "", text[:4096])
    for unit in (r"([EtLmS|])\*(\d{1,3})", r"\(([^()]*)\)(?:\*(\d{1,3}))?"):
        out = re.sub(unit, lambda found: found[1] * int(found[2] or 1), out)[: 1 << 16]
    if not out or set(out) - set("EtLmS|"):
        raise BadInput(f"{_LAYOUT} {text[:60]!r} is not a layout", why="E, t, m and L, with | between stages")
    return tuple(stage.count("t") for stage in out.split("|"))


def _with_ends(settings: Settings, layers: int, pp: int, virtual: int) -> tuple[int, ...]:
    """Return the layers by stage if the first or the last pipeline rank has a number of its own; each rank's layers are
    divided equally over its virtual stages (`TransformerConfig.__post_init__`).
    """
    ends = [whole(settings, flag) if flag in settings else None for flag in _ENDS]
    ranks = pp - sum(end is not None for end in ends)
    left = layers - sum(end or 0 for end in ends)
    each = left // ranks if ranks else 0
    first, last = ends
    of_ranks = (*(() if first is None else (first,)), *[each] * ranks, *(() if last is None else (last,)))
    if each * ranks != left or bool(left) != bool(ranks) or any(count % virtual for count in of_ranks):
        raise BadInput(
            f"{layers} layers with {' and '.join(flag for flag in _ENDS if flag in settings)} do not spread over {pp}"
            " pipeline ranks",
            why="what the ends leave must divide by the other ranks, and what a rank has by its virtual stages",
            remedy=_spread(layers, pp, virtual) if layers % (pp * virtual) else "leave the ends out",
        )
    return tuple(count // virtual for _ in range(virtual) for count in of_ranks)


def _with_counted_ends(settings: Settings, layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers by stage if the embedding or the loss counts as a layer of its stage."""
    first, last = (int(flag in settings) for flag in _COUNTED)
    if (layers + first + last) % stages:
        raise BadInput(f"{layers} layers with {' and '.join(_COUNTED)} do not spread over {stages} stages")
    counts = [(layers + first + last) // stages] * stages
    counts[0], counts[-1] = counts[0] - first, counts[-1] - last
    return tuple(counts)


def _read_context(settings: Settings, facts: Facts) -> Facts:
    if facts["cp"] == 1:
        return {"cp_method": None}
    word = require_said("--cp-comm-type", settings.get("--cp-comm-type", "p2p"))
    if word not in CONTEXT.values():  # Megatron-LM's parser takes any
        raise NotModelled(f"--cp-comm-type {str(word)[:40]} is not modelled", remedy=", ".join(CONTEXT.values()))
    return {"cp_method": one_of(settings, "--cp-comm-type", CONTEXT, "p2p")}


def _write_sharding(facts: Facts) -> Settings:
    stage = facts["zero_stage"] or 0
    fully = stage in SHARDING
    dp = facts["dp_replicate"] * facts["dp_shard"]
    overlaps = dp * facts["cp"] > 1
    values = (
        stage >= 1,
        overlaps,
        overlaps and stage >= 1,
        fully,
        SHARDING.get(stage),
        facts.get("instances") if fully else None,
        "fsdp_dtensor" if fully else None,
        fully,
    )
    return set_flags(dict(zip(_SHARD, values, strict=True)))


def _read_sharding(settings: Settings, facts: Facts) -> Facts:
    others = facts["tp"] * facts["cp"] * facts["pp"]
    if facts["gpus"] % others:
        raise BadInput(
            f"{facts['gpus']} GPUs are not a multiple of tp {facts['tp']} x cp {facts['cp']} x pp {facts['pp']}",
            remedy="say with --gpus how many the command is for",
        )
    stage = 1 if truth(settings, "--use-distributed-optimizer") else 0
    if truth(settings, "--use-megatron-fsdp") or truth(settings, "--use-custom-fsdp"):
        known = {"no_shard": 0, "optim": 1, **{word: stage for stage, word in SHARDING.items()}}
        word = str(settings.get("--data-parallel-sharding-strategy", "no_shard"))
        if word not in known:
            raise BadInput(f"--data-parallel-sharding-strategy is {word[:40]!r}", why=f"known: {', '.join(known)}")
        stage = known[word]
        if facts.get("one_connection"):
            raise BadInput(
                "Megatron-LM's FSDP does not start with CUDA_DEVICE_MAX_CONNECTIONS=1",
                why="its gathers have to run during products, on connections of their own",
                remedy="take the variable out of the script, or another kind of sharding",
            )
    elif truth(settings, "--use-torch-fsdp2"):
        stage = 3
    instances = whole(settings, _SHARD[5], 1)
    return {
        "zero_stage": stage,
        "dp_replicate": facts["gpus"] // others,
        "dp_shard": 1,
        "reshard_after_forward": None,
        "instances": instances if instances > 1 else None,
    }


def _write_offload(facts: Facts) -> Settings:
    return set_flags(dict.fromkeys(_OFFLOAD, facts["offload"] == "optimizer"))


def _read_offload(settings: Settings, _: Facts) -> Facts:
    if not truth(settings, _OFFLOAD[0]):
        return {"offload": "none"}
    if str(settings.get(_FRACTION, "1.0")) not in {"1", "1.0"}:
        raise NotModelled(
            f"{_FRACTION} {str(settings[_FRACTION])[:40]} is not described",
            why="all of the optimizer is offloaded, or nothing",
        )
    return {"offload": "optimizer"}


def _write_batch(facts: Facts) -> Settings:
    return {
        "--micro-batch-size": facts["micro_batch_size"],
        "--global-batch-size": facts["global_batch_size"],
        "--seq-length": facts["seq_len"],
        "--max-position-embeddings": max(facts["seq_len"], facts.get("max_positions", 0)),
    }


def _read_batch(settings: Settings, facts: Facts) -> Facts:
    micro = whole(settings, "--micro-batch-size", facts.get("micro_beside") or 1)
    if _STEPS in settings and "--global-batch-size" not in settings:
        raise NotModelled(f"the batch grows by {_STEPS}", remedy="--global-batch-size in its place, one of its sizes")
    stated = facts.get("seq_len") or 2048
    length = whole(settings, "--seq-length", whole(settings, "--encoder-seq-length", stated))
    # The default global batch is one micro batch per data-parallel rank.
    return {
        "micro_batch_size": micro,
        "seq_len": length,
        "global_batch_size": whole(settings, "--global-batch-size", micro * facts["dp_replicate"]),
    }


def _read_ramp(settings: Settings, facts: Facts) -> Facts:
    """Read no fact: a step has the full batch. Raises BadInput for a ramp that Megatron-LM refuses."""
    if _RAMP not in settings:
        return {}
    said = str(require_said(_RAMP, settings[_RAMP])).split()
    if len(said) != 3 or not all(word.isdecimal() and len(word) < 16 for word in said):
        raise BadInput(f"{_RAMP} is {' '.join(said)[:60]!r}", why="it takes a first batch, an increment and samples")
    first, increment = int(said[0]), int(said[1])
    together = facts["micro_batch_size"] * facts["dp_replicate"] * facts["dp_shard"]
    rest = facts["global_batch_size"] - first
    # RampupBatchsizeNumMicroBatchesCalculator of megatron-core 0.12: intermediate batches must divide, too.
    if increment < 1 or rest < 0 or rest % increment or first % together or increment % together:
        raise BadInput(
            f"{_RAMP} {first} {increment} up to {facts['global_batch_size']} sequences does not divide by {together} a"
            " step",
            why="every batch on the way is a multiple of micro batch x data parallel, and the last is the global batch",
            remedy="a first batch and an increment that are multiples, or a smaller micro batch",
        )
    return {}


def _write_recompute(facts: Facts) -> Settings:
    mode = facts["recompute"]
    if mode == "full":
        return dict(zip(_RECOMPUTE, ("full", "uniform", 1), strict=False))
    if mode == "selective":
        return {_RECOMPUTE[0]: "selective"}
    modules = are_modules(mode, runtime_spec("megatron-lm"))
    return {_RECOMPUTE[0]: "selective", _MODULES: mode.split(MODULES)} if modules else {}


def _read_recompute(settings: Settings, facts: Facts) -> Facts:
    if truth(settings, "--recompute-activations"):
        return {"recompute": "selective"}
    if _RECOMPUTE[0] not in settings:
        return {"recompute": "none"}
    mode = one_of(settings, _RECOMPUTE[0], {"full": "full", "selective": "selective"}, "selective")
    count = whole(settings, _RECOMPUTE[2], 1, least=0)
    blocks = mode == "full" and settings.get(_RECOMPUTE[1]) == "block"
    held = layers_of(facts, _RECOMPUTE[1]) // (facts["pp"] * facts["virtual_stages"]) if blocks else 0
    if blocks and not count:
        return {"recompute": "none"}
    if blocks and count < held:
        raise NotModelled(
            f"full recomputation of {count} of the {held} layers of a stage is not described",
            why="--recompute-method block recomputes the first layers only",
            remedy="--recompute-method uniform, or no recomputation, in the configuration",
        )
    modules = settings.get(_MODULES)
    if mode == "selective" and modules is not None:
        words = modules if isinstance(modules, list) else re.split(r"[\s,\[\]'\"]+", str(modules))
        mode = MODULES.join(str(word) for word in words if word)
        if not are_modules(mode, runtime_spec("megatron-lm")):
            known = runtime_spec("megatron-lm").recompute_modules
            raise NotModelled(f"{_MODULES} {mode[:60]} is not modelled", remedy=f"known: {', '.join(known)}")
        mode = RECOMPUTE_SYNONYMS.get(mode, mode)
    return {"recompute": mode}


def _read_overlap(settings: Settings, _: Facts) -> Facts:
    return {"tp_overlap": USERBUFFERS if truth(settings, "--tp-comm-overlap") else NONE}


def _read_optimizer(settings: Settings, _: Facts) -> Facts:
    """Return the optimizer: `adam` decouples its weight decay, and `sgd` has momentum (--sgd-momentum 0.9)."""
    word = str(settings.get(_OPTIMIZER) or "adam")
    return {"optimizer": {"adam": "adamw", "sgd": "sgdmomentum"}.get(word, word)}


TABLE: Table = (
    Entry(read=read_stops),
    number(_TP, "tp"),
    Entry(
        keys=("--sequence-parallel",),
        write=lambda facts: {"--sequence-parallel": True} if facts["sequence_parallel"] and facts["tp"] > 1 else {},
        read=lambda settings, facts: {"sequence_parallel": facts["tp"] > 1 and truth(settings, "--sequence-parallel")},
    ),
    Entry(keys=(_PP, *_SPLITS, _GROUP), exclusive=_SPLITS, write=_write_pipeline, read=_read_pipeline),
    number(_CP, "cp"),
    Entry(
        keys=("--cp-comm-type",),
        write=lambda facts: {"--cp-comm-type": CONTEXT[facts["cp_method"] or "ring"]} if facts["cp"] > 1 else {},
        read=_read_context,
    ),
    *EXPERT_ENTRIES,
    GRAPH_ENTRY,
    Entry(keys=_SHARD, write=_write_sharding, read=_read_sharding),
    Entry(keys=(*_OFFLOAD, _FRACTION), write=_write_offload, read=_read_offload),
    Entry(
        keys=(_AWAY_LAYERS,),
        write=lambda facts: {_AWAY_LAYERS: facts["offload_layers"]} if facts["offload_layers"] else {},
        read=lambda settings, _: {"offload_layers": whole(settings, _AWAY_LAYERS, 0, least=0) or None},
    ),
    Entry(
        keys=("--micro-batch-size", "--global-batch-size", "--seq-length", "--max-position-embeddings", _STEPS),
        write=_write_batch,
        read=_read_batch,
    ),
    Entry(keys=(_RAMP,), read=_read_ramp),
    Entry(keys=(*_RECOMPUTE, _MODULES), exclusive=_RECOMPUTE, write=_write_recompute, read=_read_recompute),
    Entry(
        keys=("--tp-comm-overlap",),
        write=lambda facts: {"--tp-comm-overlap": True} if facts["tp_overlap"] != NONE else {},
        read=_read_overlap,
    ),
    *TYPE_ENTRIES,
    Entry(keys=(_OPTIMIZER,), read=_read_optimizer),
    Entry(read=lambda *_: {"compile": False}),
)
