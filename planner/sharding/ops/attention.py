"""Attention: heads pass through, rows of keys are merged by their statistics, and heads may share keys."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from planner.sharding.layouts.layout import Layout
from planner.sharding.ops.annotation import Dim, is_true
from planner.sharding.ops.aten import AtenCall, NotKnownError, Statement
from planner.sharding.ops.axis_flow import AxisFlow, NotUnderstood, Value
from planner.sharding.ops.op import Op, Phase, Saves, Step, reduced_phase, statistic, tensor
from planner.sharding.ops.walker import Call, merge_or_keep
from simulator.sharded.program import RING_ATTENTION


def _attention(call: Call) -> Value:
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
    batch = _batch(flow, q.dims[:-2], (k.dims[:-2], v.dims[:-2]))
    for extra in call.arguments[3:]:
        if call.walker.names_in(extra):
            batch = _masked(call, extra, (*batch, q.dims[-2], keys))
    return Value((*batch, q.dims[-2], v.dims[-1]))


def _masked(call: Call, extra: ast.expr, scores: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Unify the dims of a mask, or of a bias of the scores, from the last one; return the batch dims."""
    flow, mask = call.flow, call.flow.finish(call.walker.value(extra), "attention needs a finished mask")
    if len(mask.dims) > len(scores):
        raise NotUnderstood("a mask with more dims than the scores")
    first = len(scores) - len(mask.dims)
    for dim, own in zip(scores[first:], mask.dims, strict=True):
        flow.unify(dim, own, "a mask")
    return scores[:-2]


def _batch(flow: AxisFlow, queries: tuple[Dim, ...], others: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """Unify the dims before rows; grouped heads of queries are (heads of keys, queries per head)."""
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


def _rows(call: Call) -> Value:
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
    return Value((*_batch(flow, q.dims[:-2], (k.dims[:-2],)), q.dims[-2]))


def _attention_gradient(call: Call) -> Value:
    """`attention_bwd_q(gradient, q, k, v, rows, along)`, and likewise `_k` and `_v`.

    With the sums of rows known, each pair of a query and a key contributes independently: the gradient of queries is a
    sum over keys, those of keys and values are sums over queries and over the heads of queries that share them.
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
    heads = _batch(flow, gradient.dims[:-2], (q.dims[:-2], rows.dims[:-1], along.dims[:-1]))
    heads = _batch(flow, heads, (k.dims[:-2], v.dims[:-2]))
    if of == "q":
        return flow.contract([keys], Value((*heads, queries, width)), "sum", call.name)
    fewer = _batch(flow, k.dims[:-2], (v.dims[:-2],))
    groups = [
        tuple(axis for axis in flow.dim(many) if axis not in flow.dim(few))
        for many, few in zip(heads, fewer, strict=True)
    ]
    kept = Value((*fewer, keys, width if of == "k" else values))
    return flow.contract([queries, *groups], kept, "sum", call.name)


def _unknown_gradient(call: Call) -> Value:
    flow, values = call.flow, call.values()
    for value in values:
        for dim in value.dims[-2:]:
            flow.keep_unsharded(dim, "the gradient of attention needs all queries and keys")
    for value in values[1:]:
        _batch(flow, values[0].dims[:-2], (value.dims[:-2],))
    raise NotUnderstood(f"which gradient {call.name} is")


def _gradient(step: Step) -> dict[str, str]:
    """From the logarithm of every row's sum of exponentials, which the forward kernel saves."""
    q, k, v = (step.tensor(n) for n in range(3))
    if isinstance(step.argument(3), ast.Name):
        raise NotUnderstood("the gradient of attention with a mask that is a tensor")
    causal = ", True" if is_true(step.argument(3, "is_causal")) or is_true(step.argument(3, "causal")) else ""
    rows = step.emit(f"attention_rows({q}, {k}{causal})")
    along = step.emit(f"({step.gradient} * {step.result}).sum(-1)")
    given = f"({step.gradient}, {q}, {k}, {v}, {rows}, {along}{causal})"
    return {q: f"attention_bwd_q{given}", k: f"attention_bwd_k{given}", v: f"attention_bwd_v{given}"}


def _capture(call: AtenCall) -> list[Statement]:
    q, k = call.shape(0), call.shape(1)
    mask = call.optional_tensor(3, "attn_mask")
    if call.argument(4, 0.0) or len(q) < 3 or len(k) != len(q) or q[:-3] != k[:-3] or call.node.kwargs.get("dropout_p"):
        raise NotKnownError
    names = [call.tensor(p) for p in range(3)] + ([mask] if mask else [])
    causal = bool(call.argument(5, default=False) or call.node.kwargs.get("is_causal"))
    args = ([{"tensor": name} for name in names], causal, call.node.kwargs.get("scale"))
    listed = ", ".join([*names, "True"] if causal and not mask else names)
    return [call.statement(f"attn({listed})", op="attention", args=args)]


def _phases(statement: Statement, layout: Layout, result: Layout) -> list[Phase]:
    del layout
    tensors, causal, scale = statement.args
    names, shape = tuple(one["tensor"] for one in tensors), statement.shape
    rows = statistic(result, shape, len(shape) - 1)
    given = (list(tensors), causal, scale)
    reads, after = (*names, "top"), (*given, tensor("top"))
    top = reduced_phase("top", "attention.max", names, given, "max", **rows)
    total = reduced_phase("total", "attention.sum", reads, after, "sum", **rows)
    values = reduced_phase("values", "attention.values", reads, after, "sum", shape=shape, layout=result)
    args = (tensor("values"), tensor("total"))
    return [*top, *total, *values, Phase(reads=("values", "total"), op="attention.finish", args=args, share=0.1)]


OPS = (
    Op(
        names="attn attention sdpa sdpfa scaled_dot_product_attention flash_attention mha gqa",
        axes=_attention,
        kind="attention",
        merges=True,
        statistics=(("rows", "max"), ("rows", "sum"), ("result", "sum")),
        gradient=_gradient,
        gradient_axes=_unknown_gradient,
        aten="scaled_dot_product_attention",
        capture=_capture,
        kernels=f"attention {RING_ATTENTION}",
        saves=Saves.BOTH,
        phases=_phases,
    ),
    Op(
        names="attention_rows",
        axes=_rows,
        kind="attention_rows",
        merges=True,
        statistics=(("result", "max"), ("result", "sum")),
    ),
    Op(names="attention_bwd_q attention_bwd_k attention_bwd_v", axes=_attention_gradient, kind="attention_bwd"),
)
