"""Functions of row numbers: lookups, scatters, one-hot vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.sharding.ops.aten import LETTERS, AtenCall, NotKnownError, Statement, annotated, axes_but, made
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
    """A lookup; the padding row has no gradient. Gradients scaled by frequency need all numbers."""
    padding, by_frequency, sparse = (
        call.argument(2, -1),
        call.argument(3, default=False),
        call.argument(4, default=False),
    )
    if by_frequency or sparse:
        raise NotKnownError
    args = (call.argument(0), call.argument(1), *([] if padding == -1 else [padding]))
    return [call.statement(f"embedding({call.tensor(1)}, {call.tensor(0)})", op="embedding", args=args)]


def _capture_indexed(call: AtenCall) -> list[Statement]:
    """Elements selected by number along some dims, which are needed whole; rows of a matrix as an embedding lookup."""
    listed, shape = call.argument(1), call.shape(0)
    if len(shape) == 2 and len(listed) == 1 and call.node.dtype in FLOATS:
        matrix, lines = call.tensor(0), str(listed[0]["tensor"])
        args = ({"tensor": matrix}, {"tensor": lines})
        return [call.statement(f"embedding({lines}, {matrix})", op="rows", args=args)]
    indexed, numbers, axes = _numbered(call, listed)
    picked = axes_but(len(shape), indexed)
    return annotated(call, [(call.tensor(0), picked), *numbers], _indexed_axes(picked, indexed, axes))


def _indexed_axes(picked: Sequence[str], indexed: Sequence[int], axes: Sequence[str]) -> list[str]:
    """Return the axes of what is picked: those of the numbers replace the indexed dims if these are neighbours, and
    come first otherwise.
    """
    together = list(indexed) == list(range(indexed[0], indexed[-1] + 1))
    first = indexed[0] if together else 0
    rest = [axis for d, axis in enumerate(picked) if d not in indexed]
    return [*rest[:first], *axes, *rest[first:]]


def _numbered(
    call: AtenCall, listed: Sequence[Any], mark: str = ""
) -> tuple[list[int], list[tuple[str, list[str]]], list[str]]:
    """Return which dims are indexed, the axes of every index, and those of all of them broadcast.

    Raises NotKnownError for a mask, whose result has as many elements as it has ones.
    """
    indexed = [d for d, one in enumerate(listed) if one is not None]
    names = [str(listed[d]["tensor"]) for d in indexed]
    if not names or any(call.dtypes.get(name) in {"bool", "u8"} for name in names):
        raise NotKnownError
    rank = max(len(call.shapes[name]) for name in names)
    axes = [f"i{LETTERS[d]}{mark}" for d in range(rank)]
    return indexed, [(name, axes[rank - len(call.shapes[name]) :]) for name in names], axes


def _capture_put(call: AtenCall) -> list[Statement]:
    """`index_put`: along dims that are indexed, all numbers and values are needed; other dims pass."""
    shape = call.shape(0)
    indexed, numbers, axes = _numbered(call, call.argument(1), "^")
    picked = axes_but(len(shape), indexed)
    values = _indexed_axes(picked, indexed, axes)
    own = values[len(values) - len(call.shape(2)) :] if call.shape(2) else []
    result = [made(f"r{LETTERS[d]}", n) if d in indexed else picked[d] for d, n in enumerate(shape)]
    return annotated(call, [(call.tensor(0), picked), *numbers, (call.tensor(2), own)], result)


def _capture_along(call: AtenCall) -> list[Statement]:
    """`gather`, `index_select`: the dim that is read by number is needed whole, and the numbers pass."""
    at = 1 if call.name == "take_along_dim" else 2  # position of the numbers
    shape, index = call.shape(0), call.shape(at)
    dim = call.dim(3 - at, len(shape))
    picked = axes_but(len(shape), [dim])
    result = ["n" if d == dim else axis for d, axis in enumerate(picked)]
    if call.name == "index_select":
        return annotated(call, [(call.tensor(0), picked), (call.tensor(at), ["n"][: len(index)])], result)
    if any(n != index[d] for d, n in enumerate(shape) if d != dim):
        raise NotKnownError
    return annotated(call, [(call.tensor(0), picked), (call.tensor(at), result)], result)


def _capture_added(call: AtenCall) -> list[Statement]:
    """`index_add`, `index_copy`, `scatter_add` and the like: the dim that is written by number is needed whole."""
    shape, index, source = call.shape(0), call.shape(2), call.shape(3)
    dim = call.dim(1, len(shape))
    picked = axes_but(len(shape), [dim])
    written_axes = ["n^" if d == dim else axis for d, axis in enumerate(picked)]
    by_row = call.name.startswith("index_")
    if any(n != source[d] for d, n in enumerate(shape) if d != dim) or (not by_row and index != source):
        raise NotKnownError
    result = [made("r", shape[dim]) if d == dim else axis for d, axis in enumerate(picked)]
    numbers = ["n^"][: len(index)] if by_row else written_axes
    return annotated(
        call, [(call.tensor(0), picked), (call.tensor(2), numbers), (call.tensor(3), written_axes)], result
    )


def _capture_one_hot(call: AtenCall) -> list[Statement]:
    axes = axes_but(len(call.shape(0)), [])
    return annotated(call, [(call.tensor(0), axes)], [*axes, made("r", call.node.shape[-1])])


def _capture_bags(call: AtenCall) -> list[Statement]:
    """`embedding_bag`: sums or means of rows. The width passes; numbers and offsets of bags are needed whole."""
    if call.node.index != 0 or call.argument(3, default=False) or call.argument(5, default=False):
        raise NotKnownError  # scaled by frequency, or with sparse gradients
    operands = [(call.tensor(0), ["v^", "d"]), (call.tensor(1), axes_but(4, range(4))[: len(call.shape(1))])]
    operands += [(call.tensor(2), ["o^"])]
    weights = call.optional_tensor(6, "per_sample_weights")
    operands += [(weights, ["n^"])] if weights else []
    return annotated(call, operands, [made("r", call.node.shape[0]), "d"])


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
    Op(aten="index", capture=_capture_indexed),
    Op(aten="index_put", capture=_capture_put),
    Op(aten="gather index_select take_along_dim", capture=_capture_along),
    Op(aten="index_add index_copy scatter_add", capture=_capture_added),
    Op(aten="one_hot", capture=_capture_one_hot),
    Op(aten="embedding_bag", capture=_capture_bags),
)
