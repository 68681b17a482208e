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
        after_norm = operator.name in spec.after_norm
        position = _before_gather(out, operator)
        if recipe.fused and after_norm:
            _write_low(out[:position], _own_tokens(operator.matmul.split(",")[0]), out)
        out[position:position] = _quantise(operator, spec, recipe, name, after_norm=after_norm)
        also = (spec.keeps or {}).get(operator.name)
        wide = recipe.wide_weight_gradient or name in spec.saves_wide
        saved = (*operator.saves, *((also,) if also and not wide else ()))
        saves = saved if wide else tuple(f"{tensor}:low" for tensor in saved)
        out.append(replace(operator, low=True, saves=saves, wide_weight_gradient=recipe.wide_weight_gradient))
    return tuple(out)


def _write_low(before: Sequence[OperatorSpec], tensor: str, out: list[OperatorSpec]) -> None:
    """Let the norm among the operators `before` a product, the first of `out`, write `tensor` in the low type."""
    for position, operator in enumerate(before):
        if operator.name.endswith("norm") and operator.writes == (tensor,):
            out[position] = replace(operator, writes=(f"{tensor}:low",))


def _quantise(
    product: OperatorSpec, spec: LowPrecisionSpec, recipe: Recipe, name: str, *, after_norm: bool
) -> list[OperatorSpec]:
    """Return the operators that write a product's input in the low type, and backward the gradient of its result.

    What a norm has written, or tensor-parallel ranks have gathered, along one axis only is transposed afterwards: a
    tensor's input for its weight's gradient, in the backward pass.
    """
    operands, _, result = product.matmul.partition("->")
    given, wanted = operands.split(",")[0].strip(), result.strip()
    passes = int(spec.reads(name, recipe))
    first = passes - 1 if after_norm and recipe.norm_finds_largest else passes
    fused = recipe.fused and after_norm
    forward, backward = spec.cast_units or ("", "")

    def operator(when: tuple[str, ...], *, gathered: bool) -> OperatorSpec:
        own, own_wanted = _own_tokens(given), _own_tokens(wanted)
        transposes_given = recipe.transposed_later and (fused or (gathered and own != given))
        transposes_wanted = recipe.transposed_later and gathered and own_wanted != wanted
        transposed = (*((given,) if transposes_given else ()), *((wanted,) if transposes_wanted else ()))
        copies = tuple(f"{tensor}:low_transposed" for tensor in transposed)
        return OperatorSpec(
            name=f"{product.name}_quantise",
            when=(*product.when, *when),
            reads=() if fused else (own,) * first,
            writes=() if fused else (f"{own}:{'low' if transposes_given else 'low_copies'}",),
            launches=first,
            backward_reads=(*(own_wanted,) * passes, *copies),
            backward_writes=(f"{own_wanted}:{'low' if transposes_wanted else 'low_copies'}", *copies),
            backward_launches=passes,
            units={forward: (own,)} if forward else {},
            backward_units={backward: (own_wanted,)} if backward else {},
        )

    gathers = (given != _own_tokens(given) and not fused) or wanted != _own_tokens(wanted)
    if not (recipe.transposed_later and spec.gathers_tokens and gathers):
        return [operator((), gathered=False)]
    return [operator(("sp",), gathered=True), operator(("!sp",), gathered=False)]


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
