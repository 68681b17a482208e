"""What a run does not state, from recipes: the global batch, about as many tokens per step as in a published recipe for
a model of that size, and keys of `runtime` and `plan`, listed as assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, log2
from typing import Any

from planner.question.case_fields import unsaid
from simulator.config.model import Model
from simulator.config.runtime import DEFAULT_RUNTIME, LOW_PRECISION
from simulator.config.workload import Workload
from simulator.kernels.low_precision import has_no_bfloat16
from simulator.legality.frameworks import DEEPSPEED, MEGATRON, framework_named
from simulator.runtimes.library import is_described, runtime_spec
from simulator.runtimes.parts import RecipeSpec, RuntimeDefaults
from topology.cluster import Cluster, GpuKind
from topology.codec import JsonObject

_TYPES = ("param_dtype", "compute_dtype", "reduce_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The published pretraining of a model with `parameters`: `tokens` per step, the last value if the batch grew."""

    name: str
    parameters: float
    tokens: int
    source: str


GPT3 = "arXiv 2005.14165, table 2.1"
LLAMA2 = "arXiv 2307.09288, section 2.2"
RECIPES = (
    Recipe(name="GPT-3 Small", parameters=125e6, tokens=1 << 19, source=GPT3),
    Recipe(name="GPT-3 Large", parameters=760e6, tokens=1 << 19, source=GPT3),
    Recipe(name="GPT-3 XL", parameters=1.3e9, tokens=1 << 20, source=GPT3),
    Recipe(name="GPT-3 2.7B", parameters=2.7e9, tokens=1 << 20, source=GPT3),
    Recipe(name="Llama 2 7B", parameters=6.7e9, tokens=1 << 22, source=LLAMA2),
    Recipe(name="Llama 2 13B", parameters=13e9, tokens=1 << 22, source=LLAMA2),
    Recipe(name="Llama 2 70B", parameters=69e9, tokens=1 << 22, source=LLAMA2),
    Recipe(name="GPT-3 175B", parameters=175e9, tokens=3_200_000, source=GPT3),
    Recipe(name="Llama 3 405B", parameters=405e9, tokens=1 << 24, source="arXiv 2407.21783, section 3.4.1"),
    Recipe(name="DeepSeek-V3", parameters=671e9, tokens=15360 * 4096, source="arXiv 2412.19437, section 4.2"),
)


# Sequences of a step per GPU in recipes of LoRA for Llama 3 8B, which tools start with on any number of GPUs.
TUNED_PER_GPU = 8
TUNED = (
    "LLaMA-Factory's examples/train_lora/llama3_lora_sft.yaml, 1 x 8 accumulated; axolotl's"
    " examples/llama-3/lora-8b.yml, 2 x 4"
)


SEQ_LEN = 8192  # tokens of a sequence, unless the model's own limit is less


def default_length(model: Model) -> int:
    """Return the tokens of a sequence where no length is stated."""
    return min(SEQ_LEN, model.max_positions or SEQ_LEN)


def default_batch(model: Model, seq_len: int, gpus: int, *, tuned: bool = False) -> tuple[int, str]:
    """Return the sequences of a step, and the name of the recipe; `tuned` is for adapters or frozen weights.

    The number is a multiple of `gpus` and of powers of two, or a power of two if a step has fewer sequences than GPUs,
    so it can be divided by many numbers of data-parallel ranks and micro batch sizes.
    """
    if tuned:
        batch = TUNED_PER_GPU * gpus
        return batch, f"global batch {batch:,} sequences ({TUNED_PER_GPU} a GPU, as in fine-tuning: {TUNED})"
    recipe = min(RECIPES, key=lambda one: abs(log(one.parameters / model.parameters)))
    sequences = recipe.tokens / seq_len
    if sequences >= gpus:
        several = 1 << max(0, int(log2(sequences / gpus)) - 3)
        batch = max(1, round(sequences / gpus / several)) * several * gpus
    else:
        batch = 1 << max(0, round(log2(max(sequences, 1))))
    tokens, theirs = (f"{count / 1e6:.2g}M" for count in (batch * seq_len, recipe.tokens))
    like = f"as {recipe.name}" if tokens == theirs else f"near the {theirs} of {recipe.name}"
    return batch, f"global batch {batch:,} sequences ({tokens} tokens a step, {like}: {recipe.source})"


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


def usual_framework(machine: Cluster, runtime: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the framework where none is named, and why if it is another one than usual: one that has float16, on GPUs
    without bfloat16, and the adapters that are asked for.
    """
    gpu, asked = machine.slowest_kind, runtime.get("adapter")
    if runtime.get("compute_dtype") or not has_no_bfloat16(gpu):
        return DEFAULT_RUNTIME, []
    able = MEGATRON if asked is None or asked["kind"] in MEGATRON.adapters else DEEPSPEED
    usual = framework_named(DEFAULT_RUNTIME).title
    return able.name, [f"framework {able.name}: {usual} has no float16, and {gpu.name} no bfloat16"]


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
