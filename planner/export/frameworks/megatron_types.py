"""Number formats in Megatron-LM's flags, and the layers that stay in 16 bits where others multiply in fewer."""

from __future__ import annotations

from planner.export.frameworks.megatron_model import set_flags
from planner.export.mapping import Entry, Facts, NotModelled, Settings, Table, truth, whole
from simulator.config.runtime import LOW_PRECISION
from simulator.kernels.low_precision import SYNONYMS
from topology.errors import BadInput

_TYPES = (
    *("--bf16", "--fp16", "--fp8-format", "--fp8-recipe", "--fp8-param-gather", "--fp4-format", "--fp4-recipe"),
    "--grad-reduce-in-bf16",
)
# Layers that stay in 16 bits, with the number of each end, by default one (megatron/training/arguments.py).
WIDE = "--first-last-layers-bf16"
WIDE_ENDS = ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")
# Recipes of float8 by its words; the default is delayed.
FP8_RECIPES = {"delayed": "delayed", "current": "tensorwise", "blockwise": "blockwise", "mxfp8": "mxfp8"}


def _write_types(facts: Facts) -> Settings:
    compute, recipe = facts["compute_dtype"], str(facts.get("low_precision_recipe") or "delayed")
    recipe = FP8_RECIPES.get(SYNONYMS.get(recipe, recipe), "delayed")
    return set_flags(
        {
            "--bf16": compute in {"bfloat16", "float8", "float4"},
            "--fp16": compute == "float16",
            "--fp8-format": "hybrid" if compute == "float8" else None,
            "--fp8-recipe": recipe if compute == "float8" and recipe != "delayed" else None,
            "--fp4-format": "e2m1" if compute == "float4" else None,
            "--fp8-param-gather": compute == "float8" and bool(facts["zero_stage"]),
            "--grad-reduce-in-bf16": facts["reduce_dtype"] == "bfloat16",
        }
    )


def _write_wide(facts: Facts) -> Settings:
    if facts["compute_dtype"] not in LOW_PRECISION or not any(facts["wide_layers"]):
        return {}
    return {WIDE: True, **dict(zip(WIDE_ENDS, facts["wide_layers"], strict=True))}


def _read_wide(settings: Settings, _: Facts) -> Facts:
    if not truth(settings, WIDE):
        return {"wide_layers": (0, 0)}
    return {"wide_layers": tuple(whole(settings, flag, 1, least=0) for flag in WIDE_ENDS)}


def _read_types(settings: Settings, _: Facts) -> Facts:
    bf16, fp16 = truth(settings, "--bf16"), truth(settings, "--fp16")
    if bf16 and fp16:
        raise BadInput("--bf16 and --fp16 exclude each other")
    stored = "bfloat16" if bf16 else "float16" if fp16 else "float32"
    low, lower = "--fp8-format" in settings or "--fp8-hybrid" in settings, bool(settings.get("--fp4-format"))
    if low and lower:
        raise BadInput("--fp8-format and --fp4-format exclude each other")
    # arguments.py: gradients are accumulated and reduced in float32 with bf16 by default.
    reduce = "bfloat16" if truth(settings, "--grad-reduce-in-bf16") else "float16" if fp16 else "float32"
    if truth(settings, "--accumulate-allreduce-grads-in-fp32"):
        reduce = "float32"
    found = {"param_dtype": stored, "compute_dtype": stored, "reduce_dtype": reduce}
    if not low and not lower:
        return found
    flag, words = ("--fp8-recipe", [*FP8_RECIPES.values()]) if low else ("--fp4-recipe", ["nvfp4"])
    recipe = settings.get(flag)
    if recipe is not None and recipe not in words:
        raise NotModelled(f"{flag} {str(recipe)[:40]} is not modelled", remedy=f"known: {', '.join(words)}")
    return (
        found | {"compute_dtype": "float8" if low else "float4"} | ({"low_precision_recipe": recipe} if recipe else {})
    )


TYPE_ENTRIES: Table = (
    Entry(keys=_TYPES, write=_write_types, read=_read_types),
    Entry(keys=(WIDE, *WIDE_ENDS), write=_write_wide, read=_read_wide),
)
