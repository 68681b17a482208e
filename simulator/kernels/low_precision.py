"""Recipes of low precision: bytes moved to quantise an operand, bytes of its copies, and the rate of its products."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from simulator.config.runtime import Runtime
from topology.cluster import GpuKind
from topology.codec import convert
from topology.errors import BadPlan

# Other names of recipes.
SYNONYMS = {"tensorwise": "current"}
# Default recipe of each type.
USUAL = {"float8": "current", "float4": "nvfp4"}
# Tensor cores multiply float4 at twice the rate of float8 at least (NVIDIA Blackwell architecture brief: 9 against 4.5
# PFLOP/s).
FLOAT4_OVER_FLOAT8 = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to compute products in a low type; see low_precision.toml for the meaning and source of each field."""

    dtype: str
    element_bytes: float
    reads: float
    fused: bool = False
    norm_finds_largest: bool = False
    transposed_later: bool = False
    wide_weight_gradient: bool = False
    transposed_on: tuple[str, ...] = ()
    only_on: tuple[str, ...] = ()  # empty: all GPUs whose tensor cores have the type
    rate: Mapping[str, float] = field(default_factory=dict)

    def written_bytes(self, architecture: str) -> float:
        """Return the bytes per number of all copies that quantising writes for the forward and backward pass."""
        return self.element_bytes + self.transposed_bytes(architecture)

    def transposed_bytes(self, architecture: str) -> float:
        """Return the bytes per number of the copy in the other direction; 0 where products need none."""
        return self.element_bytes if architecture.lower() in self.transposed_on else 0.0

    def relative_rate(self, architecture: str) -> float:
        """Return the arithmetic rate over that of a recipe with one scaling factor per tensor."""
        return self.rate.get(architecture.lower(), 1.0)


def recipe_of(runtime: Runtime) -> Recipe | None:
    """Return the recipe that a runtime states, or the default of its type; None for products in 16 bits or more.

    Raises BadPlan for a recipe that is not known.
    """
    if not runtime.low:
        return None
    name = runtime.low_precision_recipe or USUAL[runtime.compute_dtype]
    recipe = recipes().get(SYNONYMS.get(name, name))
    if recipe is None or recipe.dtype != runtime.compute_dtype:
        known = ", ".join(name for name, recipe in recipes().items() if recipe.dtype == runtime.compute_dtype)
        raise BadPlan(f"low_precision_recipe {name!r} is none of {runtime.compute_dtype}", why=f"known: {known}")
    return recipe


@cache
def recipes() -> Mapping[str, Recipe]:
    """Return every recipe by its name."""
    text = (resources.files("simulator") / "kernels" / "low_precision.toml").read_text("utf-8")
    known = {name: recipe for name, recipe in tomllib.loads(text).items() if name != "source"}
    return {name: convert(recipe, Recipe, where=f"low_precision.toml [{name}]") for name, recipe in known.items()}


def low_peak_flops(gpu: GpuKind, dtype: str) -> float:
    """Return the dense datasheet rate of a low type on a GPU; 0 where its tensor cores do not have it."""
    float8 = gpu.peak_flops.get("float8", 0.0)
    if dtype == "float8":
        return float8
    blackwell = gpu.architecture.lower().startswith(("blackwell", "rubin"))
    return gpu.peak_flops.get("float4", FLOAT4_OVER_FLOAT8 * float8 if blackwell else 0.0)


def has_no_bfloat16(gpu: GpuKind) -> bool:
    """Return whether tensor cores of a GPU have float16 alone, as before Ampere."""
    return "float16" in gpu.peak_flops and "bfloat16" not in gpu.peak_flops


def why_not(runtime: Runtime, gpu: GpuKind) -> str:
    """Return why a GPU cannot compute products as a runtime states; empty if it can."""
    recipe = recipe_of(runtime)
    if recipe is None:
        lacks = runtime.compute_dtype == "bfloat16" and has_no_bfloat16(gpu)
        return f"{gpu.name} has no tensor cores for bfloat16" if lacks else ""
    if not low_peak_flops(gpu, recipe.dtype):
        return f"{gpu.name} has no tensor cores for {recipe.dtype}"
    if recipe.only_on and gpu.architecture.lower() not in recipe.only_on:
        return (
            f"{runtime.low_precision_recipe} needs tensor cores that scale blocks ({', '.join(recipe.only_on)}),"
            f" not {gpu.name}"
        )
    return ""
