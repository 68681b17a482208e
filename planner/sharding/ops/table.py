"""All known operators by their names in formulas, in PyTorch and in programs.

Names and arguments in formulas are torch's, as functions or as methods: `torch.softmax(x, -1)`, `x.softmax(-1)`,
`F.linear(x, w)`. Besides those: `set` (an unchanged tensor), `rearrange` (as its annotation states), `attn`, `rmsnorm`,
`layernorm`, `grouped_mm`, `rope`, and gradients as `NAME_bwd(gradient, ...)`. A function that is not here raises
`NotUnderstood` and is opaque: it is computed on whole tensors.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from planner.sharding.ops import (
    attention,
    elementwise,
    norms,
    parts,
    products,
    recurrent,
    reductions,
    rotary,
    routed,
    rows,
    transforms,
    views,
    windows,
)
from planner.sharding.ops.aten import LETTERS, AtenCall, NotKnownError, Shape, Statement, result_axes
from planner.sharding.ops.axis_flow import AxisFlow, NotUnderstood, Value
from planner.sharding.ops.op import Op, Saves
from planner.sharding.ops.walker import Made, Rule, Walker
from simulator.sharded.graph import GraphNode

_FAMILIES = (
    elementwise,
    views,
    parts,
    products,
    windows,
    reductions,
    norms,
    attention,
    rows,
    rotary,
    routed,
    recurrent,
    transforms,
)
_ALL = [op for family in _FAMILIES for op in family.OPS]
FUNCTIONS: dict[str, Op] = {name: op for op in _ALL for name in op.names.split()}
_ATEN: dict[str, Op] = {name: op for op in _ALL for name in op.aten.split()}
STATISTICS = {op.kind: op.statistics for op in _ALL if op.statistics}  # by kind: what is exchanged, and its reducer
_KERNELS: dict[str, Op] = {name: op for op in _ALL for name in op.kernels.split()}


def kernel(name: str) -> Op | None:
    """Return the operator that a kernel of a program runs: `aten.add.Tensor`, or a name in the executor's table."""
    return _KERNELS.get(name.removeprefix("aten.").split(".")[0] if name.startswith("aten.") else name)


def is_elementwise(op: str) -> bool:
    """Return whether an operator of ATen is elementwise."""
    known = _ATEN.get(op.rpartition(".")[0].removeprefix("aten."))
    return known is not None and known.pointwise


def saves(name: str) -> Saves:
    """Return what a kernel's derivative needs."""
    op = kernel(name)
    return Saves.OPERANDS if op is None else op.saves


def rule_of(name: str) -> Rule | None:
    """Return the effect of the function `name` along axes, or None if it is unknown."""
    op = FUNCTIONS.get(name)
    if op is None and name.endswith(("_bwd", "_backward")):
        of = FUNCTIONS.get(name.removesuffix("_bwd").removesuffix("_backward"))
        return None if of is None else of.gradient_axes
    return None if op is None else op.axes


def walk(flow: AxisFlow, tree: ast.expr, merges: str) -> Made:
    """Return the value of a formula; its effects on axes are recorded in `flow`. Raises NotUnderstood.

    `merges` is the kind of statistics from which the formula may be computed if its axes are sharded, or empty.
    """
    return Walker(flow, tree, merges, rule_of).made(tree)


def result_of(made: Made, index: int = 0) -> Value:
    """Return one of the values of a formula. Raises NotUnderstood if it has fewer."""
    if isinstance(made, Value):
        return made
    if index >= len(made):
        raise NotUnderstood(f"result {index} of {len(made)}")
    return made[index]


def shape_of(tree: ast.expr, shapes: Mapping[str, Shape], index: int = 0) -> Shape:
    """Return the shape of a formula's result for tensors of `shapes`. Raises NotUnderstood."""
    flow = AxisFlow(tensors={}, sizes={})
    names = dict.fromkeys(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in shapes)
    flow.tensors = {name: Value(tuple(flow.new_dim(size) for size in shapes[name])) for name in names}
    return tuple(flow.size(dim) for dim in result_of(walk(flow, tree, ""), index).dims)


# --- captured graphs


def statements(
    node: GraphNode, shapes: Mapping[str, Shape], dtypes: Mapping[str, str] | None = None
) -> list[Statement]:
    """Return the statements of one node of a graph; `shapes` and `dtypes` are of all tensors before it.

    A node that no entry captures is opaque: its operands and its result are needed whole, which is correct for any
    operator.
    """
    call = AtenCall(node, shapes, dtypes or {})
    op = _ATEN.get(node.op.rpartition(".")[0].removeprefix("aten.") or node.op)
    if op is not None and op.capture is not None:
        try:
            found = op.capture(call)
        except (NotKnownError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            found = []  # arguments in a file that the operator does not take
        if found and _are_understood(found, shapes):
            return found
    return [_opaque(call)]


def _are_understood(lines: list[Statement], shapes: Mapping[str, Shape]) -> bool:
    """Return whether every formula without an annotation has a result of the captured shape."""
    known = {**shapes, **{line.result: line.shape for line in lines}}
    try:
        return all(
            line.annotation or shape_of(ast.parse(line.formula, mode="eval").body, known) == line.shape
            for line in lines
        )
    except (NotUnderstood, SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _opaque(call: AtenCall) -> Statement:
    """Operands whole, result whole."""
    operands = call.node.operands()
    parts = [
        " ".join(f"u{number}{LETTERS[d]}^" if n > 1 else "1" for d, n in enumerate(call.shapes[name]))
        for number, name in enumerate(operands)
    ]
    dims, sizes = result_axes(call.node.shape)
    formula = f"opaque_{call.name}({', '.join(operands)})"
    return call.statement(formula, f"{', '.join(parts)} -> {' '.join(dims)}", sizes=sizes, known=False)
