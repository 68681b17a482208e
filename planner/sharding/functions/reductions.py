"""Reductions, and functions that normalize over an axis: computed from statistics of pieces where they can be."""

from __future__ import annotations

from planner.sharding.formulas.annotation import Dim
from planner.sharding.formulas.axis_flow import NotUnderstood, Value
from planner.sharding.functions.indexing import position
from planner.sharding.functions.walker import Call, Made

_REDUCERS = {"sum": "sum", "mean": "avg", "amax": "max", "max": "max", "amin": "min", "min": "min", "prod": "product"}


def reduced(call: Call) -> Made:
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


def softmax(call: Call) -> Value:
    value = call.flow.finish(call.value(0), f"{call.name} needs finished sums")
    dim = value.dims[position(call.number(1, "dim", -1), value)]
    merge_or_keep(call, "softmax", dim, f"{call.name} divides by a sum over it")
    return value


def merge_or_keep(call: Call, kind: str, dim: Dim, why: str) -> None:
    """Note that `call` can be computed from statistics of pieces along `dim` if it is what the formula computes."""
    if call.walker.may_merge(call, kind):
        call.flow.merged.update(dict.fromkeys(call.flow.dim(dim), kind))
    else:
        call.flow.keep_unsharded(dim, why)


def logsumexp(call: Call) -> Value:
    flow, value = call.flow, call.flow.finish(call.value(0), f"{call.name} needs finished sums")
    at = position(call.number(1, "dim", -1), value)
    flow.reduced.update(flow.dim(value.dims[at]))
    merge_or_keep(call, "logsumexp", value.dims[at], f"{call.name} is no sum of what pieces give")
    keep = [()] if call.flag(2, "keepdim") else []
    return Value((*value.dims[:at], *keep, *value.dims[at + 1 :]))


def cross_entropy(call: Call) -> Value:
    """One loss a row: logits `[..., v]` and targets `[...]`."""
    flow, logits = call.flow, call.flow.finish(call.value(0), "a loss needs finished sums")
    if not logits.dims:
        raise NotUnderstood("logits without classes")
    flow.reduced.update(flow.dim(logits.dims[-1]))
    flow.positional.update(flow.dim(logits.dims[-1]))
    merge_or_keep(call, "cross_entropy", logits.dims[-1], "a loss divides by a sum over it")
    rows = [logits.dims[:-1], call.value(1).dims]
    return Value(flow.broadcast(rows, "the loss"))


def root_mean_square(call: Call) -> Value:
    flow, value = call.flow, call.flow.finish(call.value(0), "a norm needs finished sums")
    weights = [v for v in call.values()[1:] if v.dims]
    merge_or_keep(call, "rmsnorm", value.dims[-1], "a norm divides by a mean over it")
    return flow.elementwise([value, *weights], call.name)


def layer_norm(call: Call) -> Value:
    flow, value = call.flow, call.flow.finish(call.value(0), "a norm needs finished sums")
    weights = [v for v in call.values()[1:] if v.dims]
    trailing = max([len(v.dims) for v in weights], default=1)
    for dim in value.dims[-trailing:]:
        merge_or_keep(call, "layernorm", dim, "a norm subtracts a mean over it")
    return flow.elementwise([value, *weights], call.name)


def group_norm(call: Call) -> Value:
    flow, value = call.flow, call.flow.finish(call.value(0), "a norm needs finished sums")
    for dim in value.dims[1:] if call.name != "batch_norm" else (value.dims[0], *value.dims[2:]):
        flow.keep_unsharded(dim, f"{call.name} takes means over it")
    for weight in call.values()[1:]:
        for dim in weight.dims:
            if call.name == "batch_norm":
                flow.unify(dim, value.dims[1], call.name)
            else:
                flow.keep_unsharded(dim, f"{call.name} takes means over it")
    return value


def top_k(call: Call) -> list[Value]:
    flow, value = call.flow, call.flow.finish(call.value(0), "topk needs finished sums")
    at = position(call.number(2, "dim", -1), value)
    flow.reduced.update(flow.dim(value.dims[at]))
    merge_or_keep(call, "topk", value.dims[at], "the largest of a piece need not be the largest of all")
    made = flow.new_dim(call.number(1, "k", 1))
    flow.keep_unsharded(made, "the k largest are needed together")
    return [Value((*value.dims[:at], made, *value.dims[at + 1 :]))] * 2


def arg(call: Call) -> Value:
    flow, value = call.flow, call.flow.finish(call.value(0), f"{call.name} needs finished sums")
    at = position(call.number(1, "dim", -1), value)
    flow.reduced.update(flow.dim(value.dims[at]))
    flow.positional.update(flow.dim(value.dims[at]))
    merge_or_keep(call, "arg", value.dims[at], "the largest of a piece need not be the largest of all")
    return Value((*value.dims[:at], *value.dims[at + 1 :]))
