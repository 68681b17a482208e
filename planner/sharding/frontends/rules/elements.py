"""Operators element by element, and views of the same elements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from planner.sharding.frontends.rules.statement import (
    LETTERS,
    Call,
    NotKnownError,
    Shape,
    Statement,
    letters,
    result_axes,
)

# ATen's names of operators that compute every element of the result from the same element of their operands.
POINTWISE = frozenset(
    (
        "abs",
        "acos",
        "add",
        "addcmul",
        "asin",
        "atan",
        "atan2",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "bitwise_xor",
        "ceil",
        "celu",
        "clamp",
        "clamp_max",
        "clamp_min",
        "cos",
        "cosh",
        "div",
        "elu",
        "eq",
        "erf",
        "exp",
        "expm1",
        "floor",
        "floor_divide",
        "fmod",
        "ge",
        "gelu",
        "gt",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "isfinite",
        "isinf",
        "isnan",
        "le",
        "leaky_relu",
        "lerp",
        "log",
        "log10",
        "log1p",
        "log2",
        "log_sigmoid",
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
        "lt",
        "masked_fill",
        "maximum",
        "minimum",
        "mish",
        "mul",
        "ne",
        "neg",
        "pow",
        "prelu",
        "reciprocal",
        "relu",
        "relu6",
        "remainder",
        "round",
        "rsqrt",
        "rsub",
        "selu",
        "sigmoid",
        "sign",
        "silu",
        "sin",
        "sinh",
        "softplus",
        "sqrt",
        "square",
        "sub",
        "tan",
        "tanh",
        "tanhshrink",
        "threshold",
        "true_divide",
        "trunc",
        "where",
        "_to_copy",
        "to",
        "type_as",
        "float",
        "half",
        "bool",
    )
)
_CASTS = frozenset(("to", "_to_copy", "type_as", "float", "half", "bool"))
SAME_ELEMENTS = frozenset(("contiguous", "clone", "detach", "alias", "lift_fresh_copy", "dropout", "detach_"))
RESHAPES = frozenset(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_copy"))


def pointwise(call: Call) -> list[Statement]:
    node = call.node
    operands = node.operands()
    if not operands or len(operands) > 3:
        raise NotKnownError
    rank = len(node.shape)
    dims = letters(node.shape)
    parts = []
    for name in operands:
        shape = call.shapes[name]
        lead = rank - len(shape)
        if lead < 0 or any(n not in {1, node.shape[lead + i]} for i, n in enumerate(shape)):
            raise NotKnownError
        parts.append(" ".join(dims[lead + i] if n > 1 else "1" for i, n in enumerate(shape)))
    annotation = f"{', '.join(parts)} -> {' '.join(dims)}"
    if call.name in _CASTS:
        annotation = f"{parts[0]} -> {' '.join(dims)}"
        formula, args = _formula(call, operands[:1]), (call.argument(0),)
        return [call.statement(formula, annotation, op="cast", args=args, kwargs={})]
    return [call.statement(_formula(call, operands), annotation)]


def _formula(call: Call, operands: Sequence[str]) -> str:
    """Return a pointwise formula that shows in which operands it is linear."""
    node = call.node
    signs = {"add": "+", "sub": "-", "mul": "*", "div": "/", "true_divide": "/"}
    if call.name == "neg":
        return f"-{operands[0]}"
    if call.name in {"to", "_to_copy", "type_as", "float"} and node.dtype in {"f64", "f32", "bf16", "f16"}:
        return f"to({operands[0]})"
    if call.name in signs and len(node.args) == 2 and not node.kwargs:
        both = [str(a["tensor"]) if isinstance(a, dict) else repr(a) for a in node.args]
        if all(isinstance(a, dict | int | float) for a in node.args):
            return f"{both[0]} {signs[call.name]} {both[1]}"
    return f"{call.name}({', '.join(operands)})"


def same_elements(call: Call) -> list[Statement]:
    dims = " ".join(letters(call.node.shape))
    args = (call.argument(0),)
    return [call.statement(f"contiguous({call.tensor(0)})", f"{dims} -> {dims}", op="same", args=args, kwargs={})]


def reshape(call: Call) -> list[Statement]:
    before, after, name = call.shape(0), call.node.shape, call.tensor(0)
    left, right, sizes = reshape_axes(before, after)
    return [
        call.statement(
            f"reshape({name}, {', '.join(map(str, after))})",
            f"{' '.join(left)} -> {' '.join(right)}",
            sizes=sizes,
            op="reshape",
            args=({"tensor": name},),
            kwargs={},
        )
    ]


def reshape_axes(before: Shape, after: Shape) -> tuple[list[str], list[str], dict[str, int]]:
    """Return the axes of a view's dims before and after, and their sizes: the factors that both shapes are made of.

    Dims that share no boundary between elements are one group; a group whose factors do not nest is needed whole.
    """
    left, right = [""] * len(before), [""] * len(after)
    sizes: dict[str, int] = {}
    i = j = number = 0
    while i < len(before) or j < len(after):
        here: list[int] = []
        there: list[int] = []
        have, want = 1, 1
        while True:
            if have == want and (here or there) and (have > 1 or (i == len(before) and j == len(after))):
                break
            if (have <= want and i < len(before)) or j == len(after):
                here.append(i)
                have *= before[i]
                i += 1
            else:
                there.append(j)
                want *= after[j]
                j += 1
        number += 1
        number = _name_group(before, after, here, there, left, right, sizes, number)
    return left, right, sizes


def _name_group(
    before: Shape,
    after: Shape,
    here: list[int],
    there: list[int],
    left: list[str],
    right: list[str],
    sizes: dict[str, int],
    number: int,
) -> int:
    """Name the axes of one group of dims; return the last number used."""
    cuts = sorted({prod(before[d] for d in here[k:]) for k in range(len(here) + 1)} | {
        prod(after[d] for d in there[k:]) for k in range(len(there) + 1)
    }, reverse=True)  # fmt: skip
    nested = all(big % small == 0 for big, small in pairwise(cuts))
    if not nested:
        for d in here:
            left[d] = f"w{number}{LETTERS[d]}^" if before[d] > 1 else "1"
        for d in there:
            right[d] = f"v{number}{LETTERS[d]}" if after[d] > 1 else "1"
            if after[d] > 1:
                sizes[right[d]] = after[d]
        return number
    axes = []
    for big, small in pairwise(cuts):
        size = big // small
        name = f"x{number}s{size}"
        number += 1
        axes.append((name, size))
        sizes[name] = size
    for dims, shape, out in ((here, before, left), (there, after, right)):
        rest = list(axes)
        for d in dims:
            own, left_over = [], shape[d]
            while left_over > 1:
                name, size = rest.pop(0)
                own.append(name)
                left_over //= size
            out[d] = "1" if not own else own[0] if len(own) == 1 else f"({' '.join(own)})"
    return number


def _permuted(call: Call, order: Sequence[int]) -> list[Statement]:
    dims = letters(call.shape(0))
    right = " ".join(dims[d] for d in order)
    args = (call.argument(0), list(order))
    annotation = f"{' '.join(dims)} -> {right}"
    formula = f"permute({call.tensor(0)}, {', '.join(map(str, order))})"
    return [call.statement(formula, annotation, op="permute", args=args, kwargs={})]


def transpose(call: Call) -> list[Statement]:
    order = list(range(len(call.shape(0))))
    if call.name in {"t", "numpy_T"}:
        return _permuted(call, order[::-1])
    if call.name in {"mT", "adjoint"}:
        return _permuted(call, [*order[:-2], order[-1], order[-2]])
    first, second = (call.dim(p, len(order)) for p in (1, 2))
    order[first], order[second] = order[second], order[first]
    return _permuted(call, order)


def permute(call: Call) -> list[Statement]:
    rank = len(call.shape(0))
    return _permuted(call, [int(d) % rank for d in call.argument(1)])


def expand(call: Call) -> list[Statement]:
    before, after = call.shape(0), call.node.shape
    lead = len(after) - len(before)
    dims = letters(before)
    new = [d for d in range(len(after)) if d < lead or (before[d - lead] == 1 and after[d] > 1)]
    names, sizes = result_axes(after, new)
    made = dict(zip(new, names, strict=True))
    right = [made.get(d) or dims[d - lead] for d in range(len(after))]
    annotation = f"{' '.join(dims)} -> {' '.join(right)}"
    args = (call.argument(0),)
    return [
        call.statement(
            f"expand({call.tensor(0)}, {', '.join(map(str, after))})",
            annotation,
            sizes=sizes,
            op="expand",
            args=args,
            kwargs={},
        )
    ]


def repeat_interleave(call: Call) -> list[Statement]:
    shape, times = call.shape(0), call.argument(1)
    dim = call.dim(2, len(shape))
    dims = letters(shape)
    right = [f"({dims[dim]} t{times})" if d == dim and n != "1" else n for d, n in enumerate(dims)]
    if dims[dim] == "1":
        right[dim] = f"t{times}"
    args = (call.argument(0), int(times), dim)
    sizes = {f"t{times}": int(times)}
    annotation = f"{' '.join(dims)} -> {' '.join(right)}"
    formula = f"repeat_interleave({call.tensor(0)}, {times}, {dim})"
    return [call.statement(formula, annotation, sizes=sizes, op="repeat_interleave", args=args, kwargs={})]
