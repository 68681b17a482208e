"""The derivative of an elementwise expression, written as a formula.

`NAME_bwd(gradient, x)` stands for the gradient of the function NAME at x.
"""

from __future__ import annotations

import ast

from planner.sharding.formulas.axis_flow import NotUnderstood
from planner.sharding.formulas.formula import IDENTITIES, WITHOUT_SLOPE, called_name


def gradient_texts(node: ast.expr, gradient: str) -> dict[str, str]:
    """Return by tensor the gradient of an elementwise expression, whose own gradient is `gradient`.

    Raises NotUnderstood for a function without a derivative here.
    """
    found: dict[str, list[str]] = {}
    _collect(node, gradient, found)
    return {name: " + ".join(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}


def _collect(node: ast.expr, gradient: str, found: dict[str, list[str]]) -> None:
    match node:
        case ast.Name(id=name):
            found.setdefault(name, []).append(gradient)
        case ast.Constant() | ast.Compare():
            return
        case ast.UnaryOp(op=op, operand=operand):
            _collect(operand, f"(-{gradient})" if isinstance(op, ast.USub) else gradient, found)
        case ast.BinOp(left=left, op=op, right=right):
            for child, partial in zip((left, right), _binary(op, left, right, gradient), strict=True):
                _collect(child, partial, found)
        case ast.Call():
            for child, partial in _call(node, gradient):
                _collect(child, partial, found)
        case _:
            raise NotUnderstood(f"the derivative of a {type(node).__name__.lower()}")


def _binary(op: ast.operator, left: ast.expr, right: ast.expr, gradient: str) -> tuple[str, str]:
    a, b = ast.unparse(left), ast.unparse(right)
    match op:
        case ast.Add():
            return gradient, gradient
        case ast.Sub():
            return gradient, f"(-{gradient})"
        case ast.Mult():
            return f"({gradient} * ({b}))", f"({gradient} * ({a}))"
        case ast.Div():
            return f"({gradient} / ({b}))", f"(-{gradient} * ({a}) / (({b}) * ({b})))"
        case ast.Pow() if isinstance(right, ast.Constant) and isinstance(right.value, int | float):
            return f"({gradient} * {right.value} * ({a}) ** {right.value - 1})", gradient
    raise NotUnderstood(f"the derivative of {type(op).__name__.lower()}")


def _call(node: ast.Call, gradient: str) -> list[tuple[ast.expr, str]]:
    name, arguments = called_name(node), node.args
    text = [ast.unparse(argument) for argument in arguments]
    if name in IDENTITIES or name == "dropout":
        return [(arguments[0], gradient if name != "dropout" else f"dropout_bwd({gradient}, {text[0]})")]
    if name in WITHOUT_SLOPE:
        return []
    if name == "neg":
        return [(arguments[0], f"(-{gradient})")]
    if name in {"add", "sub", "mul", "multiply", "div", "true_divide"} and len(arguments) == 2:
        op = {"add": ast.Add(), "sub": ast.Sub(), "div": ast.Div(), "true_divide": ast.Div()}.get(name, ast.Mult())
        return list(zip(arguments, _binary(op, arguments[0], arguments[1], gradient), strict=True))
    if name == "where":
        return [
            (arguments[1], f"where({text[0]}, {gradient}, 0.0)"),
            (arguments[2], f"where({text[0]}, 0.0, {gradient})"),
        ]
    if name in {"maximum", "minimum"}:
        first = ">=" if name == "maximum" else "<="
        return [
            (arguments[0], f"where({text[0]} {first} {text[1]}, {gradient}, 0.0)"),
            (arguments[1], f"where({text[0]} {first} {text[1]}, 0.0, {gradient})"),
        ]
    if name == "masked_fill":
        return [(arguments[0], f"masked_fill({gradient}, {text[1]}, 0.0)")]
    if name.endswith("_bwd"):
        raise NotUnderstood("a gradient of a gradient")
    if not arguments:
        raise NotUnderstood(f"{name} of nothing")
    if any(isinstance(n, ast.Name) for argument in arguments[1:] for n in ast.walk(argument)):
        raise NotUnderstood(f"the derivative of {name} in several tensors")
    more = "".join(f", {part}" for part in text[1:])
    return [(arguments[0], f"{name}_bwd({gradient}, {text[0]}{more})")]


def sum_to_shape(text: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """Return the formula `text`, of `shape`, summed over what was broadcast from `wanted`."""
    extra = len(shape) - len(wanted)
    if extra:
        text = f"({text}).sum({tuple(range(extra))!r})" if extra > 1 else f"({text}).sum(0)"
    kept = [n for n, size in enumerate(wanted) if size == 1 and shape[n + extra] != 1]
    for n in kept:
        text = f"({text}).sum({n}, keepdim=True)"
    return text
