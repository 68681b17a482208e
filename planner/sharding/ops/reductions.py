"""Reductions, and the largest elements: sums stay pending, others are computed from the results of pieces."""

from __future__ import annotations

import ast
from math import prod
from typing import Any

from planner.sharding.ops.annotation import is_none, number_of
from planner.sharding.ops.aten import (
    AtenCall,
    NotKnownError,
    Statement,
    annotated,
    axes_but,
    letters,
    result_axes,
    whole_numbers,
    written,
)
from planner.sharding.ops.axis_flow import AxisFlow, Value
from planner.sharding.ops.elementwise import FLOATS
from planner.sharding.ops.op import Op, Saves, Step, no_gradient, tensor
from planner.sharding.ops.walker import Call, Made, merge_or_keep, position

_REDUCERS = {"sum": "sum", "mean": "avg", "amax": "max", "max": "max", "amin": "min", "min": "min", "prod": "product"}


def _reduced(call: Call) -> Made:
    value, flow = call.value(0), call.flow
    if call.name in {"max", "min"} and len(call.arguments) > 1 and call.walker.names_in(call.arguments[1]):
        return flow.elementwise(call.values(), call.name)
    numbers = call.numbers(1, "dim") if "dim" in call.keywords or len(call.arguments) > 1 else None
    keep = call.flag(2, "keepdim") or call.flag(2, "keepdims")
    if numbers is None and "axis" in call.keywords:
        numbers = call.numbers(1, "axis")
    chosen = set(range(len(value.dims))) if numbers is None else {position(n, value) for n in numbers}
    if call.name in {"var", "std", "norm", "any", "all"}:
        value = flow.finish(value, f"{call.name} needs finished sums")
        for n in chosen:
            flow.reduced.update(flow.dim(value.dims[n]))
            flow.keep_unsharded(value.dims[n], f"{call.name} is no sum of what pieces give")
    dims = [() if n in chosen else dim for n, dim in enumerate(value.dims) if keep or n not in chosen]
    if call.name in {"var", "std", "norm", "any", "all"}:
        return Value(tuple(dims))
    reducer = _REDUCERS[call.name]
    if reducer not in {"sum", "avg"}:
        value = flow.finish(value, f"{call.name} needs finished sums")
    gone = [value.dims[n] for n in sorted(chosen)]
    out = flow.contract(gone, Value(tuple(dims), value.pending), reducer, call.name)
    return [out, out] if call.name in {"max", "min"} and numbers is not None else out


def _finished_along(call: Call, argument: int) -> tuple[AxisFlow, Value, int]:
    """Return the first argument with its sums finished, and the position of the dim along which it is reduced."""
    flow, value = call.flow, call.flow.finish(call.value(0), f"{call.name} needs finished sums")
    at = position(call.number(argument, "dim", -1), value)
    flow.reduced.update(flow.dim(value.dims[at]))
    return flow, value, at


def _logsumexp(call: Call) -> Value:
    _, value, at = _finished_along(call, 1)
    merge_or_keep(call, "logsumexp", value.dims[at], f"{call.name} is no sum of what pieces give")
    keep = [()] if call.flag(2, "keepdim") else []
    return Value((*value.dims[:at], *keep, *value.dims[at + 1 :]))


def _top_k(call: Call) -> list[Value]:
    flow, value, at = _finished_along(call, 2)
    merge_or_keep(call, "topk", value.dims[at], "the largest of a piece need not be the largest of all")
    made = flow.new_dim(call.number(1, "k", 1))
    flow.keep_unsharded(made, "the k largest are needed together")
    return [Value((*value.dims[:at], made, *value.dims[at + 1 :]))] * 2


def _arg(call: Call) -> Value:
    flow, value, at = _finished_along(call, 1)
    flow.positional.update(flow.dim(value.dims[at]))
    merge_or_keep(call, "arg", value.dims[at], "the largest of a piece need not be the largest of all")
    return Value((*value.dims[:at], *value.dims[at + 1 :]))


# --- gradients


