"""Megatron-LM: arguments of `pretrain_gpt.py`, model included, in a script that starts it under torchrun."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planner.export.degrees import to_zero_stage
from planner.export.draft import Draft, Target
from planner.export.frameworks.megatron_fields import SHARDING, TABLE
from planner.export.frameworks.megatron_model import model_flags
from planner.export.frameworks.megatron_types import FP8_RECIPES
from planner.export.job import ExportJob, require_legal
from planner.export.mapping import Settings
from planner.export.mapping import write as settings_of
from planner.export.script import ShellExpression, started_script
from simulator.config.hf_config import model_from_config, shipped_models
from simulator.config.hub_models import SHIPPED
from simulator.config.model import Model
from simulator.config.overlap_sites import NONE, USERBUFFERS, tp_overlap_label
from simulator.kernels.low_precision import SYNONYMS
from simulator.runtimes.environment import Variable
from simulator.runtimes.library import are_modules, runtime_spec, spec_for
from topology.codec import read_json

VERSION = "0.19.2"
TITLE = f"Megatron-LM (megatron-core {VERSION})"
PROGRAM = "pretrain_gpt.py"
CONNECTIONS = Variable(
    name="CUDA_DEVICE_MAX_CONNECTIONS",
    value="1",
    reason="Megatron-LM requires it with tensor or context parallelism: kernels then run in launch order",
)
# Megatron-LM requires it below Blackwell only, which schedules the kernels of several queues in order.
BLACKWELL = 100


# DeepSeek-V3 trains its selection biases at this speed (arXiv 2412.19437, section 4.2).
BIAS_RATE = 1e-3
# Without the user's arguments the script runs on generated data, so that it starts unchanged.
TRIAL = (
    "--mock-data",
    "--tokenizer-type=NullTokenizer",
    "--lr=1e-4",
    "--train-iters=20",
    "--log-interval=1",
    "--eval-iters=0",
    "--distributed-timeout-minutes=10",
)
TRIAL_LINES = (
    f"[ $# -gt 0 ] || set -- {' '.join(TRIAL)}  # your data, tokenizer, learning rate and iterations instead\n"
)
UNKNOWN_NUMBERS = (
    "numbers of the model that cost nothing, such as --rotary-base, --norm-epsilon and the router's losses"
)


def parallel_flags(job: ExportJob) -> Settings:
    """Return the flags of degrees, batch, schedule, recompute and types."""
    plan, model = job.plan, job.question.model
    stage = to_zero_stage(plan)
    hybrid = plan.zero_stage is None and stage in SHARDING and plan.dp_replicate > 1
    given = {
        "zero_stage": stage,
        "moe": model.moe is not None,
        "max_positions": model.max_positions,
        "instances": plan.dp_replicate if hybrid else None,
    }
    return settings_of(TABLE, job.facts() | given)


def flag_words(flags: Settings) -> list[str]:
    words: list[str] = []
    for flag, value in flags.items():
        words += [flag] if value is True else [flag, *map(str, value if isinstance(value, list) else [value])]
    return words


def program(job: ExportJob) -> tuple[list[str], Draft]:
    """Return the arguments of torchrun, and a draft of what they set. Raises Infeasible."""
    not_expressed = []
    spec = runtime_spec("megatron-lm")
    if job.plan.recompute not in spec.recompute and not are_modules(job.plan.recompute, spec):
        not_expressed.append(
            f"recompute {job.plan.recompute!r}: written as selective, which recomputes core attention only"
        )
        job = job.with_plan(job.plan.with_(recompute="selective"))
    job = job.with_split_experts()
    overlap = NONE if job.plan.tp_overlap == NONE else USERBUFFERS
    notes = require_legal(job.with_plan(job.plan.with_(tp_overlap=overlap)), "megatron-lm", TITLE)
    plan, model, runtime = job.plan, job.question.model, job.question.runtime
    numbers = number_flags(model)
    flags = model_flags(model) | numbers | parallel_flags(job)
    if plan.zero_stage is None and plan.dp_shard > 1:
        not_expressed.append("FSDP2 is written as Megatron-FSDP, which is another implementation")
    if plan.recompute_per_stage:
        not_expressed.append(
            f"recompute per stage ({', '.join(plan.recompute_per_stage)}): one mode holds for all stages"
        )
    if plan.tp_overlap not in {NONE, USERBUFFERS}:
        not_expressed.append(
            f"tensor-parallel overlap {tp_overlap_label(plan.tp_overlap)}: written as --tp-comm-overlap,"
            " which has its own"
        )
    if runtime.param_dtype == "bfloat16" and not spec_for(runtime).state.master_weights:  # Megatron-LM has them
        not_expressed.append("parameters stored in bfloat16 only: Megatron-LM keeps float32 copies in its optimizer")
    recipe = runtime.low_precision_recipe
    if runtime.compute_dtype == "float8" and SYNONYMS.get(recipe, recipe) not in {"", *FP8_RECIPES}:
        not_expressed.append(f"recipe {recipe}: written as delayed, the default")
    if runtime.compile:
        not_expressed.append("torch.compile of the model: Megatron-LM compiles single functions only")
    not_expressed += _model_not_expressed(model)
    if runtime.optimizer not in {"adam", "adamw"}:
        not_expressed.append(f"optimizer {runtime.optimizer}: left at Adam")
    return [PROGRAM, *flag_words(flags), ShellExpression('"$@"')], Draft(
        body=TRIAL_LINES,
        settings=flags,
        not_expressed=tuple(not_expressed),
        needed=(
            f"{PROGRAM} of a Megatron-LM checkout",
            "data, tokenizer, learning rate, iterations and checkpoints, which no plan decides: append their flags",
            "nothing more to try the plan: without arguments the script runs on made-up data",
            *(() if numbers else (UNKNOWN_NUMBERS,)),
        ),
        notes=notes,
        environment=(CONNECTIONS,) if needs_one_connection(job) else (),
    )


def _model_not_expressed(model: Model) -> Iterator[str]:
    """Return the parts of the model that flags of pretrain_gpt.py cannot express."""
    if model.windowed_layers:
        yield f"sliding window of {model.sliding_window} in {model.windowed_layers} layers: add --window-size"
    if model.norms_per_layer != 2 or model.qk_norm_wide:
        yield f"the norms of {model.family}: Megatron-LM has two a layer, and per-head ones on queries and keys"
    if model.parallel_residual:
        yield "attention and feed-forward in parallel: Megatron-LM runs one after the other"
    if model.attention_out_bias != model.mlp_bias or model.head_bias:
        yield "biases on some projections only: Megatron-LM has them on all or none"
    if model.gated_mlp and model.family.startswith("gemma"):
        yield "the GELU in its gates: written as --swiglu, which costs the same"
    if model.multi_token_layers:
        yield f"layers that predict several tokens: add --mtp-num-layers {model.multi_token_layers}"


def needs_one_connection(job: ExportJob) -> bool:
    plan = job.plan
    early = job.question.cluster.slowest_kind.compute_capability < BLACKWELL
    return early and (plan.tp > 1 or plan.cp > 1) and to_zero_stage(plan) not in SHARDING


def write(job: ExportJob) -> Draft:
    """Return a shell script. Raises Infeasible."""
    words, draft = program(job)
    return started_script(job, words, draft)


TARGET = Target(
    name="megatron",
    version=VERSION,
    title="Megatron-LM",
    file_name="megatron.sh",
    write=write,
    table=TABLE,
    first_line="#!/bin/sh",
    run="sh megatron.sh",
)


def number_flags(model: Model) -> dict[str, Any]:
    """Return the flags of a known model's numbers that do not affect its cost; empty if only the shape is known.

    Flags: `megatron/training/arguments.py` and `TransformerConfig` of megatron-core 0.19.2.
    """
    config = _config(model)
    flags: dict[str, Any] = {}
    if "rms_norm_eps" in config:
        flags["--norm-epsilon"] = config["rms_norm_eps"]
    if model.rotary and "rope_theta" in config:
        flags["--rotary-base"] = int(config["rope_theta"])
    if "rotary_pct" in config:
        flags["--rotary-percent"] = config["rotary_pct"]
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        flags |= {"--use-rope-scaling": True, "--rope-scaling-factor": scaling["factor"]}
    elif scaling.get("type") == "yarn" and model.latent:
        names = {"factor": "--rotary-scaling-factor", "mscale": "--mscale", "mscale_all_dim": "--mscale-all-dim"}
        flags |= {flag: scaling[key] for key, flag in names.items()}
    return flags | (_router_flags(config) if model.moe else {})


def _config(model: Model) -> dict[str, Any]:
    """Return the config.json of a shipped model; empty for any other, even one that differs only in its positions."""
    if model.name not in shipped_models():
        return {}
    config = dict(read_json(SHIPPED / f"{model.name}.json"))
    same = replace(model_from_config(config, name=model.name), assumed=()) == replace(model, assumed=())
    return config if same else {}


def _router_flags(config: dict[str, Any]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    loss = config.get("router_aux_loss_coef", config.get("aux_loss_alpha"))
    if loss is not None:
        # DeepSeek's loss is per sequence, the others' over all tokens.
        kind = "seq_aux_loss" if config.get("seq_aux") else "aux_loss"
        flags |= {"--moe-router-load-balancing-type": kind, "--moe-aux-loss-coeff": loss}
    if config.get("scoring_func") == "sigmoid" and loss is not None:
        flags["--moe-router-bias-update-rate"] = BIAS_RATE
    if config.get("norm_topk_prob") is False:  # weights of the chosen experts do not sum to one
        flags["--moe-router-pre-softmax"] = True
    if config.get("n_group", 1) > 1:
        flags |= {"--moe-router-num-groups": config["n_group"], "--moe-router-group-topk": config["topk_group"]}
    if config.get("routed_scaling_factor", 1.0) != 1.0:
        flags["--moe-router-topk-scaling-factor"] = config["routed_scaling_factor"]
    return flags
