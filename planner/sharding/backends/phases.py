"""Operators that exchange statistics between ranks, as kernels with reductions between them.

Softmax, norms, attention and cross-entropy over a sharded axis (`operators.internal_collectives`): every rank makes the
statistics of its piece, they are reduced, and it finishes its piece with what came back. Statistics are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.sharding.frontends.rules.statement import Statement
from planner.sharding.layouts.layout import Layout
from planner.sharding.operators.operator import Operator
from planner.sharding.plans.plan import OperatorStep
from topology.errors import Infeasible


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One kernel, or the reduction of one: `reads` are operands or the names of earlier phases, `reduce` the reducer.

    The last phase has no name: it writes the operator's result. `shape` and `layout` are of what a phase writes.
    """

    name: str = ""
    reads: tuple[str, ...]
    op: str = ""
    args: tuple[Any, ...] = ()
    reduce: str = ""
    shape: tuple[int, ...] = ()
    layout: Layout | None = None
    dtype: str = "f32"
    share: float = 0.0


def phases(statement: Statement, operator: Operator, step: OperatorStep) -> list[Phase]:
    """Return the phases of an operator whose option has collectives inside. Raises Infeasible where there are none."""
    operands = [(name, layout) for name, layout in step.option.operands if name in statement.operands]
    first, layout = operands[0]
    match statement.op:
        case "softmax" | "log_softmax":
            return _softmax(statement, first, layout)
        case "rmsnorm" | "layernorm":
            return _norm(statement, first, layout)
        case "attention":
            return _attention(statement, step)
        case "cross_entropy":
            return _cross_entropy(statement, layout)
    raise Infeasible(
        f"{operator.result.name} ({statement.op}) over a sharded axis is not run by this back end",
        remedy="pin its operand whole along that axis",
    )


def _tensor(name: str) -> dict[str, str]:
    return {"tensor": name}


def _statistic(layout: Layout, shape: tuple[int, ...], dim: int) -> tuple[tuple[int, ...], Layout]:
    """Return shape and layout of one number for each row, the row's dim kept with one element."""
    dims = tuple(() if d == dim else spec for d, spec in enumerate(layout.dims))
    return tuple(1 if d == dim else n for d, n in enumerate(shape)), Layout(dims)


def _pair(name: str, op: str, reads: tuple[str, ...], args: tuple[Any, ...], how: str, **more: Any) -> list[Phase]:
    """Return the kernel of a statistic and its reduction, which is called `name`."""
    return [
        Phase(name=f"{name}.own", reads=reads, op=op, args=args, share=0.3, **more),
        Phase(name=name, reads=(f"{name}.own",), reduce=how, **more),
    ]


def _softmax(statement: Statement, x: str, layout: Layout) -> list[Phase]:
    dim = statement.args[1]
    shape, rows = _statistic(layout, statement.shape, dim)
    more: dict[str, Any] = {"shape": shape, "layout": rows}
    top = _pair("top", "row_max", (x,), (_tensor(x), dim), "max", **more)
    total = _pair("total", "row_exp_sum", (x, "top"), (_tensor(x), _tensor("top"), dim), "sum", **more)
    args = (_tensor(x), _tensor("top"), _tensor("total"))
    return [*top, *total, Phase(reads=(x, "top", "total"), op=f"{statement.op}.finish", args=args, share=0.4)]


def _norm(statement: Statement, x: str, layout: Layout) -> list[Phase]:
    tensors, _, eps = statement.args
    dim = len(statement.shape) - 1
    size = statement.shape[-1]
    shape, rows = _statistic(layout, statement.shape, dim)
    names = tuple(one["tensor"] for one in tensors)
    squares = _pair("squares", "row_squares", (x,), (_tensor(x),), "sum", shape=shape, layout=rows)
    if statement.op == "rmsnorm":
        args: tuple[Any, ...] = (list(tensors), _tensor("squares"), size, eps)
        return [*squares, Phase(reads=(*names, "squares"), op="rmsnorm.finish", args=args, share=0.7)]
    sums = _pair("sums", "row_sum", (x,), (_tensor(x),), "sum", shape=shape, layout=rows)
    args = (list(tensors), _tensor("sums"), _tensor("squares"), size, eps)
    return [*sums, *squares, Phase(reads=(*names, "sums", "squares"), op="layernorm.finish", args=args, share=0.4)]


def _attention(statement: Statement, step: OperatorStep) -> list[Phase]:
    tensors, causal, scale = statement.args
    names = tuple(one["tensor"] for one in tensors)
    layout, shape = step.option.result, statement.shape
    rows_shape, rows = _statistic(layout, shape, len(shape) - 1)
    given = (list(tensors), causal, scale)
    top = _pair("top", "attention.max", names, given, "max", shape=rows_shape, layout=rows)
    total = _pair(
        "total", "attention.sum", (*names, "top"), (*given, _tensor("top")), "sum", shape=rows_shape, layout=rows
    )
    values = _pair(
        "values", "attention.values", (*names, "top"), (*given, _tensor("top")), "sum", shape=shape, layout=layout
    )
    args = (_tensor("values"), _tensor("total"))
    return [*top, *total, *values, Phase(reads=("values", "total"), op="attention.finish", args=args, share=0.1)]


def _cross_entropy(statement: Statement, layout: Layout) -> list[Phase]:
    logits, targets, ignored = statement.args
    names = (logits["tensor"], targets["tensor"])
    shape, rows = _statistic(layout, (statement.shape[0], 1), 1)
    more: dict[str, Any] = {"shape": shape, "layout": rows}
    top = _pair("top", "row_max", (names[0],), (logits, 1), "max", **more)
    total = _pair("total", "row_exp_sum", (names[0], "top"), (logits, _tensor("top"), 1), "sum", **more)
    hit = _pair("hit", "target_logit", names, (logits, targets), "sum", **more)
    args = (_tensor("top"), _tensor("total"), _tensor("hit"), targets, ignored)
    return [
        *top,
        *total,
        *hit,
        Phase(reads=("top", "total", "hit", names[1]), op="cross_entropy.finish", args=args, share=0.1),
    ]
