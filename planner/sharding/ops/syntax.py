"""Formulas as Python expressions: the called function and its arguments. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Collection

MODULES = frozenset(["torch", "F", "nn", "np", "jnp", "functional", "numpy"])
_CASTS = frozenset(["to", "float", "double", "half", "bfloat16"])


def called_name(node: ast.Call) -> str:
    """Return the last part of the name of the called function: `softmax` of `torch.softmax(...)`."""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def is_module(node: ast.expr, tensors: Collection[str] = ()) -> bool:
    """Return whether a node names a module of functions, such as `torch.nn.functional`, and none of `tensors`."""
    match node:
        case ast.Name(id=name):
            return name in MODULES and name not in tensors
        case ast.Attribute(value=inner):
            return is_module(inner, tensors)
    return False


def arguments_of(node: ast.Call, tensors: Collection[str] = ()) -> list[ast.expr]:
    """Return the arguments of a call, the tensor of a method first."""
    if isinstance(node.func, ast.Attribute) and not is_module(node.func.value, tensors):
        return [node.func.value, *node.args]
    return list(node.args)


def outermost_call(tree: ast.expr) -> str:
    """Return the outermost function of a formula, looking through casts and the choice of one of its results."""
    while True:
        match tree:
            case ast.Attribute(value=inner, attr=("values" | "indices")) | ast.Subscript(value=inner):
                tree = inner
            case ast.Call(func=ast.Attribute(value=inner)) if called_name(tree) in _CASTS:
                tree = inner
            case ast.Call():
                return called_name(tree)
            case _:
                return ""


def number_of(node: ast.expr | None) -> int | None:
    """Return the value of an integer literal, or None."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))) if not isinstance(value, bool):
            return -value
    return None


def is_none(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True
