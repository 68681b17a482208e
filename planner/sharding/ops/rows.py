"""Functions of numbers of rows: lookups, scatters, one-hot vectors."""

from __future__ import annotations

from planner.sharding.ops.aten import AtenCall, NotKnownError, Statement
from planner.sharding.ops.axis_flow import NotUnderstood, Value
from planner.sharding.ops.elementwise import FLOATS
from planner.sharding.ops.op import Op, Saves, Step, no_gradient
from planner.sharding.ops.walker import Call


def _embedding(call: Call) -> Value:
    flow, ids, w = call.flow, call.value(0), call.value(1, "weight")
    flow.positional.update(flow.dim(w.dims[0]))
    return flow.contract(w.dims[:1], Value((*ids.dims, *w.dims[1:]), w.pending), "sum", "embedding")


def _embedding_bwd(call: Call) -> Value:
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


def _scattered(call: Call) -> Value:
    """`x.index_add(0, index, source)`: rows of the source added into rows of x."""
    flow, index, source = call.flow, call.value(2, "index"), call.value(3, "source")
    x = flow.finish(call.value(0), f"{call.name} adds to it once")
    if call.number(1, "dim", 0) != 0:
        raise NotUnderstood(f"{call.name} along another dim than the first")
    flow.positional.update(flow.dim(x.dims[0]))
    if not set(flow.dim(x.dims[0])) <= flow.created:
        flow.keep_unsharded(x.dims[0], f"{call.name} adds to rows by number")
    rows = flow.unify(index.dims[0], source.dims[0], call.name)
    rest = flow.broadcast([x.dims[1:], source.dims[1:]], call.name)
    return flow.contract([rows], Value((x.dims[0], *rest), source.pending), "sum", call.name)


def _one_hot(call: Call) -> Value:
    made = call.flow.new_dim(call.number(1, "num_classes", 1))
    call.flow.created.update(made)
    call.flow.positional.update(made)
    return Value((*call.value(0).dims, made))


def _embedding_gradient(step: Step) -> dict[str, str]:
    ids, weight = step.tensor(0), step.tensor(1)
    return {weight: f"embedding_bwd({step.gradient}, {ids}, {step.shape(weight)[0]})"}


def _capture_embedding(call: AtenCall) -> list[Statement]:
    if call.argument(2, -1) != -1 or call.argument(4, default=False):
        raise NotKnownError
    args = (call.argument(0), call.argument(1))
    return [call.statement(f"embedding({call.tensor(1)}, {call.tensor(0)})", op="embedding", args=args, kwargs={})]


def _capture_indexed_rows(call: AtenCall) -> list[Statement]:
    """Rows of a matrix by number, as a lookup of embeddings has them."""
    listed = call.argument(1)
    if len(call.shape(0)) != 2 or len(listed) != 1 or call.node.dtype not in FLOATS:
        raise NotKnownError
    rows, numbers = call.tensor(0), str(listed[0]["tensor"])
    args = ({"tensor": rows}, {"tensor": numbers})
    return [call.statement(f"embedding({numbers}, {rows})", op="rows", args=args, kwargs={})]


OPS = (
    Op(
        names="embedding",
        axes=_embedding,
        gradient=_embedding_gradient,
        aten="embedding",
        capture=_capture_embedding,
        kernels="embedding",
        saves=Saves.NOTHING,
    ),
    Op(names="embedding_bwd", axes=_embedding_bwd, kind="scatter"),
    Op(names="index_add scatter_add index_put", axes=_scattered, kind="scatter"),
    Op(names="one_hot", axes=_one_hot, gradient=no_gradient),
    Op(aten="index", capture=_capture_indexed_rows),
)
