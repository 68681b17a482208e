"""Elementwise functions, and those that rearrange, cut, join or order the elements of a tensor."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from math import prod

from planner.sharding.formulas.annotation import Dim
from planner.sharding.formulas.axis_flow import AxisFlow, NotUnderstood, Value, number_of
from planner.sharding.functions.indexing import part_of, position
from planner.sharding.functions.walker import Call, Made


def elementwise(call: Call) -> Value:
    if call.name in {"mul", "multiply"}:
        return call.flow.multiply(call.values())
    if call.name in {"add", "sub"} and not call.keywords:
        return call.flow.add([call.walker.value(node) for node in call.arguments])
    if call.name == "neg":
        return call.value(0)
    return call.flow.elementwise(call.values(), call.name)


def identity(call: Call) -> Value:
    return call.value(0)


def rearranged(call: Call) -> Value:
    """A view of which only the annotation says what it is."""
    raise NotUnderstood(call.name)


def padded(call: Call) -> Value:
    """`pad(x, (before, after, ...))`, from the last dim."""
    value, flow, numbers = call.value(0), call.flow, call.numbers(1, "pad") or []
    if len(numbers) % 2 or len(numbers) > 2 * len(value.dims):
        raise NotUnderstood("a padding that does not fit the dims")
    dims = list(value.dims)
    for n in range(len(numbers) // 2):
        added = numbers[2 * n] + numbers[2 * n + 1]
        if added or numbers[2 * n]:
            dims[-1 - n] = part_of(flow, dims[-1 - n], flow.size(dims[-1 - n]) + added, "pad appends to it")
    return Value(tuple(dims), flow.finish(value, "a padding counts it once").pending)


def transposed(call: Call) -> Value:
    value = call.value(0)
    order = list(range(len(value.dims)))
    first, second = (
        (position(call.number(n, f"dim{n - 1}", n - 1), value) for n in (1, 2)) if call.name != "t" else (0, -1)
    )
    if order:
        order[first], order[second] = order[second], order[first]
    return Value(tuple(value.dims[n] for n in order), value.pending)


def permuted(call: Call) -> Value:
    value = call.value(0)
    order = [position(n, value) for n in call.numbers(1, "dims") or []]
    if sorted(order) != list(range(len(value.dims))):
        raise NotUnderstood("a permutation that names not every dim once")
    return Value(tuple(value.dims[n] for n in order), value.pending)


def movedim(call: Call) -> Value:
    value = call.value(0)
    source, target = position(call.number(1, "source", 0), value), position(call.number(2, "destination", 0), value)
    dims = list(value.dims)
    dims.insert(target, dims.pop(source))
    return Value(tuple(dims), value.pending)


def reshaped(call: Call) -> Value:
    value, flow = call.value(0), call.flow
    sizes = call.numbers(1, "shape")
    if sizes is None:
        raise NotUnderstood("a shape that is not written out")
    return Value(_regrouped(flow, [a for dim in flow.dims(value) for a in dim], sizes), value.pending)


def flattened(call: Call) -> Value:
    value, flow = call.value(0), call.flow
    if not value.dims:
        return value
    first = position(call.number(1, "start_dim", 0), value)
    last = position(call.number(2, "end_dim", -1), value)
    joined = tuple(axis for dim in flow.dims(value)[first : last + 1] for axis in dim)
    return Value((*value.dims[:first], joined, *value.dims[last + 1 :]), value.pending)


def unflattened(call: Call) -> Value:
    value, flow = call.value(0), call.flow
    at = position(call.number(1, "dim", 0), value)
    sizes = call.numbers(2, "sizes")
    if sizes is None:
        raise NotUnderstood("sizes that are not written out")
    parts = _regrouped(flow, list(flow.dim(value.dims[at])), sizes)
    return Value((*value.dims[:at], *parts, *value.dims[at + 1 :]), value.pending)


def _regrouped(flow: AxisFlow, axes: Sequence[str], sizes: Sequence[int]) -> tuple[Dim, ...]:
    """Return dims of `sizes` made of `axes` in their order, splitting an axis where a dim ends inside it."""
    total = prod(flow.sizes[axis] for axis in axes)
    known = prod(size for size in sizes if size != -1)
    sizes = [total // known if size == -1 and known else size for size in sizes]
    if prod(sizes) != total:
        raise NotUnderstood(f"a view of {total} elements as {list(sizes)}")
    out: list[Dim] = []
    for group, wanted in _groups_of_equal_size(flow, axes, sizes):
        out += _split_to_sizes(flow, group, wanted)
    return tuple(out)


def _groups_of_equal_size(
    flow: AxisFlow, axes: Sequence[str], sizes: Sequence[int]
) -> list[tuple[list[str], list[int]]]:
    """Return the shortest runs of axes, each with the dims that a view makes of it and of no other axis."""
    waiting, groups = list(axes), list[tuple[list[str], list[int]]]()
    have = want = 1
    for size in sizes:
        if have == want:
            groups.append(([], []))
            have = want = 1
        groups[-1][1].append(size)
        want *= size
        while have < want:
            groups[-1][0].append(waiting[0])
            have *= flow.sizes[waiting.pop(0)]
    return groups


def _split_to_sizes(flow: AxisFlow, axes: Sequence[str], sizes: Sequence[int]) -> list[Dim]:
    """Return dims of `sizes` made of `axes`, or of a new axis each that is kept whole where a dim ends inside a factor."""
    waiting, out = list(axes), list[Dim]()
    for size in sizes:
        dim: list[str] = []
        left = size
        while left > 1:
            axis = waiting.pop(0)
            have = flow.sizes[axis]
            if left % have and have % left:
                why = f"a view cuts a dim of {have} at {left}"
                flow.keep_unsharded(tuple(axes), why, contradicts=True)
                made = [flow.new_dim(each) for each in sizes]
                for each in made:
                    flow.keep_unsharded(each, why)
                return made
            if have > left:
                outer, inner = flow.new_axis(left), flow.new_axis(have // left)
                _split(flow, axis, outer, inner)
                waiting.insert(0, inner)
                axis, have = outer, left
            dim.append(axis)
            left //= have
        out.append(tuple(dim))
    return out


def _split(flow: AxisFlow, axis: str, outer: str, inner: str) -> None:
    """Let `axis` be two: one of the annotation, which has no name for its parts, is not shardable across them."""
    if axis in flow.given:
        flow.keep_unsharded((axis,), "a view splits it, and the annotation does not: write (a b) for its two parts")
        flow.keep_unsharded((outer, inner), "it is a part of an axis that is kept whole")
    else:
        flow._replace(axis, (outer, inner))


def unsqueezed(call: Call) -> Value:
    value = call.value(0)
    at = call.number(1, "dim", 0)
    at = at if at >= 0 else len(value.dims) + 1 + at
    return Value((*value.dims[:at], (), *value.dims[at:]), value.pending)


def squeezed(call: Call) -> Value:
    value, flow = call.value(0), call.flow
    numbers = call.numbers(1, "dim")
    chosen = range(len(value.dims)) if numbers is None else [position(n, value) for n in numbers]
    gone = {n for n in chosen if not flow.dim(value.dims[n])}
    return Value(tuple(dim for n, dim in enumerate(value.dims) if n not in gone), value.pending)


def expanded(call: Call) -> Value:
    value, flow = call.value(0), call.flow
    if call.name == "expand_as":
        other = call.value(1)
        target = [flow.size(dim) for dim in other.dims]
    else:
        target = call.numbers(1, "size") or []
    dims = [()] * (len(target) - len(value.dims)) + list(value.dims)
    for n, size in enumerate(target):
        if not flow.dim(dims[n]) and size > 1:
            dims[n] = flow.new_dim(size)
            flow.created.update(dims[n])
    return Value(tuple(dims), value.pending)


def repeated(call: Call) -> Value:
    """`repeat_interleave(n, dim)` makes a dim (dim n), `repeat(n, ...)` dims (n dim)."""
    value, flow = call.value(0), call.flow
    if call.name == "repeat_interleave":
        count, at = call.number(1, "repeats", 0), position(call.number(2, "dim", 0), value)
        made = flow.new_dim(count)
        flow.created.update(made)
        return Value((*value.dims[:at], (*flow.dim(value.dims[at]), *made), *value.dims[at + 1 :]), value.pending)
    counts = call.numbers(1, "repeats") or []
    dims = [()] * (len(counts) - len(value.dims)) + list(value.dims)
    for n, count in enumerate(counts):
        made = flow.new_dim(count)
        flow.created.update(made)
        dims[n] = (*made, *flow.dim(dims[n]))
    return Value(tuple(dims), value.pending)


def joined(call: Call) -> Value:
    """`cat` of alike makes a dim (n dim); `stack` a dim of its own."""
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


def chunked(call: Call) -> list[Value]:
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
        # one of the blocks that the dim is made of, as gate and up of a fused weight
        flow.keep_unsharded(dim[:1], f"{call.name} takes one block of it", contradicts=True)
        return [Value((*value.dims[:at], dim[1:], *value.dims[at + 1 :]), value.pending) for _ in lengths]
    why = f"{call.name} takes a part of it"
    return [
        Value((*value.dims[:at], part_of(flow, dim, length, why), *value.dims[at + 1 :]), value.pending)
        for length in lengths
    ]


def narrowed(call: Call) -> Value:
    value = call.value(0)
    at = position(call.number(1, "dim", 0), value)
    part = part_of(call.flow, value.dims[at], call.number(3, "length", 1), f"{call.name} takes a part of it")
    return Value((*value.dims[:at], part, *value.dims[at + 1 :]), value.pending)


def selected(call: Call) -> Value:
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


def ordered(call: Call) -> Made:
    """Functions that need all of one dim in its order and keep it: sort, cumsum, flip, roll."""
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


def triangle(call: Call) -> Value:
    value = call.value(0)
    for dim in value.dims[-2:]:
        call.flow.keep_unsharded(dim, f"{call.name} depends on where in it an element is", contradicts=True)
    return value


def shaped(call: Call) -> Value:
    """`zeros(n, ...)` and the like: dims that every rank can make its piece of."""
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
