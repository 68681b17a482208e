"""Range checks of a model, a plan, a workload, a runtime and an estimate, which hold for every framework.

Decoding a file checks types, not values. Here every field has a range, so that later code never meets a negative count,
a product beyond 64 bits or a number format without a width. `simulator.legality` decides whether a plan is legal on
given GPUs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from simulator.config.adapter import ALL_LINEAR, BASE_BYTES, DORA, FROZEN, KINDS, LORA, MODULES, MOST_RANK, Adapter
from simulator.config.estimate import Estimate, Interval
from simulator.config.model import Model
from simulator.config.overlap_sites import modes_by_site
from simulator.config.plan import PLAN_FIELDS, Plan
from simulator.config.plan_schema import MAX_COUNT, MAX_GPUS, MAX_LAYERS, MAX_WORD, Kind, PlanField
from simulator.config.runtime import COMPUTE_ONLY, DTYPE_BYTES, EXPERT_PRODUCTS, MOE_DISPATCHERS, Runtime
from simulator.config.workload import ROUTINGS, Workload
from topology.errors import BadModel, BadPlan
from topology.ranges import Range, out_of_range, shown

MAX_PARAMETERS = 1 << 53  # exact as a float; a thousand times the largest model
NORMS = ("rmsnorm", "layernorm")
MODEL_RANGES: dict[str, Range] = {
    **dict.fromkeys(
        ("hidden", "heads", "kv_heads", "head_dim", "vocab", "experts", "experts_per_token"), (1, MAX_COUNT)
    ),
    **dict.fromkeys(("kv_lora_rank", "v_head_dim", "width", "keys"), (1, MAX_COUNT)),
    **dict.fromkeys(("ffn", "shared_ffn", "learned_positions", "sliding_window", "max_positions"), (0, MAX_COUNT)),
    **dict.fromkeys(("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), (0, MAX_COUNT)),
    **dict.fromkeys(("dense_layers", "dense_layer_ids", "sliding_layers", "multi_token_layers"), (0, MAX_LAYERS)),
    "layers": (1, MAX_LAYERS),
    "norms_per_layer": (0, 8),
}
ESTIMATE_RANGES: dict[str, Range] = {"mfu": (0, 2), "worst_rank": (0, MAX_GPUS), "sources": (0, 1 + 1e-6)}


def verify_model(model: Model, *, where: str) -> None:
    """Raise BadModel, with the field and what is allowed, unless `model` is a network that can be counted."""
    for problem in out_of_range(model, MODEL_RANGES, path="model"):
        raise BadModel(f"{where}: {problem}")
    moe = model.moe
    wrong = {
        f"norm is {shown(model.norm)}, known: {', '.join(NORMS)}": model.norm not in NORMS,
        f"heads {model.heads} is not a multiple of kv_heads {model.kv_heads}": model.heads % model.kv_heads,
        f"family is {shown(model.family)}": not model.family.isprintable() or len(model.family) > MAX_WORD,
    }
    if moe is not None:
        chosen = f"moe.experts_per_token {moe.experts_per_token} of {moe.experts} experts"
        wrong |= {
            chosen: moe.experts_per_token > moe.experts,
            f"moe.dense_layers {moe.dense_layers} of {model.layers}": moe.dense_layers > model.layers,
            "moe.dense_layer_ids names a layer that is not there": max(moe.dense_layer_ids, default=0) >= model.layers,
        }
    slid = model.sliding_layers
    last = slid if isinstance(slid, int) else max(slid, default=-1) + 1
    wrong[f"sliding_layers reach layer {last} of {model.layers}"] = last > model.layers
    for problem, found in wrong.items():
        if found:
            raise BadModel(f"{where}: model.{problem}")
    if model.parameters > MAX_PARAMETERS:
        raise BadModel(f"{where}: model has {model.parameters:.3g} parameters", why=f"at most {MAX_PARAMETERS:.3g}")


def verify_estimate(estimate: Estimate, *, where: str) -> None:
    """Raise BadPlan, with the field and what is allowed, unless every number of `estimate` is possible for a plan."""
    for problem in out_of_range(estimate, ESTIMATE_RANGES, path="estimate"):
        raise BadPlan(f"{where}: {problem}")
    for name, interval in (("step_s", estimate.step_s), ("memory.peak_bytes", estimate.memory.peak_bytes)):
        _verify_interval(interval, f"{where}: estimate.{name}")
    if estimate.memory.capacity_bytes <= 0:
        raise BadPlan(
            f"{where}: estimate.memory.capacity_bytes is {estimate.memory.capacity_bytes:g}", why="above zero"
        )


def _verify_interval(interval: Interval, where: str) -> None:
    if not 0 < interval.low <= interval.value <= interval.high:
        raise BadPlan(
            f"{where} is {interval.value:g} in {interval.low:g} to {interval.high:g}",
            why="a value is above zero and inside its range",
        )


def verify_plan(plan: Plan, *, where: str) -> None:
    """Raise BadPlan, with the field and what is allowed, unless every number of `plan` has a meaning.

    `where` begins the message: the file or case that contains the plan.
    """
    for name, known in PLAN_FIELDS.items():
        _verify_value(getattr(plan, name), known, f"{where}: plan.{name}")
    if plan.gpus > MAX_GPUS:
        raise BadPlan(f"{where}: the degrees of plan multiply to {plan.gpus:.3g} GPUs", why=f"at most {MAX_GPUS}")
    modes_by_site(plan.tp_overlap)


def _verify_value(value: Any, known: PlanField, where: str) -> None:
    if value is None:
        return
    if known.kind.listed:
        one = replace(known, kind=Kind.COUNT if known.kind is Kind.COUNTS else Kind.WORD)
        for index, part in enumerate(value):
            _verify_value(part, one, f"{where}[{index}]")
    elif known.kind is Kind.COUNT:
        _whole(value, where, known.least, known.most)
    elif known.kind is Kind.NUMBER and not (math.isfinite(value) and 0 < value < known.most):
        raise BadPlan(f"{where} is {shown(value)}", why="it must be a number above zero")
    elif known.choices and value not in known.choices:
        raise BadPlan(f"{where} is {shown(value)}", why=f"known: {', '.join(known.choices)}")
    elif known.kind is Kind.WORD:
        _word(value, where, known.longest)


def verify_lists(plan: Plan, *, where: str, layers: int, gpus: int) -> None:
    """Raise BadPlan where a list of a plan does not have one entry for each stage or rank, or does not match the
    model's layers or the cluster's GPUs.
    """
    stages = plan.stages
    listed, placed = plan.layers_per_stage, plan.placement
    if listed and (len(listed) != stages or sum(listed) != layers):
        raise BadPlan(
            f"{where}: plan.layers_per_stage lists {len(listed)} stages with {sum(listed)} layers",
            why=f"the plan has {stages} stages, the model {layers} layers",
        )
    if plan.recompute_per_stage and len(plan.recompute_per_stage) != stages:
        raise BadPlan(
            f"{where}: plan.recompute_per_stage names {len(plan.recompute_per_stage)} modes",
            why=f"the plan has {stages} stages",
        )
    if placed and (len(placed) != plan.gpus or len(set(placed)) != len(placed) or max(placed) >= gpus):
        raise BadPlan(
            f"{where}: plan.placement lists {len(placed)} GPUs, {len(set(placed))} of them distinct,"
            f" up to {max(placed)}",
            why=f"the plan has {plan.gpus} ranks, each on its own GPU from 0 to {gpus - 1}",
        )


def verify_workload(workload: Workload, *, where: str) -> None:
    """Raise BadPlan, with the field and what is allowed, unless `workload` is a step that can be trained."""
    if workload.task != "train":
        raise BadPlan(f"{where}: workload.task is {shown(workload.task)}", why="only train is predicted")
    _whole(workload.seq_len, f"{where}: workload.seq_len", 1, MAX_COUNT)
    _whole(workload.global_batch_size, f"{where}: workload.global_batch_size", 1, MAX_COUNT)
    load = workload.expert_imbalance
    if not (math.isfinite(load) and 1 <= load < MAX_COUNT):
        raise BadPlan(f"{where}: workload.expert_imbalance is {shown(load)}", why="it must be a number from 1 on")
    if workload.routing not in {"", *ROUTINGS}:
        raise BadPlan(f"{where}: workload.routing is {shown(workload.routing)}", why=f"known: {', '.join(ROUTINGS)}")
    _whole(workload.document_len, f"{where}: workload.document_len", 0, MAX_COUNT)
    for index, count in enumerate(workload.expert_counts):
        _whole(count, f"{where}: workload.expert_counts[{index}]", 0, MAX_COUNT)


def verify_runtime(runtime: Runtime, *, where: str) -> None:
    """Raise BadPlan, with the field and what is allowed, unless the number formats of `runtime` are known."""
    for name in ("name", "version", "optimizer", "low_precision_recipe", "moe_dispatcher", "expert_products"):
        _word(getattr(runtime, name), f"{where}: runtime.{name}")
    for name in ("param_dtype", "compute_dtype", "reduce_dtype"):
        value = getattr(runtime, name)
        if value not in {*DTYPE_BYTES, *COMPUTE_ONLY}:
            raise BadPlan(
                f"{where}: runtime.{name} is {shown(value)}",
                why=f"known: {', '.join(dict.fromkeys((*DTYPE_BYTES, *COMPUTE_ONLY)))}",
            )
    for name, known in (("moe_dispatcher", MOE_DISPATCHERS), ("expert_products", EXPERT_PRODUCTS)):
        if getattr(runtime, name) not in {"", *known}:
            raise BadPlan(
                f"{where}: runtime.{name} is {shown(getattr(runtime, name))}", why=f"known: {', '.join(known)}"
            )
    for index, count in enumerate(runtime.wide_layers):
        _whole(count, f"{where}: runtime.wide_layers[{index}]", 0, MAX_LAYERS)
    if runtime.adapter is not None:
        _verify_adapter(runtime.adapter, f"{where}: runtime.adapter")


def _verify_adapter(adapter: Adapter, where: str) -> None:
    for name, known in (("kind", KINDS), ("base_weights", ("", *BASE_BYTES))):
        if getattr(adapter, name) not in known:
            raise BadPlan(f"{where}.{name} is {shown(getattr(adapter, name))}", why=f"known: {', '.join(known)}")
    if adapter.kind in {LORA, DORA}:
        _whole(adapter.rank, f"{where}.rank", 1, MOST_RANK)
    for index, name in enumerate(adapter.target_modules):
        _word(name, f"{where}.target_modules[{index}]")
        if adapter.kind != FROZEN and name != ALL_LINEAR and name.lower() not in MODULES:
            raise BadPlan(f"{where}.target_modules[{index}] is {shown(name)}", why="it is no matrix of a layer")
    if not 0 <= adapter.dropout < 1:
        raise BadPlan(f"{where}.dropout is {shown(adapter.dropout)}", why="it is a share: from 0 up to 1")


def _whole(value: int, where: str, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadPlan(f"{where} is {shown(value)}", why=f"it must be a whole number from {least} to {most}")


def _word(value: str | None, where: str, longest: int = MAX_WORD) -> None:
    if value is not None and (len(value) > longest or not value.isprintable()):
        raise BadPlan(f"{where} is {shown(value)}", why=f"it must be one word of at most {longest} characters")
