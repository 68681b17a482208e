"""Matrix products, convolutions and lookups: what is summed over leaves partial sums."""

from __future__ import annotations

from typing import Any

from planner.sharding.frontends.rules.statement import (
    LETTERS,
    Call,
    NotKnownError,
    Shape,
    Statement,
    letters,
    result_axes,
)


def _product(call: Call, formula: str, annotation: str, bias: str, bias_axes: str, **kernel: Any) -> list[Statement]:
    """A product and, as an operator of its own, its bias: it is added once, after what the product leaves pending."""
    if not bias:
        return [call.statement(formula, annotation, **kernel)]
    result = annotation.rpartition("->")[2].strip()
    product_name = f"{call.node.name}_product"[-64:]
    rank, where = len(call.node.shape), result.split().index(bias_axes) if bias_axes in result.split() else -1
    first = call.statement(formula, annotation, result=product_name, **kernel)
    args = ({"tensor": product_name}, {"tensor": bias}, where % rank)
    annotation = f"{result}, {bias_axes} -> {result}"
    after = rank - 1 - where % rank
    added = f"reshape({bias}, {', '.join(['-1', *['1'] * after])})" if after else bias
    formula = f"{product_name} + {added}"
    second = call.statement(formula, annotation, op="bias", args=args, kwargs={}, sizes=first.sizes)
    return [first, second]


def linear(call: Call) -> list[Statement]:
    x, w = call.shape(0), call.shape(1)
    if not x or len(w) != 2:
        raise NotKnownError
    lead = [LETTERS[d] if n > 1 else "1" for d, n in enumerate(x[:-1])]
    annotation = f"{' '.join([*lead, 'y+'])}, z y+ -> {' '.join([*lead, 'z'])}"
    formula = f"linear({call.tensor(0)}, {call.tensor(1)})"
    args = (call.argument(0), call.argument(1))
    bias = call.optional_tensor(2, "bias")
    return _product(call, formula, annotation, bias, "z", op="aten.linear.default", args=args, kwargs={})


def addmm(call: Call) -> list[Statement]:
    if call.node.kwargs or len(call.shape(0)) != 1:
        raise NotKnownError
    formula = f"{call.tensor(1)} @ {call.tensor(2)}"
    args = (call.argument(1), call.argument(2))
    annotation = "x y+, y+ z -> x z"
    return _product(call, formula, annotation, call.tensor(0), "z", op="aten.matmul.default", args=args)


def matmul(call: Call) -> list[Statement]:
    x, w = call.shape(0), call.shape(1)
    if len(x) < 2 or len(w) < 2:
        raise NotKnownError
    rank = len(call.node.shape)
    batch = [LETTERS[d] if n > 1 else "1" for d, n in enumerate(call.node.shape[:-2])]

    def lead(shape: Shape) -> list[str]:
        skipped = rank - len(shape)
        return [batch[skipped + d] if n > 1 else "1" for d, n in enumerate(shape[:-2])]

    left = [*lead(x), "x" if x[-2] > 1 else "1", "y+"]
    right = [*lead(w), "y+", "z" if w[-1] > 1 else "1"]
    result = [*batch, left[-2], right[-1]]
    formula = f"{call.tensor(0)} @ {call.tensor(1)}"
    return [call.statement(formula, f"{' '.join(left)}, {' '.join(right)} -> {' '.join(result)}")]


def einsum(call: Call) -> list[Statement]:
    equation, listed = call.argument(0), call.argument(1)
    names = [str(one["tensor"]) for one in listed]
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(set(names)) != len(names):
        raise NotKnownError
    left, _, right = equation.replace(" ", "").partition("->")
    if any(len(set(part)) != len(part) for part in (*left.split(","), right)):
        raise NotKnownError
    marked = [" ".join(axis + ("" if axis in right else "+") for axis in part) for part in left.split(",")]
    return [call.statement(f'einsum("{equation}", {", ".join(names)})', f"{', '.join(marked)} -> {' '.join(right)}")]


def convolution(call: Call) -> list[Statement]:
    x, w = call.shape(0), call.shape(1)
    groups = call.argument(6, 1)
    if groups != 1 or len(x) not in {3, 4, 5} or len(w) != len(x):
        raise NotKnownError
    space = range(2, len(x))
    made, sizes = result_axes(call.node.shape, list(space))
    across = " ".join(f"p{d}^" if x[d] > 1 else "1" for d in space)
    window = " ".join(f"q{d}^" if w[d] > 1 else "1" for d in space)
    n, c = ("x" if x[0] > 1 else "1"), ("y+" if x[1] > 1 else "1")
    annotation = f"{n} {c} {across}, z {c} {window} -> {n} z {' '.join(made)}"
    args = (call.argument(0), call.argument(1), None, *call.node.args[3:])
    rest = [one if isinstance(one, int) else f"({', '.join(str(int(n)) for n in one)},)" for one in call.node.args[3:6]]
    formula = f"{call.name}({', '.join([call.tensor(0), call.tensor(1), 'None', *map(str, rest)])})"
    bias = call.optional_tensor(2, "bias")
    return _product(call, formula, annotation, bias, "z", args=args, sizes=sizes)


def embedding(call: Call) -> list[Statement]:
    if call.argument(2, -1) != -1 or call.argument(4, default=False):
        raise NotKnownError
    ids = " ".join(letters(call.shape(1)))
    formula = f"embedding({call.tensor(1)}, {call.tensor(0)})"
    args = (call.argument(0), call.argument(1))
    return [call.statement(formula, f"{ids}, y+ z -> {ids} z", op="embedding", args=args, kwargs={})]
