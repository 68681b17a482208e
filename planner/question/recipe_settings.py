"""Defaults from the recipes of a runtime and from the GPUs: keys of `runtime` and `plan` that a run does not state,
listed as assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.question.case_fields import unsaid
from simulator.config.model import Model
from simulator.config.runtime import LOW_PRECISION
from simulator.config.workload import Workload
from simulator.kernels.low_precision import has_no_bfloat16
from simulator.runtimes.library import is_described, runtime_spec
from simulator.runtimes.parts import RecipeSpec, RuntimeDefaults
from topology.cluster import Cluster, GpuKind
from topology.codec import JsonObject

_TYPES = ("param_dtype", "compute_dtype", "reduce_dtype")


def recipe_settings(
    runtime: Mapping[str, Any], plan: Mapping[str, Any], model: Model, cluster: Cluster, workload: Workload
) -> tuple[JsonObject, JsonObject, list[str]]:
    """Return a runtime and a plan with the settings of the runtime's recipes for such a run, and the assumptions.

    The first recipe with a key sets it, together with related settings such as the parts that graphs replay.
    """
    spec = runtime_spec(str(runtime["name"]))
    chosen, assumed = _types_of_the_gpus(runtime, spec.defaults, cluster.slowest_kind)
    planned = dict(plan)
    for recipe in spec.recipes:
        if not _is_of(recipe, runtime, model, cluster, workload) or (recipe.sharded and not _sharded(planned, model)):
            continue
        if _leaves_open(chosen, recipe.runtime):
            chosen |= recipe.runtime
            assumed += [f"{key} {_shown(value)} ({spec.names[0]}'s recipes)" for key, value in recipe.runtime.items()]
        if _leaves_open(planned, recipe.plan) and ("ep_overlap" not in recipe.plan or _can_overlap(planned)):
            planned |= recipe.plan
            assumed += [f"{key} {_shown(value)} ({spec.names[0]}'s recipes)" for key, value in recipe.plan.items()]
    return chosen, planned, assumed


def published_recompute(word: Any, runtime: str, assumed: list[str]) -> JsonObject:
    """Return the recompute mode that a publication means by `word`, where it is another than the runtime's default of
    that name.
    """
    means = runtime_spec(runtime).published_recompute if is_described(runtime) else {}
    if not isinstance(word, str) or word not in means:
        return {}
    assumed.append(f"recompute {means[word]} (what {runtime}'s configurations of networks set for {word})")
    return {"recompute": means[word]}


def _types_of_the_gpus(
    runtime: Mapping[str, Any], usual: RuntimeDefaults, gpu: GpuKind
) -> tuple[JsonObject, list[str]]:
    """Return a runtime with float16 for the bfloat16 it defaults to, on GPUs whose tensor cores lack the latter."""
    if not unsaid(runtime.get("compute_dtype")) or not has_no_bfloat16(gpu):
        return dict(runtime), []
    types = [key for key in _TYPES if unsaid(runtime.get(key)) and getattr(usual, key) == "bfloat16"]
    said = [f"float16 in the place of bfloat16, for which {gpu.name} has no tensor cores"] if types else []
    return {**runtime, **dict.fromkeys(types, "float16")}, said


def _is_of(recipe: RecipeSpec, runtime: Mapping[str, Any], model: Model, cluster: Cluster, workload: Workload) -> bool:
    return (
        (model.moe is not None or not recipe.experts)
        and model.layers >= recipe.least_layers
        and (not recipe.gpus or cluster.slowest_kind.name in recipe.gpus)
        and (
            not recipe.low_precision
            or runtime.get("low_precision_recipe") in recipe.low_precision
            or ("any" if runtime.get("compute_dtype") in LOW_PRECISION else "none") in recipe.low_precision
        )
        and (workload.routing == "balanced" or not recipe.balanced)
    )


def _leaves_open(stated: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    return bool(settings) and all(unsaid(stated.get(key)) for key in settings)


def _can_overlap(plan: Mapping[str, Any]) -> bool:
    """Return whether a plan runs passes of two micro batches at the same time and exchanges tokens in both."""
    staged = (plan.get("pp") or 1) == 1 or (plan.get("virtual_stages") or 1) > 1
    return staged and (plan.get("ep") or 1) > 1 and plan.get("recompute") != "full"


def _sharded(plan: Mapping[str, Any], model: Model) -> bool:
    """Return whether a plan shards the parameters of a model without experts, in one stage without recomputation."""
    shards = (plan.get("dp_shard") or 1) > 1 or plan.get("zero_stage") == 3
    return shards and model.moe is None and (plan.get("pp") or 1) == 1 and plan.get("recompute") in {None, "none"}


def _shown(value: Any) -> str:
    return "+".join(value) if isinstance(value, list) else str(value).lower()
