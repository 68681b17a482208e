"""Formulas in single steps, so that each has one rule for its gradient.

A step is one elementwise expression, one chain of views of a tensor, or one call of any other function. Intermediate
values of a formula become tensors, which the backward pass can save.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from planner.sharding.operators.operator import Operator
from planner.sharding.ops.annotation import arguments_of, called_name
from planner.sharding.ops.table import FUNCTIONS


def is_elementwise(node: ast.expr) -> bool:
    """Return whether the outermost step of a node is elementwise."""
    match node:
        case ast.BinOp(op=op):
            return not isinstance(op, ast.MatMult)
        case ast.UnaryOp() | ast.Compare():
            return True
        case ast.Call():
            function = FUNCTIONS.get(called_name(node).removesuffix("_bwd"))
            return function is not None and function.pointwise
    return False


def is_view(node: ast.expr) -> bool:
    """Return whether the outermost step of a node is a view of one tensor."""
    match node:
        case ast.Attribute(attr=("T" | "mT")):
            return True
        case ast.Subscript(slice=index):
            parts = index.elts if isinstance(index, ast.Tuple) else [index]
            named = any(isinstance(n, ast.Name) for part in parts for n in ast.walk(part))
            return not named and not _is_several(node.value)
        case ast.Call():
            op = FUNCTIONS.get(called_name(node))
            return op is not None and op.back is not None
    return False


def _is_several(node: ast.expr) -> bool:
    op = FUNCTIONS.get(called_name(node)) if isinstance(node, ast.Call) else None
    return op is not None and op.several


def viewed(node: ast.expr) -> ast.expr:
    """Return the tensor under a view."""
    match node:
        case ast.Attribute(value=inner) | ast.Subscript(value=inner):
            return inner
        case ast.Call():
            return arguments_of(node)[0]
    return node


def single_steps(operator: Operator, name_of: Iterator[str]) -> list[tuple[str, ast.expr]]:
    """Return (name, formula) for the steps of an operator; the last one has the name of its result."""
    steps: list[tuple[str, ast.expr]] = []
    tree = ast.parse(operator.text, mode="eval").body

    def name(node: ast.expr) -> ast.expr:
        """Return a name for the value of a node."""
        if isinstance(node, ast.Name | ast.Constant) or not _has_tensor(node, operator):
            return node
        inner = reduced(node)
        if isinstance(inner, ast.Name):
            return inner
        steps.append((next(name_of), inner))
        return ast.Name(id=steps[-1][0], ctx=ast.Load())

    def reduced(node: ast.expr) -> ast.expr:
        """Return a node as one step over names."""
        if is_elementwise(node):
            return _rebuilt(node, lambda child: reduced(child) if is_elementwise(child) else name(child))
        if is_view(node):
            return _with_viewed(node, reduced(viewed(node)) if is_view(viewed(node)) else name(viewed(node)))
        if isinstance(node, ast.Attribute | ast.Subscript):  # one of several results
            inner = reduced(node.value)
            return (
                ast.Attribute(inner, node.attr) if isinstance(node, ast.Attribute) else ast.Subscript(inner, node.slice)
            )
        return _rebuilt(node, name)

    last = reduced(tree)
    return [*steps, (operator.result.name, last)]


def _has_tensor(node: ast.AST, operator: Operator) -> bool:
    names = {name for name, _ in operator.operands} | set(operator.unannotated)
    return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))


def _rebuilt(node: ast.expr, change: Callable) -> ast.expr:  # type: ignore[type-arg]
    match node:
        case ast.BinOp(left=left, op=ast.MatMult(), right=right):
            return ast.Call(ast.Name(id="matmul", ctx=ast.Load()), [change(left), change(right)], [])
        case ast.BinOp(left=left, op=op, right=right):
            return ast.BinOp(change(left), op, change(right))
        case ast.UnaryOp(op=op, operand=operand):
            return ast.UnaryOp(op, change(operand))
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            return ast.Compare(change(left), ops, [change(each) for each in comparators])
        case ast.Call(func=func, keywords=keywords):
            function = ast.Name(id=called_name(node), ctx=ast.Load())
            arguments = [_listed(argument, change) for argument in arguments_of(node)]
            named = [ast.keyword(k.arg, _listed(k.value, change)) for k in keywords]
            return ast.Call(function if isinstance(func, ast.Name | ast.Attribute) else func, arguments, named)
    return node


def _listed(node: ast.expr, change: Callable) -> ast.expr:  # type: ignore[type-arg]
    if isinstance(node, ast.List | ast.Tuple):
        return ast.List([change(each) for each in node.elts], ctx=ast.Load())
    return change(node)  # type: ignore[no-any-return]


def _with_viewed(node: ast.expr, inner: ast.expr) -> ast.expr:
    match node:
        case ast.Attribute(attr=attr):
            return ast.Attribute(inner, attr)
        case ast.Subscript(slice=index):
            return ast.Subscript(inner, index)
        case ast.Call(keywords=keywords):
            return ast.Call(ast.Name(id=called_name(node)), [inner, *arguments_of(node)[1:]], keywords)
    return node
