"""Parts of a dim, dims joined, and functions that need all of a dim in its order."""

from __future__ import annotations

import ast

from planner.sharding.ops.annotation import Dim, number_of
from planner.sharding.ops.aten import (
    AtenCall,
    NotKnownError,
    Statement,
    annotated,
    axes_but,
    letters,
    made,
    result_axes,
    whole_numbers,
    written,
)
from planner.sharding.ops.axis_flow import NotUnderstood, Value
from planner.sharding.ops.elementwise import same_elements
from planner.sharding.ops.op import Op, Saves, Step, View, no_gradient, padded, view
from planner.sharding.ops.walker import Call, Made, part_of, position
from simulator.sharded.graph import GraphNode


def _padded(call: Call) -> Value:
    """`pad(x, (before, after, ...))`, from the last dim."""
    value, flow, numbers = call.value(0), call.flow, call.numbers(1, "pad") or []
    if len(numbers) % 2 or len(numbers) > 2 * len(value.dims):
        raise NotUnderstood("a padding that does not fit the dims")
    dims = list(value.dims)
    for n in range(len(numbers) // 2):
        added = numbers[2 * n] + numbers[2 * n + 1]
        if added or numbers[2 * n]:
            dims[-1 - n] = part_of(flow, dims[-1 - n], flow.size(dims[-1 - n]) + added, "pad appends to it")
    if len(call.arguments) > 2 or "value" in call.keywords:
        value = flow.finish(value, "a padding counts it once")
    return Value(tuple(dims), value.pending)


def _joined(call: Call) -> Value:
    """`cat` of equal shapes makes a dim (n dim); `stack` makes a new dim."""
    flow, values = call.flow, call.listed(0) or call.values()
    rank = len(values[0].dims)
    if any(len(value.dims) != rank for value in values):
        raise NotUnderstood("tensors of different rank joined")
    at = call.number(1, "dim", 0)
    at = at if at >= 0 else at + rank + (call.name == "stack")
    whole = [value.dims if call.name == "stack" else (*value.dims[:at], *value.dims[at + 1 :]) for value in values]
    rest = flow.add([Value(dims, value.pending) for dims, value in zip(whole, values, strict=True)], call.name)
    many = flow.new_dim(len(values))
    flow.keep_unsharded(many, f"{call.name} makes it of {len(values)} tensors")
    if call.name == "stack":
        return Value((*rest.dims[:at], many, *rest.dims[at:]), rest.pending)
    sizes = {flow.size(value.dims[at]) for value in values}
    if len(sizes) == 1:
        dim = flow.broadcast([(value.dims[at],) for value in values], "cat")[0]
        joined: Dim = (*many, *flow.dim(dim))
    else:
        for value in values:
            flow.keep_unsharded(value.dims[at], "cat appends another tensor to it", contradicts=True)
        joined = flow.new_dim(sum(flow.size(value.dims[at]) for value in values))
        flow.keep_unsharded(joined, "cat makes it of several tensors")
    return Value((*rest.dims[:at], joined, *rest.dims[at:]), rest.pending)


def _chunked(call: Call) -> list[Value]:
    """`chunk` and `split`: parts of a dim."""
    value, flow = call.value(0), call.flow
    at = position(call.number(2, "dim", 0), value)
    size = flow.size(value.dims[at])
    if call.name == "chunk":
        piece = -(-size // call.number(1, "chunks", 1))
        lengths = [min(piece, size - start) for start in range(0, size, piece)]
    else:
        node = call.node(1, "split_size_or_sections")
        each = number_of(node) if node is not None else None
        if each is None:
            found = [number_of(n) for n in node.elts] if isinstance(node, ast.List | ast.Tuple) else [None]
            lengths = [n for n in found if n is not None]
            if len(lengths) != len(found) or sum(lengths) != size:
                raise NotUnderstood("a split that is not written out")
        else:
            lengths = [min(each, size - start) for start in range(0, size, each)]
    dim = flow.dim(value.dims[at])
    if len(set(lengths)) == 1 and len(dim) > 1 and flow.sizes[dim[0]] == len(lengths):
        # one of the blocks of a dim, such as gate and up in a fused weight
        flow.keep_unsharded(dim[:1], f"{call.name} takes one block of it", contradicts=True)
        return [Value((*value.dims[:at], dim[1:], *value.dims[at + 1 :]), value.pending) for _ in lengths]
    why = f"{call.name} takes a part of it"
    return [
        Value((*value.dims[:at], part_of(flow, dim, length, why), *value.dims[at + 1 :]), value.pending)
        for length in lengths
    ]


def _narrowed(call: Call) -> Value:
    value = call.value(0)
    at = position(call.number(1, "dim", 0), value)
    part = part_of(call.flow, value.dims[at], call.number(3, "length", 1), f"{call.name} takes a part of it")
    return Value((*value.dims[:at], part, *value.dims[at + 1 :]), value.pending)


def _selected(call: Call) -> Value:
    """`index_select(dim, index)`, `gather(dim, index)` and `select(dim, n)`."""
    value, flow = call.value(0), call.flow
    at = position(call.number(1, "dim", 0), value)
    flow.keep_unsharded(value.dims[at], f"{call.name} takes elements of it by number", contradicts=True)
    if call.name == "select":
        return Value((*value.dims[:at], *value.dims[at + 1 :]), value.pending)
    index = call.value(2)
    if call.name == "index_select":
        return Value((*value.dims[:at], *index.dims, *value.dims[at + 1 :]), value.pending)
    others = [n for n in range(len(value.dims)) if n != at]
    for n in others:
        flow.unify(value.dims[n], index.dims[n], call.name)
    return Value(index.dims, value.pending)


def _ordered(call: Call) -> Made:
    """Functions that need all of one dim in its order and keep the dim: sort, cumsum, flip, roll."""
    value, flow = call.value(0), call.flow
    value = value if call.name in {"flip", "roll", "cumsum"} else flow.finish(value, f"{call.name} needs finished sums")
    first = 2 if call.name == "roll" else 1
    numbers = call.numbers(first, "dims" if "dims" in call.keywords else "dim")
    default = [-1] if call.name in {"sort", "argsort"} else list(range(len(value.dims)))
    for at in (numbers or default)[: None if call.name in {"flip", "roll"} else 1]:
        flow.keep_unsharded(
            value.dims[position(at, value)], f"{call.name} needs all of it in its order", contradicts=True
        )
    return [value, Value(value.dims)] if call.name == "sort" else value


def _triangle(call: Call) -> Value:
    value = call.value(0)
    for dim in value.dims[-2:]:
        call.flow.keep_unsharded(dim, f"{call.name} depends on where in it an element is", contradicts=True)
    return value


def _shaped(call: Call) -> Value:
    """`zeros(n, ...)` and the like: dims of which every rank can make its piece."""
    flow = call.flow
    values = call.values()
    if values:  # zeros_like and friends
        return Value(values[0].dims)
    first = call.node(0)
    sizes = [number_of(n) for n in (first.elts if isinstance(first, ast.List | ast.Tuple) else call.arguments)]
    if any(size is None for size in sizes):
        raise NotUnderstood("a shape that is not written out")
    dims = tuple(flow.new_dim(size) for size in sizes if size is not None)
    flow.created.update(axis for dim in dims for axis in dim)
    return Value(dims)


# --- gradients


def _cat_gradient(step: Step) -> dict[str, str]:
    listed = step.arguments[0]
    if not isinstance(listed, ast.List | ast.Tuple):
        raise NotUnderstood("cat of tensors that are not listed")
    names = [n.id for n in listed.elts if isinstance(n, ast.Name)]
    at = step.number(1, "dim", 0)
    sizes = [step.shape(name)[at] for name in names]
    found: dict[str, list[str]] = {}
    for n, name in enumerate(names):
        if step.name == "stack":
            text = f"{step.gradient}.select({at}, {n})"
        elif len(set(sizes)) == 1:
            text = f"{step.gradient}.chunk({len(names)}, {at})[{n}]"
        else:
            text = f"{step.gradient}.narrow({at}, {sum(sizes[:n])}, {sizes[n]})"
        found.setdefault(name, []).append(text)
    return {name: " + ".join(texts) for name, texts in found.items()}


def _chunk_gradient(step: Step) -> dict[str, str]:
    """All parts at once: each gradient put among zeros, or all joined if every part has one."""
    x, at = step.tensor(0), step.number(2, "dim", 0)
    before = step.shape(x)
    at %= len(before)
    lengths = _lengths(step, before[at])
    parts = [*step.parts, *[""] * (len(lengths) - len(step.parts))]
    if all(parts):
        return {x: f"cat([{', '.join(parts)}], {at})"}
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    texts = [
        padded(part, at, start, before[at] - start - length, len(before))
        for part, start, length in zip(parts, starts, lengths, strict=True)
        if part
    ]
    return {x: " + ".join(texts)}


def _lengths(step: Step, size: int) -> list[int]:
    """Return the lengths of all parts of a dim of `size` that `chunk` or `split` makes. Raises NotUnderstood."""
    given = step.argument(1, "split_size_or_sections")
    if isinstance(given, ast.List | ast.Tuple):
        found = [number_of(node) for node in given.elts]
        if None in found:
            raise NotUnderstood("a split that is not written out")
        return [n for n in found if n is not None]
    chunk = step.name == "chunk"
    number = step.number(1, "chunks" if chunk else "split_size_or_sections", 1)
    each = -(-size // number) if chunk else number
    return [min(each, size - start) for start in range(0, size, each)]


def _cumsum_gradient(step: Step) -> dict[str, str]:
    dim = step.number(1, "dim", 0)
    return {step.tensor(0): f"{step.gradient}.flip({dim}).cumsum({dim}).flip({dim})"}


# --- captured


def _part(call: AtenCall, dim: int, start: int, step: int = 1) -> list[Statement]:
    before, after = call.shape(0), call.node.shape
    if before == after:
        return same_elements(call)
    args = (call.argument(0), dim, start, after[dim], step)
    formula = f"narrow({call.tensor(0)}, {dim}, {start}, {after[dim]})"
    return [call.statement(formula, op="range", args=args)]


def _capture_sliced(call: AtenCall) -> list[Statement]:
    rank = len(call.shape(0))
    dim = call.dim(1, rank, 0)
    size = call.shape(0)[dim]
    start, step = call.argument(2) or 0, call.argument(4, 1)
    return _part(call, dim, max(0, start + size) if start < 0 else min(start, size), int(step))


def _capture_select(call: AtenCall) -> list[Statement]:
    shape = call.shape(0)
    dim, index = call.dim(1, len(shape)), int(call.argument(2))
    args = (call.argument(0), dim, index % shape[dim])
    formula = f"select({call.tensor(0)}, {dim}, {index % shape[dim]})"
    return [call.statement(formula, op="select", args=args)]


def _capture_pieces(call: AtenCall) -> list[Statement]:
    """One of equal pieces of a dim: the dim is (piece, rest), and the rest may be sharded within every piece."""
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
        return _capture_select(AtenCall(inner, call.shapes))
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
    formula = f"chunk({call.tensor(0)}, {pieces}, {dim})[{start // width}]"
    sizes = {inner_axis: width, f"z{pieces}": pieces}
    return [call.statement(formula, f"{' '.join(left)} -> {' '.join(right)}", sizes=sizes, op="piece", args=args)]


def _capture_cat(call: AtenCall) -> list[Statement]:
    listed = call.argument(0)
    names = [str(one["tensor"]) for one in listed]
    if not names or any(len(call.shapes[name]) != len(call.shapes[names[0]]) for name in names):
        raise NotKnownError
    word, dim = "stack" if call.name == "stack" else "cat", call.dim(1, len(call.node.shape), 0)
    formula = f"{word}([{', '.join(names)}], {dim})"
    return [call.statement(formula, op=f"aten.{word}.default", args=(listed, dim))]


def _capture_scatter(call: AtenCall) -> list[Statement]:
    """Elements written at positions of an index along one dim: that dim is needed whole, the others pass."""
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


def _capture_along_one_dim(call: AtenCall) -> list[Statement]:
    """Operators along one dim, which is needed whole: running sums, sorts, flips."""
    shape = call.shape(0)
    dim = call.dim(1, len(shape), -1)
    if call.node.shape != shape:
        raise NotKnownError
    return [call.statement(f"{call.name}({call.tensor(0)}, {dim})")]


def _capture_sorted(call: AtenCall) -> list[Statement]:
    """`sort` and the like: the dim is needed whole, and so are the results."""
    rank = len(call.shape(0))
    given = call.node.kwargs.get("dim", next((one for one in call.node.args[1:] if type(one) is int), -1))
    axes = axes_but(rank, [given % rank])
    return annotated(call, [(call.tensor(0), axes)], axes)


def _capture_turned(call: AtenCall) -> list[Statement]:
    """`roll`, `flip`: dims whose elements change places are needed whole."""
    shape = call.shape(0)
    dims = whole_numbers(call.argument(2 if call.name == "roll" else 1, []))
    if not dims:  # of all elements in a row
        raise NotKnownError
    axes = axes_but(len(shape), [d % len(shape) for d in dims])
    return annotated(call, [(call.tensor(0), axes)], axes)


def _capture_put_back(call: AtenCall) -> list[Statement]:
    """`select_scatter`, `slice_scatter`: a tensor put into a part of another's dim, which is needed whole."""
    shape = call.shape(0)
    dim = call.dim(2, len(shape), 0)
    axes = axes_but(len(shape), [dim])
    part = [axis for d, axis in enumerate(axes) if d != dim]
    where = [call.argument(3)]
    if call.name == "slice_scatter":
        part.insert(dim, "n^")
        where = [call.argument(3), call.argument(4), call.argument(5, 1)]
    result = [made("r", shape[dim]) if d == dim else axis for d, axis in enumerate(axes)]
    args = (call.argument(0), call.argument(1), dim, *where)
    return annotated(call, [(call.tensor(0), axes), (call.tensor(1), part)], result, op="put_back", args=args)


def _capture_triangle(call: AtenCall) -> list[Statement]:
    rank = len(call.shape(0))
    axes = axes_but(rank, [rank - 2, rank - 1])
    return annotated(call, [(call.tensor(0), axes)], axes)


def _narrow_back(text: str, view: View) -> str:
    at, start, length = view.dim(0), view.numbers[1] or 0, view.numbers[2] or 1
    return padded(text, at, start, view.before[at] - start - length, len(view.before))


def _select_back(text: str, view: View) -> str:
    at = view.dim(0)
    front = (view.numbers[1] or 0) % view.before[at]
    return padded(f"{text}.unsqueeze({at})", at, front, view.before[at] - front - 1, len(view.before))


def _roll_back(text: str, view: View) -> str:
    if len(view.numbers) != 2 or view.numbers[0] is None:
        raise NotUnderstood("the gradient of roll")
    return f"roll({text}, {-view.numbers[0]}, {view.numbers[1]})"


def _flip_back(text: str, view: View) -> str:
    return f"{text}.flip({', '.join(str(n) for n in view.numbers)})"


_PIECES = "split split_with_sizes chunk unbind"
OPS = (
    view(
        "chunk split", _chunked, _capture_pieces, aten=_PIECES, kernels="piece", several=True, gradient=_chunk_gradient
    ),
    view("narrow", _narrowed, _capture_sliced, aten="slice", kernels="range", back=_narrow_back),
    view("select", _selected, _capture_select, kernels="select", back=_select_back),
    view("index_select", _selected),
    Op(names="gather take_along_dim", axes=_selected),
    Op(
        names="cat concat stack",
        axes=_joined,
        rearranges=True,
        gradient=_cat_gradient,
        aten="cat concat stack",
        capture=_capture_cat,
        kernels="cat stack",
        saves=Saves.NOTHING,
    ),
    view("pad", _padded),
    view("flip", _ordered, _capture_turned, back=_flip_back),
    view("roll", _ordered, _capture_turned, back=_roll_back),
    Op(aten="select_scatter slice_scatter", capture=_capture_put_back),
    Op(names="cumsum", axes=_ordered, gradient=_cumsum_gradient, aten="cumsum", capture=_capture_along_one_dim),
    Op(names="cumprod", axes=_ordered, aten="cumprod", capture=_capture_along_one_dim),
    Op(names="sort", axes=_ordered, several=True, aten="sort", capture=_capture_sorted),
    Op(names="argsort", axes=_ordered, gradient=no_gradient, aten="argsort", capture=_capture_sorted),
    Op(aten="cummax cummin", capture=_capture_sorted),
    Op(names="cummax logcumsumexp diff", axes=_ordered, aten="logcumsumexp", capture=_capture_along_one_dim),
    Op(names="tril triu", axes=_triangle, aten="tril triu", capture=_capture_triangle),
    Op(names="zeros ones full zeros_like ones_like", axes=_shaped, gradient=no_gradient),
    Op(names="empty", axes=_shaped),
    Op(aten="scatter", capture=_capture_scatter),
)
