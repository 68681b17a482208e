"""The formula as one rank runs it: sizes that are written in it are those of its own pieces.

    y = reshape(x, [2, 8, 16]) with its last axis sharded over 4 ranks runs as reshape(x, [2, 8, 4])

Whole dims keep their numbers. What depends on where a piece starts (`roles.positional`) is up to who runs it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from math import prod

from planner.sharding.operators.operator import Operator
from planner.sharding.ops.annotation import called_name, number_of
from planner.sharding.ops.axis_flow import AxisFlow, NotUnderstood, Value
from planner.sharding.ops.table import rule_of
from planner.sharding.ops.walker import Made, Walker

_SHAPED = frozenset(["reshape", "view", "expand", "broadcast_to", "zeros", "ones", "full"])


def local_formula(operator: Operator, sizes: Mapping[str, int]) -> str:
    """Return the formula of `operator` for pieces whose axes have `sizes`; axes that are not given are whole."""
    tree = ast.parse(operator.text, mode="eval").body
    if not any(isinstance(n, ast.Call) and called_name(n) in _SHAPED | {"unflatten"} for n in ast.walk(tree)):
        return operator.text
    given = {axis for _, dims in operator.operands for dim in dims for axis in dim} | set(operator.axes)
    flow = AxisFlow(tensors={}, sizes=dict(operator.sizes), given=frozenset(given))
    flow.tensors = {name: Value(dims) for name, dims in operator.operands}
    walker = _Recorder(flow, tree)
    try:
        value = walker.made(tree)
    except NotUnderstood:
        return operator.text
    _name_created_axes(flow, value[operator.index] if isinstance(value, list) else value, operator)

    def local(dim: tuple[str, ...]) -> int:
        return prod(sizes.get(axis, flow.sizes[axis]) for axis in flow.dim(dim))

    for node in ast.walk(tree):
        made = walker.values.get(id(node))
        if not isinstance(node, ast.Call) or not isinstance(made, Value):
            continue
        name = called_name(node)
        if name in _SHAPED:
            _write_shape(node, [local(dim) for dim in made.dims])
        elif name == "unflatten":
            arguments = [a for a in node.args if number_of(a) is not None]
            at = (number_of(arguments[0]) or 0) if arguments else 0
            parts = node.args[-1]
            if isinstance(parts, ast.Tuple | ast.List):
                at %= len(made.dims) - len(parts.elts) + 1
                parts.elts = [ast.Constant(local(made.dims[at + n])) for n in range(len(parts.elts))]
    return ast.unparse(tree)


class _Recorder(Walker):
    """A walker that keeps what every node computes."""

    def __init__(self, flow: AxisFlow, tree: ast.expr) -> None:
        super().__init__(flow, tree, "", rule_of)
        self.values: dict[int, Made] = {}

    def made(self, node: ast.expr) -> Made:
        self.values[id(node)] = super().made(node)
        return self.values[id(node)]


def _name_created_axes(flow: AxisFlow, value: Value, operator: Operator) -> None:
    for found, said in zip(flow.dims(value), operator.dims, strict=True):
        named = tuple(axis for axis in said if flow.sizes[axis] != 1)
        if len(found) == len(named):
            for a, b in zip(found, named, strict=True):
                if a not in flow.given and flow.sizes[a] == flow.sizes[b]:
                    flow.same[a] = (b,)


def _write_shape(node: ast.Call, shape: list[int]) -> None:
    """Replace the sizes that a call names by `shape`."""
    sizes = (n for n, a in enumerate(node.args) if isinstance(a, ast.Tuple | ast.List) or number_of(a) is not None)
    first = next(sizes, None)
    if first is None:
        return
    if isinstance(node.args[first], ast.Tuple | ast.List):
        node.args[first] = ast.List([ast.Constant(size) for size in shape], ctx=ast.Load())
    else:
        node.args[first:] = [ast.Constant(size) for size in shape]
