"""Matrix products, convolutions and lookups: what is summed over leaves partial sums."""

from __future__ import annotations

from typing import Any

from planner.sharding.frontends.rules.elements import FLOATS
from planner.sharding.frontends.rules.statement import Call, NotKnownError, Statement

GROUPED_PRODUCTS = frozenset(("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"))


def _product(call: Call, formula: str, bias: str, dim: int, **kernel: Any) -> list[Statement]:
    """A product and, as an operator of its own, its bias along `dim`: it is added once, after what the product leaves
    pending.
    """
    if not bias:
        return [call.statement(formula, **kernel)]
    product_name = f"{call.node.name}_product"[-64:]
    first = call.statement(formula, result=product_name, **kernel)
    args = ({"tensor": product_name}, {"tensor": bias}, dim)
    after = len(call.node.shape) - 1 - dim
    added = f"reshape({bias}, {[-1, *[1] * after]})" if after else bias
    second = call.statement(f"{product_name} + {added}", op="bias", args=args, kwargs={})
    return [first, second]


def linear(call: Call) -> list[Statement]:
    x, w = call.shape(0), call.shape(1)
    if not x or len(w) != 2:
        raise NotKnownError
    formula = f"linear({call.tensor(0)}, {call.tensor(1)})"
    args = (call.argument(0), call.argument(1))
    bias = call.optional_tensor(2, "bias")
    return _product(call, formula, bias, len(x) - 1, op="aten.linear.default", args=args, kwargs={})


def addmm(call: Call) -> list[Statement]:
    if call.node.kwargs or len(call.shape(0)) != 1:
        raise NotKnownError
    formula = f"{call.tensor(1)} @ {call.tensor(2)}"
    args = (call.argument(1), call.argument(2))
    return _product(call, formula, call.tensor(0), 1, op="aten.matmul.default", args=args)


def matmul(call: Call) -> list[Statement]:
    if len(call.shape(0)) < 2 or len(call.shape(1)) < 2:
        raise NotKnownError
    return [call.statement(f"{call.tensor(0)} @ {call.tensor(1)}")]


def einsum(call: Call) -> list[Statement]:
    equation, listed = call.argument(0), call.argument(1)
    names = [str(one["tensor"]) for one in listed]
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow or not (left.replace(",", "") + right).isalpha() or len(set(names)) != len(names):
        raise NotKnownError
    return [call.statement(f'einsum("{left}->{right}", {", ".join(names)})')]


def convolution(call: Call) -> list[Statement]:
    x, w = call.shape(0), call.shape(1)
    if call.argument(6, 1) != 1 or len(x) not in {3, 4, 5} or len(w) != len(x):
        raise NotKnownError
    args = (call.argument(0), call.argument(1), None, *call.node.args[3:])
    rest = [one if isinstance(one, int) else f"({', '.join(str(int(n)) for n in one)},)" for one in call.node.args[3:6]]
    formula = f"{call.name}({', '.join([call.tensor(0), call.tensor(1), 'None', *map(str, rest)])})"
    return _product(call, formula, call.optional_tensor(2, "bias"), 1, args=args)


def embedding(call: Call) -> list[Statement]:
    if call.argument(2, -1) != -1 or call.argument(4, default=False):
        raise NotKnownError
    args = (call.argument(0), call.argument(1))
    return [call.statement(f"embedding({call.tensor(1)}, {call.tensor(0)})", op="embedding", args=args, kwargs={})]


def grouped_product(call: Call) -> list[Statement]:
    """Rows by groups, one matrix a group, and the ends of groups among rows: experts of tokens that are sorted by expert."""
    rows, matrices = call.shape(0), call.shape(1)
    ends = call.optional_tensor(2, "offs")
    if len(rows) != 2 or len(matrices) != 3 or not ends or call.argument(3, call.node.kwargs.get("bias")) is not None:
        raise NotKnownError
    names = (call.tensor(0), call.tensor(1), ends)
    args = tuple({"tensor": name} for name in names)
    return [call.statement(f"grouped_mm({', '.join(names)})", op="grouped_mm", args=args, kwargs={})]


def indexed_rows(call: Call) -> list[Statement]:
    """Rows of a matrix by number, as a lookup of embeddings has them."""
    listed = call.argument(1)
    if len(call.shape(0)) != 2 or len(listed) != 1 or call.node.dtype not in FLOATS:
        raise NotKnownError
    rows, numbers = call.tensor(0), str(listed[0]["tensor"])
    args = ({"tensor": rows}, {"tensor": numbers})
    return [call.statement(f"embedding({numbers}, {rows})", op="rows", args=args, kwargs={})]
