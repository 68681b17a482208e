"""Rows in groups, such as tokens sorted by expert: if each rank has whole groups, it has rows of its own.

A grouped product multiplies every row by the matrix of its group. A rank with some of the matrices computes the rows of
those groups and zeros in all others, so no two ranks have the same row: the result is pending a sum in which every
element is one rank's (`mask` in DTensor). Functions that keep zeros may be computed before that sum, unlike before
other partial sums; an example is the activation between two grouped products. How many rows a rank has is known when
the program runs, and no shape depends on it.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations

from planner.sharding.operators.operator import Operator
from planner.sharding.ops.annotation import called_name
from planner.sharding.ops.routed import ROUTED_OF, SENT_OF
from planner.sharding.ops.table import FUNCTIONS

MASK = "mask"
GROUPED = "grouped_mm"


def group_axis(operator: Operator) -> str:
    """Return the axis of the groups of a grouped product, whose operands are rows, matrices and ends; "" for other
    operators.
    """
    if GROUPED not in operator.functions or len(operator.operands) != 3 or operator.unannotated:
        return ""
    (_, rows), (_, matrices), _ = operator.operands
    if len(rows) != 2 or len(matrices) != 3 or len(matrices[0]) != 1 or operator.dims[0] != rows[0]:
        return ""
    call = ast.parse(operator.text, mode="eval").body
    named = isinstance(call, ast.Call) and called_name(call) == GROUPED
    (axis,) = matrices[0]
    return axis if named and axis not in {a for dim in operator.dims for a in dim} else ""


def routed_axes(operator: Operator) -> tuple[str, str] | None:
    """Return the axis of tokens and that of experts of routed experts; None for other operators."""
    if not operator.text.startswith((ROUTED_OF, SENT_OF)):
        return None
    (_, pairs), (_, matrices) = operator.operands[:2]
    return pairs[0][0], matrices[0][0]


def grouped_rows(operators: Sequence[Operator]) -> dict[str, str]:
    """Return for each tensor the ends of the groups of its rows, if it may be zero except in a rank's own groups."""
    found: dict[str, str] = {}
    for operator in operators:
        if group_axis(operator):
            found[operator.result.name] = operator.operands[2][0]
        elif kept := next(zero_keepers(operator, found), None):
            found[operator.result.name] = found[next(iter(kept))]
    return found


def zero_keepers(operator: Operator, grouped: Mapping[str, str]) -> Iterator[frozenset[str]]:
    """Yield sets of operands such that rows that are zero in all of them are zero in the result; fewest
    operands first.
    """
    rows = operator.dims[0] if operator.dims else ()
    held = [name for name, dims in operator.operands if name in grouped and rows and dims and dims[0] == rows]
    if not held or operator.index:
        return
    if operator.is_view:
        yield frozenset(held)
        return
    tree = ast.parse(operator.text, mode="eval").body
    for number in range(1, len(held) + 1):
        for some in combinations(dict.fromkeys(held), number):
            if len({grouped[name] for name in some}) == 1 and _keeps_zeros(tree, some):
                yield frozenset(some)


def _keeps_zeros(node: ast.expr, zeros: Collection[str]) -> bool:
    """Return whether an elementwise formula is zero where all of `zeros` are, for any values of its other tensors."""
    match node:
        case ast.Name(id=name):
            return name in zeros
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=inner):
            return _keeps_zeros(inner, zeros)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _keeps_zeros(left, zeros) or _keeps_zeros(right, zeros)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return _keeps_zeros(left, zeros) and _keeps_zeros(right, zeros)
        case ast.Call(args=[first, _, ast.Constant(value=(0 | 0.0))]) if called_name(node) == "masked_fill":
            return _keeps_zeros(first, zeros)
        case ast.Call(args=[first, *_], keywords=[]):
            op = FUNCTIONS.get(called_name(node))
            return op is not None and op.keeps_zeros and _keeps_zeros(first, zeros)
    return False
