"""A chain of views taken back: what a gradient goes through on its way to the tensor that was viewed."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from planner.sharding.backward.formulas import is_view, shape_of_node, viewed
from planner.sharding.formulas.axis_flow import NotUnderstood, number_of
from planner.sharding.formulas.formula import called_name


def gradient_text(node: ast.expr, gradient: str, shapes: Mapping[str, Sequence[int]]) -> tuple[str, str]:
    """Return (tensor, formula of its gradient) for a chain of views of it. Raises NotUnderstood."""
    text = gradient
    while is_view(node):
        inner = viewed(node)
        text = _taken_back(node, text, shape_of_node(inner, shapes), shape_of_node(node, shapes))
        node = inner
    if not isinstance(node, ast.Name):
        raise NotUnderstood("a view of no tensor")
    return node.id, text


def _taken_back(node: ast.expr, text: str, before: tuple[int, ...], after: tuple[int, ...]) -> str:
    """Return the formula that takes one view back, from the shape `after` it to the shape `before` it."""
    match node:
        case ast.Attribute(attr="T"):
            return f"{text}.T"
        case ast.Attribute():
            return f"{text}.mT"
        case ast.Subscript(slice=index):
            return _put_back(text, index.elts if isinstance(index, ast.Tuple) else [index], before)
    if not isinstance(node, ast.Call):
        raise NotUnderstood("the gradient of a view")
    name = called_name(node)
    numbers = [number_of(a) for a in _flat([*node.args[1:], *(k.value for k in node.keywords)])]
    match name:
        case "reshape" | "view" | "flatten" | "unflatten" | "squeeze" | "unsqueeze":
            return f"{text}.reshape({list(before)})"
        case "t":
            return f"{text}.T"
        case "transpose" | "swapaxes":
            return f"{text}.transpose({numbers[0]}, {numbers[1]})"
        case "permute":
            order = [n % len(before) for n in numbers if n is not None]
            return f"{text}.permute({', '.join(str(order.index(n)) for n in range(len(order)))})"
        case "movedim":
            return f"{text}.movedim({numbers[1]}, {numbers[0]})"
        case "expand" | "expand_as" | "broadcast_to":
            extra = len(after) - len(before)
            gone = [*range(extra), *(n + extra for n, s in enumerate(before) if s == 1 and after[n + extra] > 1)]
            summed = f"{text}.sum({tuple(gone)!r})" if gone else text
            return f"{summed}.reshape({list(before)})"
        case "repeat_interleave":
            at = (numbers[1] or 0) % len(before)
            return f"{text}.unflatten({at}, ({before[at]}, {numbers[0]})).sum({at + 1})"
        case "narrow":
            at, start, length = (numbers[0] or 0) % len(before), numbers[1] or 0, numbers[2] or 1
            return padded(text, at, start, before[at] - start - length, len(before))
        case "select":
            at = (numbers[0] or 0) % len(before)
            front = (numbers[1] or 0) % before[at]
            return padded(f"{text}.unsqueeze({at})", at, front, before[at] - front - 1, len(before))
        case "flip":
            return f"{text}.flip({', '.join(str(n) for n in numbers)})"
        case "roll" if len(numbers) == 2 and numbers[0] is not None:
            return f"roll({text}, {-numbers[0]}, {numbers[1]})"
    raise NotUnderstood(f"the gradient of {name}")


def _flat(nodes: Sequence[ast.expr]) -> list[ast.expr]:
    return [each for node in nodes for each in (node.elts if isinstance(node, ast.Tuple | ast.List) else [node])]


def padded(text: str, at: int, before: int, after: int, rank: int) -> str:
    """Return the formula of `text` with so many zeros before and after it along dim `at` of `rank`."""
    return f"pad({text}, ({'0, 0, ' * (rank - 1 - at)}{before}, {after}))" if before or after else text


def _put_back(text: str, parts: Sequence[ast.expr], before: tuple[int, ...]) -> str:
    """Return the formula that puts what an index took back among zeros."""
    taken = sum(1 for p in parts if not (isinstance(p, ast.Constant) and (p.value is None or p.value is ...)))
    at = out = 0  # positions in the tensor that was indexed, and in what was taken
    pads: list[tuple[int, int, int]] = []
    for part in parts:
        match part:
            case ast.Constant(value=None):
                text = f"{text}.squeeze({out})"
            case ast.Constant(value=value) if value is ...:
                at, out = at + len(before) - taken, out + len(before) - taken
            case ast.Slice(lower=lower, upper=upper, step=step):
                ends = [None if end is None else number_of(end) for end in (lower, upper, step)]
                start, stop, stride = slice(*ends).indices(before[at])
                if stride != 1:
                    raise NotUnderstood("the gradient of a slice with a step")
                pads.append((at, start, before[at] - stop))
                at, out = at + 1, out + 1
            case _:
                number = number_of(part)
                if number is None:
                    raise NotUnderstood("the gradient of an index by a tensor")
                text = f"{text}.unsqueeze({out})"
                pads.append((at, number % before[at], before[at] - number % before[at] - 1))
                at, out = at + 1, out + 1
    for where, front, back in pads:
        text = padded(text, where, front, back, len(before))
    return text
