"""The operators of a layer whose products run in float8 or float4: with what quantises their operands, and what is
kept.

Quantising is written into the sequence as operators of its own, so that it is timed, launched and recomputed like any
other.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.kernels.low_precision import Recipe
from simulator.kernels.operators import OperatorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPrecisionSpec:
    """How a runtime multiplies in a low type: the `recipe` that it has by default, and which products stay
    `wide` (patterns of operator names; the head and the embedding always do).

    `after_norm` are products whose input a norm may write in the low type itself. `gathers_tokens`: tensor-parallel
    ranks gather what has been quantised. `gathers_weights`: parameters are stored, and gathered over data-parallel
    ranks, in the low type; otherwise 16-bit ones are quantised once a step. `keeps` are inputs of products, by name,
    that are kept in the low type alongside the 16-bit tensor that an operator before keeps.
    """

    recipe: str
    wide: tuple[str, ...] = ()
    after_norm: tuple[str, ...] = ()
    gathers_tokens: bool = False
    gathers_weights: bool = False
    keeps: dict[str, str] | None = None


def quantized(operators: Sequence[OperatorSpec], spec: LowPrecisionSpec, recipe: Recipe) -> tuple[OperatorSpec, ...]:
    """Return `operators` with products, and what feeds them, in the recipe's type."""
    out: list[OperatorSpec] = []
    for operator in operators:
        if not operator.matmul or any(fnmatch.fnmatchcase(operator.name, pattern) for pattern in spec.wide):
            gathers = spec.gathers_tokens and operator.over == "tp" and bool(operator.collective)
            out.append(replace(operator, low=True) if gathers else operator)
            continue
        quantise = _quantise(operator, recipe, fused=recipe.fused and operator.name in spec.after_norm)
        out.insert(_before_gather(out, operator), quantise)
        also = (spec.keeps or {}).get(operator.name)
        saved = (*operator.saves, *((also,) if also and not recipe.wide_weight_gradient else ()))
        saves = saved if recipe.wide_weight_gradient else tuple(f"{tensor}:low" for tensor in saved)
        out.append(replace(operator, low=True, saves=saves, wide_weight_gradient=recipe.wide_weight_gradient))
    return tuple(out)


def _quantise(product: OperatorSpec, recipe: Recipe, *, fused: bool) -> OperatorSpec:
    """Return what writes a product's input in the low type, and backward the gradient of its result."""
    operands, _, result = product.matmul.partition("->")
    given, wanted = _own_tokens(operands.split(",")[0]), _own_tokens(result)
    passes = int(recipe.reads)
    return OperatorSpec(
        name=f"{product.name}_quantise",
        when=product.when,
        reads=() if fused else (given,) * passes,
        writes=() if fused else (f"{given}:low_copies",),
        launches=recipe.reads,
        backward_reads=(wanted,) * passes,
        backward_writes=(f"{wanted}:low_copies",),
        backward_launches=recipe.reads,
    )


def _own_tokens(tensor: str) -> str:
    """Return a tensor as a rank has it before tokens are gathered: what is as wide as the model is quantised there."""
    return "u h" if tensor.strip() == "t h" else tensor.strip()


def _before_gather(out: Sequence[OperatorSpec], product: OperatorSpec) -> int:
    """Return where the operator that quantises a product's input stands: before the gather of that input, if there is
    one.
    """
    given = product.matmul.split(",")[0].strip()
    for position in range(len(out) - 1, -1, -1):
        if out[position].matmul:
            break
        if out[position].collective == "all_gather" and out[position].tensor == given:
            return position
    return len(out)
