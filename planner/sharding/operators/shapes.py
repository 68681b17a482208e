"""The shape of the value of a formula, where it can be inferred: views, slices, elementwise operators, attention,
top-k.

Needed where an annotation splits a dim (`b s (h t) -> b h s t`) and only the formula's `reshape(1,8,-1,12)` has the
sizes.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from math import prod

from planner.sharding.operators.formula import called_name

Shape = tuple[int, ...]


def shape_of(node: ast.expr, shapes: Mapping[str, Shape]) -> Shape | None:
    """Return the shape of `node` given the shapes of tensors, or None where it cannot be inferred."""
    try:
        return _shape(node, shapes)
    except (IndexError, ValueError, ZeroDivisionError, TypeError):
        return None


def integer(node: ast.expr) -> int | None:
    """Return the value of an integer literal, or None for any other expression."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return -value
    return None


def _shape(node: ast.expr, shapes: Mapping[str, Shape]) -> Shape | None:
    match node:
        case ast.Name(id=name):
            return shapes.get(name)
        case ast.BinOp(left=left, op=op, right=right) if not isinstance(op, ast.MatMult):
            both = [s for s in (_shape(left, shapes), _shape(right, shapes)) if s is not None]
            return max(both, key=len) if both else None
        case ast.Attribute(value=inner, attr=attr):
            shape = _shape(inner, shapes)
            if shape is not None and attr in {"T", "mT"}:
                return shape[::-1] if attr == "T" else (*shape[:-2], shape[-1], shape[-2])
            return shape if attr in {"values", "indices"} else None
        case ast.Subscript(value=inner, slice=index):
            shape = _shape(inner, shapes)
            parts = index.elts if isinstance(index, ast.Tuple) else [index]
            return None if shape is None else _indexed(shape, parts)
        case ast.Call():
            return _call(node, shapes)
    return None


def _call(node: ast.Call, shapes: Mapping[str, Shape]) -> Shape | None:
    name, arguments = called_name(node), list(node.args)
    if isinstance(node.func, ast.Attribute) and _shape(node.func.value, shapes) is not None:
        arguments.insert(0, node.func.value)
    if not arguments:
        return None
    shape = _shape(arguments[0], shapes)
    if shape is None:
        return None
    if len(arguments) == 2 and isinstance(arguments[1], ast.Tuple | ast.List):
        numbers = [integer(a) for a in arguments[1].elts]
    else:
        numbers = [integer(a) for a in arguments[1:]]
    known = [number for number in numbers if number is not None]
    if name in {"reshape", "view"} and len(known) == len(numbers):
        given = prod(n for n in known if n != -1)
        return tuple(prod(shape) // given if n == -1 else n for n in known)
    if name == "permute" and len(known) == len(numbers):
        return tuple(shape[n] for n in known)
    if name in {"transpose", "swapaxes"} and len(known) == 2:
        order = list(range(len(shape)))
        order[known[0]], order[known[1]] = order[known[1]], order[known[0]]
        return tuple(shape[n] for n in order)
    if name in {"attn", "attention", "sdpa", "scaled_dot_product_attention"} and len(arguments) >= 3:
        values = _shape(arguments[2], shapes)
        return None if values is None else (*shape[:-1], values[-1])
    if name == "topk" and known:
        where = known[1] if len(known) > 1 else -1
        order = list(shape)
        order[where] = known[0]
        return tuple(order)
    if name in {"gelu", "relu", "silu", "softmax", "set", "contiguous", "to", "float", "clone", "sort", "rope"}:
        return shape
    return None


def _indexed(shape: Shape, parts: Sequence[ast.expr]) -> Shape | None:
    """Return the shape after indexing with integers, slices with literal ends, None and one ellipsis."""
    taken = sum(1 for p in parts if not (isinstance(p, ast.Constant) and p.value in {None, ...}))
    out: list[int] = []
    position = 0
    for part in parts:
        match part:
            case ast.Constant(value=None):
                out.append(1)
            case ast.Constant(value=value) if value is ...:
                skipped = len(shape) - taken
                out.extend(shape[position : position + skipped])
                position += skipped
            case ast.Slice(lower=lower, upper=upper, step=step):
                ends = [None if end is None else integer(end) for end in (lower, upper, step)]
                if any(
                    end is not None and value is None for end, value in zip((lower, upper, step), ends, strict=True)
                ):
                    return None
                out.append(len(range(*slice(*ends).indices(shape[position]))))
                position += 1
            case _:
                if integer(part) is None:
                    return None
                position += 1
    return (*out, *shape[position:])
