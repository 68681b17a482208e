"""Functions of numbers of rows: lookups, scatters, one-hot vectors, positions."""

from __future__ import annotations

from planner.sharding.formulas.axis_flow import NotUnderstood, Value
from planner.sharding.functions.walker import Call


def embedding(call: Call) -> Value:
    flow, ids, w = call.flow, call.value(0), call.value(1, "weight")
    flow.positional.update(flow.dim(w.dims[0]))
    return flow.contract(w.dims[:1], Value((*ids.dims, *w.dims[1:]), w.pending), "sum", "embedding")


def embedding_bwd(call: Call) -> Value:
    """`embedding_bwd(gradient, ids, rows)`: rows of the gradient added up by number."""
    flow, gradient, ids = call.flow, call.value(0), call.value(1)
    for dim, other in zip(ids.dims, gradient.dims, strict=False):
        flow.unify(dim, other, call.name)
    made = flow.new_dim(call.number(2, "rows", 1))
    flow.created.update(made)
    flow.positional.update(made)
    count = len(ids.dims)
    return flow.contract(
        gradient.dims[:count], Value((made, *gradient.dims[count:]), gradient.pending), "sum", call.name
    )


def scattered(call: Call) -> Value:
    """`x.index_add(0, index, source)`: rows of the source added into rows of x."""
    flow, x, index, source = call.flow, call.value(0), call.value(2, "index"), call.value(3, "source")
    if call.number(1, "dim", 0) != 0:
        raise NotUnderstood(f"{call.name} along another dim than the first")
    flow.positional.update(flow.dim(x.dims[0]))
    if not set(flow.dim(x.dims[0])) <= flow.created:
        flow.keep_unsharded(x.dims[0], f"{call.name} adds to rows by number")
    rows = flow.unify(index.dims[0], source.dims[0], call.name)
    rest = flow.broadcast([x.dims[1:], source.dims[1:]], call.name)
    return flow.contract([rows], Value((x.dims[0], *rest), source.pending), "sum", call.name)


def one_hot(call: Call) -> Value:
    made = call.flow.new_dim(call.number(1, "num_classes", 1))
    call.flow.created.update(made)
    call.flow.positional.update(made)
    return Value((*call.value(0).dims, made))


def rotary(call: Call) -> Value:
    """Rotary embedding: pairs of the last dim; angles by position, given or by number."""
    flow, value = call.flow, call.flow.finish(call.value(0), "a rotation needs finished sums")
    flow.keep_unsharded(value.dims[-1], "a rotation mixes elements of it")
    for angles in call.values()[1:]:
        flow.keep_unsharded(angles.dims[-1], "a rotation mixes elements of it")
        known = {axis for dim in flow.dims(value) for axis in dim}
        if not {axis for dim in flow.dims(angles)[:-1] for axis in dim} <= known:
            flow.broadcast([value.dims[:-1], angles.dims[:-1]], call.name)
    if len(value.dims) > 1 and len(call.values()) == 1:
        flow.positional.update(flow.dim(value.dims[-2]))
    return Value(value.dims)
