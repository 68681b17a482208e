"""Attention: heads pass through, rows of keys are merged by their statistics, and heads may share keys."""

from __future__ import annotations

from collections.abc import Sequence

from planner.sharding.formulas.annotation import Dim
from planner.sharding.formulas.axis_flow import AxisFlow, NotUnderstood, Value
from planner.sharding.functions.reductions import merge_or_keep
from planner.sharding.functions.walker import Call


def attention(call: Call) -> Value:
    """`attn(q, k, v)` of `[..., s, d]`, `[..., z, d]`, `[..., z, e]`; heads of q may be (heads of k, group)."""
    flow = call.flow
    q, k, v = (flow.finish(call.value(n), "attention needs finished sums") for n in range(3))
    if min(len(value.dims) for value in (q, k, v)) < 2:
        raise NotUnderstood("attention without rows")
    for dim in (flow.unify(q.dims[-1], k.dims[-1], "attention"), v.dims[-1] if v.dims[-1] == q.dims[-1] else ()):
        flow.keep_unsharded(dim, "attention multiplies along it before its softmax")
    keys = flow.unify(k.dims[-2], v.dims[-2], "attention")
    if set(flow.dim(keys)) & set(flow.dim(q.dims[-2])):
        flow.keep_unsharded(keys, "it has both the queries and the keys: every query needs all keys")
    flow.reduced.update(flow.dim(keys))
    merge_or_keep(call, "attention", keys, "every query needs all keys")
    if call.flag(3, "is_causal") or call.flag(3, "causal"):
        flow.positional.update((*flow.dim(keys), *flow.dim(q.dims[-2])))
    batch = batch_of_attention(flow, q.dims[:-2], (k.dims[:-2], v.dims[:-2]))
    for extra in call.arguments[3:]:
        if call.walker.names_in(extra):
            raise NotUnderstood("attention with a mask that is a tensor")
    return Value((*batch, q.dims[-2], v.dims[-1]))


def batch_of_attention(flow: AxisFlow, queries: tuple[Dim, ...], others: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """Unify the dims before rows; grouped heads of queries are (heads of keys, queries a head)."""
    out = []
    for n, dim in enumerate(queries):
        joined = dim
        for other in others:
            if len(other) != len(queries):
                raise NotUnderstood("attention over tensors of different rank")
            size, fewer = flow.size(joined), flow.size(other[n])
            if fewer in {size, 1}:
                joined = flow.unify(joined, other[n], "attention")
            elif size % fewer == 0:
                joined = _grouped_heads(flow, flow.dim(joined), flow.dim(other[n]))
            else:
                raise NotUnderstood(f"attention of {size} heads over {fewer}")
        out.append(joined)
    return tuple(out)


def _grouped_heads(flow: AxisFlow, heads: Dim, fewer: Dim) -> Dim:
    if len(heads) > 1 and flow.size(heads[:1]) == flow.size(fewer):
        return (*flow.unify(heads[:1], fewer, "attention"), *heads[1:])
    if len(heads) == 1 and heads[0] not in flow.given:
        outer, inner = flow.new_axis(flow.size(fewer)), flow.new_axis(flow.size(heads) // flow.size(fewer))
        flow._replace(heads[0], (outer, inner))
        return (*flow.unify((outer,), fewer, "attention"), inner)
    why = "several query heads share a key head: write (K g) for the query heads"
    flow.keep_unsharded((*heads, *fewer), why)
    return heads


def attention_rows(call: Call) -> Value:
    """`attention_rows(q, k)`: the logarithm of the sum of exponentials of every row of scores."""
    flow = call.flow
    q, k = (flow.finish(call.value(n), "attention needs finished sums") for n in range(2))
    flow.keep_unsharded(
        flow.unify(q.dims[-1], k.dims[-1], "attention"), "attention multiplies along it before its softmax"
    )
    keys = flow.dim(k.dims[-2])
    if set(keys) & set(flow.dim(q.dims[-2])):
        flow.keep_unsharded(keys, "it has both the queries and the keys: every query needs all keys")
    flow.reduced.update(keys)
    merge_or_keep(call, "attention_rows", keys, "every query needs all keys")
    if call.flag(2, "causal"):
        flow.positional.update((*keys, *flow.dim(q.dims[-2])))
    return Value((*batch_of_attention(flow, q.dims[:-2], (k.dims[:-2],)), q.dims[-2]))


def attention_gradient(call: Call) -> Value:
    """`attention_bwd_q(gradient, q, k, v, rows, along)`, and likewise `_k` and `_v`.

    With the sums of rows known, a pair of a query and a key adds its part by itself: the gradient of queries is a sum
    over keys, those of keys and values are sums over queries, and over the heads of queries that share them.
    """
    flow, of = call.flow, call.name[-1]
    gradient, q, k, v, rows, along = (flow.finish(call.value(n), "a gradient needs finished sums") for n in range(6))
    width = flow.unify(q.dims[-1], k.dims[-1], "attention")
    values = flow.unify(gradient.dims[-1], v.dims[-1], "attention")
    for dim in (width, values):
        flow.keep_unsharded(dim, "attention multiplies along it before its softmax")
    keys = flow.unify(k.dims[-2], v.dims[-2], "attention")
    queries = flow.unify(flow.unify(q.dims[-2], gradient.dims[-2], "attention"), rows.dims[-1], "attention")
    queries = flow.unify(queries, along.dims[-1], "attention")
    if set(flow.dim(keys)) & set(flow.dim(queries)):
        flow.keep_unsharded(keys, "it has both the queries and the keys: every query needs all keys")
    if call.flag(6, "causal"):
        flow.positional.update((*flow.dim(keys), *flow.dim(queries)))
    heads = batch_of_attention(flow, gradient.dims[:-2], (q.dims[:-2], rows.dims[:-1], along.dims[:-1]))
    heads = batch_of_attention(flow, heads, (k.dims[:-2], v.dims[:-2]))
    if of == "q":
        return flow.contract([keys], Value((*heads, queries, width)), "sum", call.name)
    fewer = batch_of_attention(flow, k.dims[:-2], (v.dims[:-2],))
    groups = [
        tuple(axis for axis in flow.dim(many) if axis not in flow.dim(few))
        for many, few in zip(heads, fewer, strict=True)
    ]
    kept = Value((*fewer, keys, width if of == "k" else values))
    return flow.contract([queries, *groups], kept, "sum", call.name)
