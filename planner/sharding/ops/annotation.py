"""Formulas as Python expressions, of which nothing is run, and the annotation of an operator: `b s e+, n e+ -> b s n`.

Every operand and result lists the named axes of its dims. `(h t)` is one dim made of two axes, h major. A mark after an
axis says what the operator does along it, which decides what sharding the axis means:

    (none)  passes through: if the axis is sharded, so is the result
    +       reduced: if it is sharded, the result is pending a reduction
    ^       must not be sharded
    *       normalized over, as in softmax and norms: if it is sharded, the operator reduces statistics with collectives

The marks are those of nnScaler's dimension annotations (docs/source/dimops.md: `+`, `^`), and `*`. An axis that no
result has is reduced, marked or not. Annotations of known functions are checked against their effect along each axis
(`planner.sharding.operators.roles`). If a name is reduced in one operand and also appears in the result (`t h+, f h+, h
f -> t h`), these are different axes of the same size.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from dataclasses import dataclass

from topology.errors import BadInput

MODULES = frozenset(["torch", "F", "nn", "np", "jnp", "functional", "numpy"])
_CASTS = frozenset(["to", "float", "double", "half", "bfloat16"])
MAX_CHARACTERS = 1000
Dim = tuple[str, ...]  # the axes of one dim, major first; () is a dim of size 1

_TOKEN = re.compile(r"\s*(?:(\()|(\))([+^*]?)|([A-Za-z_]\w{0,31}|1)([+^*]?))", flags=re.ASCII)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """Axes by dim of every operand and result. A reduced axis whose name the result also has is called `name+`."""

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    reduced: frozenset[str]
    unsharded: frozenset[str]
    normalized: frozenset[str]
    explicit: frozenset[str] = frozenset()  # axes that carry a mark


def parse_annotation(text: str) -> Annotation:
    """Parse an annotation. Raises BadInput."""
    if len(text) > MAX_CHARACTERS or text.count("->") != 1:
        raise BadInput(f"{text[:60]!r} is no annotation", why="it has one arrow", remedy="such as `t h+, f h+ -> t f`")
    left, right = ([_parse_tensor(part, text) for part in side.split(",")] for side in text.split("->"))
    names_out = {name for tensor in right for dim in tensor for name, _ in dim}
    marks: dict[str, set[str]] = {}
    for tensor in (*left, *right):
        for dim in tensor:
            for name, mark in dim:
                marks.setdefault(name, set()).add(mark)
    reduced = {f"{name}+" if name in names_out else name for name in marks if "+" in marks[name]}
    reduced |= {n for n in marks if n not in names_out and not marks[n] & {"^", "*"}}

    def axis_keys(tensor: list[list[tuple[str, str]]]) -> tuple[Dim, ...]:
        return tuple(
            tuple(f"{name}+" if mark == "+" and name in names_out else name for name, mark in dim) for dim in tensor
        )

    return Annotation(
        operands=tuple(axis_keys(tensor) for tensor in left),
        results=tuple(axis_keys(tensor) for tensor in right),
        reduced=frozenset(reduced),
        unsharded=frozenset(name for name in marks if "^" in marks[name]),
        normalized=frozenset(name for name in marks if "*" in marks[name]),
        explicit=frozenset(f"{n}+" if "+" in marks[n] and n in names_out else n for n in marks if marks[n] != {""}),
    )


def axis_name(key: str) -> str:
    """Return the name of an axis as written, without the `+` of reduced occurrences."""
    return key.removesuffix("+")


def _parse_tensor(text: str, annotation: str) -> list[list[tuple[str, str]]]:
    """Return the dims of one tensor, each a list of (axis, mark)."""
    dims: list[list[tuple[str, str]]] = []
    group: list[tuple[str, str]] | None = None
    position, text = 0, text.rstrip()
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise BadInput(f"cannot read {text[position : position + 20]!r} in the annotation {annotation[:80]!r}")
        position = found.end()
        opened, closed, mark_of_group, name, mark = found.groups()
        if opened:
            if group is not None:
                raise BadInput(f"a group within a group in the annotation {annotation[:80]!r}")
            group = []
        elif closed:
            if group is None:
                raise BadInput(f"a group is closed and never opened in the annotation {annotation[:80]!r}")
            dims.append([(axis, mark_of_group or own) for axis, own in group])
            group = None
        elif group is not None:
            group.append((name, mark))
        else:
            dims.append([] if name == "1" else [(name, mark)])
    if group is not None:
        raise BadInput(f"a group is not closed in the annotation {annotation[:80]!r}")
    return dims
