"""Parts of a dim, and dims joined."""

from __future__ import annotations

from planner.sharding.frontends.rules.elements import same_elements
from planner.sharding.frontends.rules.statement import Call, NotKnownError, Statement, letters, result_axes, written
from simulator.sharded.graph import GraphNode


def _part(call: Call, dim: int, start: int, step: int = 1) -> list[Statement]:
    before, after = call.shape(0), call.node.shape
    if before == after:
        return same_elements(call)
    args = (call.argument(0), dim, start, after[dim], step)
    formula = f"narrow({call.tensor(0)}, {dim}, {start}, {after[dim]})"
    return [call.statement(formula, op="range", args=args, kwargs={})]


def sliced(call: Call) -> list[Statement]:
    rank = len(call.shape(0))
    dim = call.dim(1, rank, 0)
    size = call.shape(0)[dim]
    start, step = call.argument(2) or 0, call.argument(4, 1)
    return _part(call, dim, max(0, start + size) if start < 0 else min(start, size), int(step))


def select(call: Call) -> list[Statement]:
    shape = call.shape(0)
    dim, index = call.dim(1, len(shape)), int(call.argument(2))
    args = (call.argument(0), dim, index % shape[dim])
    formula = f"select({call.tensor(0)}, {dim}, {index % shape[dim]})"
    return [call.statement(formula, op="select", args=args, kwargs={})]


def pieces(call: Call) -> list[Statement]:
    """One of equal pieces of a dim: the dim is (piece, rest), and the rest may be sharded inside every piece."""
    before, after, index = call.shape(0), call.node.shape, call.node.index
    if index is None:
        raise NotKnownError
    if call.name == "unbind":
        inner = GraphNode(
            name=call.node.name,
            op=call.node.op,
            args=(call.node.args[0], call.argument(1, 0), index),
            shape=after,
            dtype=call.node.dtype,
        )
        return select(Call(inner, call.shapes))
    dim = call.dim(2, len(before), 0)
    sizes = call.argument(1)
    if call.name == "split_with_sizes" or isinstance(sizes, list):
        start = sum(sizes[:index])
    elif call.name == "split":
        start = index * int(sizes)
    else:
        start = index * -(-before[dim] // int(sizes))
    pieces, width = before[dim] // after[dim], after[dim]
    if before[dim] % width or start % width or pieces == 1 or width == 1:
        return _part(call, dim, start)
    dims = letters(before)
    inner_axis = f"y{width}"
    left = [f"(z{pieces}^ {inner_axis})" if d == dim else n for d, n in enumerate(dims)]
    right = [inner_axis if d == dim else n for d, n in enumerate(dims)]
    args = (call.argument(0), dim, start // width, pieces)
    return [
        call.statement(
            f"chunk({call.tensor(0)}, {pieces}, {dim})[{start // width}]",
            f"{' '.join(left)} -> {' '.join(right)}",
            sizes={inner_axis: width, f"z{pieces}": pieces},
            op="piece",
            args=args,
            kwargs={},
        )
    ]


def cat(call: Call) -> list[Statement]:
    listed = call.argument(0)
    names = [str(one["tensor"]) for one in listed]
    if call.name == "stack" or len(set(names)) != len(names):
        raise NotKnownError
    dim = call.dim(1, len(call.node.shape), 0)
    formula = f"cat([{', '.join(names)}], {dim})"
    return [call.statement(formula, op="aten.cat.default", args=(listed, dim), kwargs={})]


def scatter(call: Call) -> list[Statement]:
    """Elements put where an index along one dim says: that dim is needed whole, and the others pass."""
    shape, index, source = call.shape(0), call.shape(2), call.shape(3)
    dim = call.dim(1, len(shape))
    others = [d for d in range(len(shape)) if d != dim]
    if index != source or any(shape[d] != index[d] for d in others):
        raise NotKnownError
    dims = letters(shape)
    own = f"n{index[dim]}^" if index[dim] > 1 else "1"
    part = " ".join(own if d == dim else n for d, n in enumerate(dims))
    names = ", ".join(call.tensor(n) for n in (0, 2, 3))
    if len({call.tensor(n) for n in (0, 2, 3)}) < 3:
        raise NotKnownError
    made, sizes = result_axes(call.node.shape, [dim])
    right = " ".join(made[0] if d == dim else n for d, n in enumerate(dims))
    return [
        call.statement(f"scattered({names})", f"{written(dims, {dim: '^'})}, {part}, {part} -> {right}", sizes=sizes)
    ]