def _kept(step: Step) -> tuple[str, list[int], list[int]]:
    """Return the gradient of a reduction with its dims put back, the shape, and which dims were reduced."""
    shape = step.shape(step.tensor(0))
    node = step.argument(1, "dim")
    if node is None or is_none(node):
        dims = list(range(len(shape)))
    else:
        found = [number_of(n) for n in (node.elts if isinstance(node, ast.Tuple | ast.List) else [node])]
        dims = [n % len(shape) for n in found if n is not None]
    kept = [1 if n in dims else size for n, size in enumerate(shape)]
    return f"{step.gradient}.reshape({kept})", list(shape), dims


def _sum_gradient(step: Step) -> dict[str, str]:
    text, shape, _ = _kept(step)
    return {step.tensor(0): f"{text}.expand({shape})"}


def _mean_gradient(step: Step) -> dict[str, str]:
    text, shape, dims = _kept(step)
    count = 1
    for n in dims:
        count *= shape[n]
    return {step.tensor(0): f"({text} / {count}).expand({shape})"}


def _largest_gradient(step: Step) -> dict[str, str]:
    text, shape, dims = _kept(step)
    kept = [1 if n in dims else size for n, size in enumerate(shape)]
    x = step.tensor(0)
    return {x: f"where({x} == {step.result}.reshape({kept}), {text}, 0.0)"}


def _logsumexp_gradient(step: Step) -> dict[str, str]:
    x, dim = step.tensor(0), step.number(1, "dim", -1)
    if len(step.shape(x)) == len(step.shape(step.result)):
        return {x: f"{step.gradient} * exp({x} - {step.result})"}
    return {x: f"{step.gradient}.unsqueeze({dim}) * exp({x} - {step.result}.unsqueeze({dim}))"}


# --- captured


def _capture_reduction(call: AtenCall) -> list[Statement]:
    shape = call.shape(0)
    given = call.argument(1)
    listed = [given] if isinstance(given, int) else (given or list(range(len(shape))))
    reduced = {int(d) % max(len(shape), 1) for d in listed} if isinstance(listed, list) else set()
    keep = bool(call.argument(2, default=False)) or bool(call.node.kwargs.get("keepdim"))
    args = (call.argument(0), sorted(reduced), keep)
    formula = f"{call.name}({call.tensor(0)}, {sorted(reduced)}, keepdim={keep})" if shape else call.tensor(0)
    more: dict[str, Any] = {"args": args, "kwargs": call.node.kwargs if call.name in {"sum", "mean"} else {}}
    return [call.statement(formula, op=f"reduce.{call.name}", **more)]


def _capture_topk(call: AtenCall) -> list[Statement]:
    shape = call.shape(0)
    dim = call.dim(2, len(shape), -1)
    dims = letters(shape)
    made, sizes = result_axes(call.node.shape, [dim])
    right = [made[0] if d == dim else n for d, n in enumerate(dims)]
    args = (call.argument(0), call.argument(1), dim, call.node.index, bool(call.argument(3, default=True)))
    annotation = f"{written(dims, {dim: '^'})} -> {' '.join(right)}"
    return [call.statement(f"topk_part({call.tensor(0)})", annotation, sizes=sizes, op="topk", args=args)]


def _capture_of_all(call: AtenCall) -> list[Statement]:
    """A reduction that is no sum of the results of pieces: the reduced dims are needed whole, the others pass."""
    rank = len(call.shape(0))
    given = call.argument(2 if call.name in {"linalg_vector_norm", "norm"} else 1, call.node.kwargs.get("dim"))
    if (call.name == "median" and given is None) or (call.name == "norm" and not isinstance(given, list)):
        raise NotKnownError
    dims = [d % rank for d in whole_numbers(given)] if given not in (None, []) else list(range(rank))
    if len(call.node.operands()) != 1 or not rank:
        raise NotKnownError
    keep = len(call.node.shape) == rank
    axes = axes_but(rank, dims)
    result = ["1" if d in dims else axis for d, axis in enumerate(axes) if keep or d not in dims]
    return annotated(call, [(call.tensor(0), axes)], result)


