"""Operators element by element, and views of the same elements."""

from __future__ import annotations

from collections.abc import Sequence

from planner.sharding.formulas.formula import CASTS, COPIES, ELEMENTWISE
from planner.sharding.frontends.rules.statement import Call, NotKnownError, Statement

FLOATS = frozenset(("f64", "f32", "bf16", "f16"))
_CASTS = CASTS | frozenset(("_to_copy", "half", "bool", "long"))
POINTWISE = ELEMENTWISE | _CASTS
SAME_ELEMENTS = (COPIES - {"set"}) | frozenset(("lift_fresh_copy", "dropout", "detach_"))
RESHAPES = frozenset(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_copy"))


def pointwise(call: Call) -> list[Statement]:
    node = call.node
    operands = node.operands()
    if not operands or len(operands) > 3:
        raise NotKnownError
    if call.name in _CASTS:
        kind = "to" if node.dtype in FLOATS else "bool" if node.dtype == "bool" else "long"
        return [call.statement(f"{kind}({operands[0]})", op="cast", args=(call.argument(0),), kwargs={})]
    return [call.statement(_formula(call, operands))]


def _formula(call: Call, operands: Sequence[str]) -> str:
    """Return a pointwise formula that shows in which operands it is linear."""
    node = call.node
    if call.name == "masked_fill" and len(node.args) == 3 and isinstance(node.args[2], int | float):
        return f"masked_fill({call.tensor(0)}, {call.tensor(1)}, {node.args[2]!r})"
    signs = {"add": "+", "sub": "-", "mul": "*", "div": "/", "true_divide": "/"}
    if call.name in signs and len(node.args) == 2 and not node.kwargs:
        both = [str(a["tensor"]) if isinstance(a, dict) else repr(a) for a in node.args]
        if all(isinstance(a, dict | int | float) for a in node.args):
            return f"{both[0]} {signs[call.name]} {both[1]}"
    return f"{call.name}({', '.join(operands)})"


def same_elements(call: Call) -> list[Statement]:
    return [call.statement(f"contiguous({call.tensor(0)})", op="same", args=(call.argument(0),), kwargs={})]


def reshape(call: Call) -> list[Statement]:
    name = call.tensor(0)
    return [
        call.statement(f"reshape({name}, {list(call.node.shape)})", op="reshape", args=({"tensor": name},), kwargs={})
    ]


def _permuted(call: Call, order: Sequence[int]) -> list[Statement]:
    formula = f"permute({call.tensor(0)}, {list(order)})"
    return [call.statement(formula, op="permute", args=(call.argument(0), list(order)), kwargs={})]


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
    formula = f"expand({call.tensor(0)}, {list(call.node.shape)})"
    return [call.statement(formula, op="expand", args=(call.argument(0),), kwargs={})]


def repeat_interleave(call: Call) -> list[Statement]:
    times, dim = int(call.argument(1)), call.dim(2, len(call.shape(0)))
    formula = f"repeat_interleave({call.tensor(0)}, {times}, {dim})"
    return [call.statement(formula, op="repeat_interleave", args=(call.argument(0), times, dim), kwargs={})]


def repeat(call: Call) -> list[Statement]:
    counts = [int(n) for n in call.argument(1)]
    formula = f"repeat({call.tensor(0)}, {', '.join(map(str, counts))})"
    return [call.statement(formula, op="repeat", args=(call.argument(0),), kwargs={})]
