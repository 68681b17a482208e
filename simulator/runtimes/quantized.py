"""The operators of a layer whose products run in float8 or float4, with the operators that quantise their inputs.

Quantising operators are part of the sequence, so they are timed, launched and recomputed like any other.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.kernels.low_precision import Recipe
from simulator.kernels.operators import OperatorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPrecisionSpec:
    """How a runtime computes products in a low type: its default `recipe`, and the products that stay `wide` (patterns
    of operator names; the head and the embedding always do).

    `after_norm`: products whose input a norm may write in the low type itself. `gathers_tokens`: tensor-parallel ranks
    gather quantised tokens. `gathers_weights`: parameters are stored, and gathered over data-parallel ranks, in the low
    type; otherwise 16-bit parameters are quantised once per step, or with `every_pass` for each micro batch. `keeps`:
    inputs of products, by name, that are saved in the low type in addition to the 16-bit tensor that an earlier
    operator saves. `by_direction`: recipes whose copies for the two directions are written by a kernel each, which
    reads again.
    `saves_wide`: recipes that save 16-bit inputs and quantise them again in the backward pass. `cast_units`: what
    quantising an input, and a gradient, counts (`unit_s` of efficiency.toml) where that takes longer than their bytes.
    """

    recipe: str
    wide: tuple[str, ...] = ()
    after_norm: tuple[str, ...] = ()
    gathers_tokens: bool = False
    gathers_weights: bool = False
    every_pass: bool = False
    keeps: dict[str, str] | None = None
    by_direction: tuple[str, ...] = ()
    saves_wide: tuple[str, ...] = ()
    cast_units: tuple[str, str] | None = None

    def reads(self, name: str, recipe: Recipe) -> float:
        """Return how often a 16-bit tensor is read to quantise it by the recipe called `name`."""
        return recipe.reads * (2.0 if name in self.by_direction else 1.0)


def quantized(
    operators: Sequence[OperatorSpec], spec: LowPrecisionSpec, recipe: Recipe, name: str = ""
) -> tuple[OperatorSpec, ...]:
    """Return `operators` with products, and the operators that write their inputs, in the type of the recipe `name`."""
    out: list[OperatorSpec] = []
    for operator in operators:
        if not operator.matmul or any(fnmatch.fnmatchcase(operator.name, pattern) for pattern in spec.wide):
            gathers = spec.gathers_tokens and operator.over == "tp" and bool(operator.collective)
            out.append(replace(operator, low=True) if gathers else operator)
            continue
        fused = recipe.fused and operator.name in spec.after_norm
        quantise = _quantise(operator, spec.reads(name, recipe), spec.cast_units, fused=fused)
        out.insert(_before_gather(out, operator), quantise)
        also = (spec.keeps or {}).get(operator.name)
        wide = recipe.wide_weight_gradient or name in spec.saves_wide
        saved = (*operator.saves, *((also,) if also and not wide else ()))
        saves = saved if wide else tuple(f"{tensor}:low" for tensor in saved)
        out.append(replace(operator, low=True, saves=saves, wide_weight_gradient=recipe.wide_weight_gradient))
    return tuple(out)


def _quantise(product: OperatorSpec, reads: float, cast_units: tuple[str, str] | None, *, fused: bool) -> OperatorSpec:
    """Return the operator that reads a product's input `reads` times and writes it in the low type, and in the backward
    pass its result's gradient.
    """
    operands, _, result = product.matmul.partition("->")
    given, wanted = _own_tokens(operands.split(",")[0]), _own_tokens(result)
    passes = int(reads)
    forward, backward = cast_units or ("", "")
    return OperatorSpec(
        name=f"{product.name}_quantise",
        when=product.when,
        reads=() if fused else (given,) * passes,
        writes=() if fused else (f"{given}:low_copies",),
        launches=reads,
        backward_reads=(wanted,) * passes,
        backward_writes=(f"{wanted}:low_copies",),
        backward_launches=reads,
        units={forward: (given,)} if forward else {},
        backward_units={backward: (wanted,)} if backward else {},
    )


def _own_tokens(tensor: str) -> str:
    """Return a tensor with the axes that it has on a rank before tokens are gathered: tensors of the model's width are
    quantised there.
    """
    return "u h" if tensor.strip() == "t h" else tensor.strip()


def _before_gather(out: Sequence[OperatorSpec], product: OperatorSpec) -> int:
    """Return the position of the operator that quantises a product's input: before the gather of that input, if there
    is one.
    """
    given = product.matmul.split(",")[0].strip()
    for position in range(len(out) - 1, -1, -1):
        if out[position].matmul:
            break
        if out[position].collective == "all_gather" and out[position].tensor == given:
            return position
    return len(out)