def _capture_variance(call: AtenCall) -> list[Statement]:
    """Variances and means over dims, from sums of pieces: the mean, squared differences from it, their sum.

    Each result of `var_mean` is computed separately, so an unused one costs nothing.
    """
    shape, (x, given) = call.shape(0), (call.tensor(0), call.argument(1, call.node.kwargs.get("dim")))
    rank, correction = len(shape), call.node.kwargs.get("correction", 1)
    keep = bool(call.node.kwargs.get("keepdim", call.argument(3, default=False)))
    if call.node.op.endswith(".dim"):
        correction = int(call.argument(2, default=True))
    elif isinstance(given, bool) or len(call.node.args) > 2:
        raise NotKnownError  # `var(x, unbiased)`
    if not rank or call.node.dtype not in FLOATS:
        raise NotKnownError
    dims = sorted({d % rank for d in whole_numbers(given)} if given not in (None, []) else set(range(rank)))
    count = prod(shape[d] for d in dims)
    kept = tuple(1 if d in dims else n for d, n in enumerate(shape))
    left = call.node.shape if not keep else tuple(n for d, n in enumerate(shape) if d not in dims)
    out = list[Statement]()

    def then(suffix: str, formula: str, op: str, args: tuple[Any, ...], shape: tuple[int, ...]) -> str:
        result = f"{call.node.name}_{suffix}"[-64:]
        out.append(call.statement(formula, result=result, op=op, args=args, shape=shape, index=None))
        return result

    def mean(suffix: str, of: str, by: float) -> str:
        sums = then(f"{suffix}_sum", f"sum({of}, {dims}, keepdim=True)", "reduce.sum", (tensor(of), dims, True), kept)
        return then(suffix, f"{sums} / {by!r}", "aten.div.Scalar", (tensor(sums), by), kept)

    found = mean("mean", x, count)
    if call.name != "var_mean" or not call.node.index:
        off = then("off", f"{x} - {found}", "aten.sub.Tensor", (tensor(x), tensor(found)), shape)
        squares = then("squares", f"{off} * {off}", "aten.mul.Tensor", (tensor(off), tensor(off)), shape)
        found = mean("variance", squares, max(0, count - (1 if correction is None else correction)))
        if call.name in {"std", "std_mean"}:
            found = then("deviation", f"sqrt({found})", "aten.sqrt.default", (tensor(found),), kept)
    last = kept if keep else left
    out.append(call.statement(f"reshape({found}, {list(last)})", op="reshape", args=(tensor(found),)))
    return out


OPS = (
    Op(
        names="sum",
        axes=_reduced,
        gradient=_sum_gradient,
        aten="sum",
        capture=_capture_reduction,
        kernels="reduce.sum",
        saves=Saves.NOTHING,
    ),
    Op(
        names="mean",
        axes=_reduced,
        kind="avg",
        gradient=_mean_gradient,
        aten="mean",
        capture=_capture_reduction,
        kernels="reduce.mean",
        saves=Saves.NOTHING,
    ),
    Op(names="amax", axes=_reduced, kind="max", gradient=_largest_gradient, aten="amax", capture=_capture_reduction),
    Op(names="amin", axes=_reduced, kind="min", gradient=_largest_gradient, aten="amin", capture=_capture_reduction),
    Op(names="max", axes=_reduced, kind="max", several=True),
    Op(names="min", axes=_reduced, kind="min", several=True),
    Op(names="prod", axes=_reduced, kind="product"),
    Op(names="var std norm", axes=_reduced),
    Op(names="any all", axes=_reduced, gradient=no_gradient),
    Op(
        names="logsumexp",
        axes=_logsumexp,
        kind="logsumexp",
        merges=True,
        statistics=(("rows", "max"), ("rows", "sum")),
        gradient=_logsumexp_gradient,
    ),
    Op(names="topk", axes=_top_k, kind="topk", merges=True, several=True, aten="topk", capture=_capture_topk),
    Op(
        aten="linalg_vector_norm norm logsumexp prod any all max min median argmax argmin aminmax",
        capture=_capture_of_all,
    ),
    Op(aten="var std var_mean", capture=_capture_variance),
    Op(names="argmax argmin", axes=_arg, kind="arg", merges=True, gradient=no_gradient),
)
