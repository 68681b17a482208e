"""Views: the elements of one tensor with other dims; and copies that expand and repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from planner.sharding.ops.annotation import Dim
from planner.sharding.ops.aten import AtenCall, Statement
from planner.sharding.ops.axis_flow import AxisFlow, NotUnderstood, Value
from planner.sharding.ops.op import View, view
from planner.sharding.ops.walker import Call, position


def _rearranged(call: Call) -> Value:
    """A view that only its annotation describes."""
    raise NotUnderstood(call.name)


def _transposed(call: Call) -> Value:
    value = call.value(0)
    order = list(range(len(value.dims)))
    first, second = (
        (position(call.number(n, f"dim{n - 1}", n - 1), value) for n in (1, 2)) if call.name != "t" else (0, -1)
    )
    if order:
        order[first], order[second] = order[second], order[first]
    return Value(tuple(value.dims[n] for n in order), value.pending)


def _permutation(call: Call) -> Value:
    value = call.value(0)
    order = [position(n, value) for n in call.numbers(1, "dims") or []]
    if sorted(order) != list(range(len(value.dims))):
        raise NotUnderstood("a permutation that names not every dim once")
    return Value(tuple(value.dims[n] for n in order), value.pending)


def _movedim(call: Call) -> Value:
    value = call.value(0)
    source, target = position(call.number(1, "source", 0), value), position(call.number(2, "destination", 0), value)
    dims = list(value.dims)
    dims.insert(target, dims.pop(source))
    return Value(tuple(dims), value.pending)


def _reshaped(call: Call) -> Value:
    value, flow = call.value(0), call.flow
    sizes = call.numbers(1, "shape")
    if sizes is None:
        raise NotUnderstood("a shape that is not written out")
    return Value(_regrouped(flow, [a for dim in flow.dims(value) for a in dim], sizes), value.pending)


def _flattened(call: Call) -> Value:
    value, flow = call.value(0), call.flow
    if not value.dims:
        return value
    first = position(call.number(1, "start_dim", 0), value)
    last = position(call.number(2, "end_dim", -1), value)
    joined = tuple(axis for dim in flow.dims(value)[first : last + 1] for axis in dim)
    return Value((*value.dims[:first], joined, *value.dims[last + 1 :]), value.pending)


def _unflattened(call: Call) -> Value:
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
    """Return dims of `sizes` made of `axes`; a dim that ends inside a factor gets a new axis that is kept whole."""
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
    """Split `axis` in two; an axis of the annotation, which has no names for its parts, cannot be sharded
    across them.
    """
    if axis in flow.given:
        flow.keep_unsharded((axis,), "a view splits it, and the annotation does not: write (a b) for its two parts")
        flow.keep_unsharded((outer, inner), "it is a part of an axis that is kept whole")
    else:
        flow._replace(axis, (outer, inner))


def _unsqueezed(call: Call) -> Value:
    value = call.value(0)
    at = call.number(1, "dim", 0)
    at = at if at >= 0 else len(value.dims) + 1 + at
    return Value((*value.dims[:at], (), *value.dims[at:]), value.pending)


def _squeezed(call: Call) -> Value:
    value, flow = call.value(0), call.flow
    numbers = call.numbers(1, "dim")
    chosen = range(len(value.dims)) if numbers is None else [position(n, value) for n in numbers]
    gone = {n for n in chosen if not flow.dim(value.dims[n])}
    return Value(tuple(dim for n, dim in enumerate(value.dims) if n not in gone), value.pending)


def _expanded(call: Call) -> Value:
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


def _repeated(call: Call) -> Value:
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


# --- captured


def _capture_reshape(call: AtenCall) -> list[Statement]:
    name = call.tensor(0)
    return [call.statement(f"reshape({name}, {list(call.node.shape)})", op="reshape", args=({"tensor": name},))]


def _permuted(call: AtenCall, order: Sequence[int]) -> list[Statement]:
    formula = f"permute({call.tensor(0)}, {list(order)})"
    return [call.statement(formula, op="permute", args=(call.argument(0), list(order)))]


def _capture_transpose(call: AtenCall) -> list[Statement]:
    order = list(range(len(call.shape(0))))
    if call.name == "t":
        return _permuted(call, order[::-1])
    if call.name == "mT":
        return _permuted(call, [*order[:-2], order[-1], order[-2]])
    first, second = (call.dim(p, len(order)) for p in (1, 2))
    order[first], order[second] = order[second], order[first]
    return _permuted(call, order)


def _capture_permute(call: AtenCall) -> list[Statement]:
    rank = len(call.shape(0))
    return _permuted(call, [int(d) % rank for d in call.argument(1)])


def _capture_expand(call: AtenCall) -> list[Statement]:
    formula = f"expand({call.tensor(0)}, {list(call.node.shape)})"
    return [call.statement(formula, op="expand", args=(call.argument(0),))]


def _capture_repeat_interleave(call: AtenCall) -> list[Statement]:
    times, dim = int(call.argument(1)), call.dim(2, len(call.shape(0)))
    formula = f"repeat_interleave({call.tensor(0)}, {times}, {dim})"
    return [call.statement(formula, op="repeat_interleave", args=(call.argument(0), times, dim))]


def _capture_repeat(call: AtenCall) -> list[Statement]:
    counts = [int(n) for n in call.argument(1)]
    formula = f"repeat({call.tensor(0)}, {', '.join(map(str, counts))})"
    return [call.statement(formula, op="repeat", args=(call.argument(0),))]


# --- taken back: what a gradient goes through on its way to the tensor that was viewed


def _reshape_back(text: str, view: View) -> str:
    return f"{text}.reshape({list(view.before)})"


def _permute_back(text: str, view: View) -> str:
    order = [n % len(view.before) for n in view.numbers if n is not None]
    return f"{text}.permute({', '.join(str(order.index(n)) for n in range(len(order)))})"


def _expand_back(text: str, view: View) -> str:
    before, after = view.before, view.after
    extra = len(after) - len(before)
    gone = [*range(extra), *(n + extra for n, s in enumerate(before) if s == 1 and after[n + extra] > 1)]
    summed = f"{text}.sum({tuple(gone)!r})" if gone else text
    return f"{summed}.reshape({list(before)})"


def _repeat_interleave_back(text: str, view: View) -> str:
    at = view.dim(1)
    return f"{text}.unflatten({at}, ({view.before[at]}, {view.numbers[0]})).sum({at + 1})"


def _transpose_back(text: str, view: View) -> str:
    return f"{text}.transpose({view.numbers[0]}, {view.numbers[1]})"


_RESHAPES = "view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_copy"
OPS = (
    view("transpose swapaxes", _transposed, _capture_transpose, aten="transpose swapaxes mT", back=_transpose_back),
    view("t", _transposed, _capture_transpose, back=lambda text, _: f"{text}.T"),
    view("permute", _permutation, _capture_permute, kernels="permute", back=_permute_back),
    view("movedim", _movedim, back=lambda text, view: f"{text}.movedim({view.numbers[1]}, {view.numbers[0]})"),
    view("reshape view", _reshaped, _capture_reshape, aten=_RESHAPES, kernels="reshape", back=_reshape_back),
    view("flatten", _flattened, back=_reshape_back),
    view("unflatten", _unflattened, back=_reshape_back),
    view("unsqueeze", _unsqueezed, back=_reshape_back),
    view("squeeze", _squeezed, back=_reshape_back),
    view("expand expand_as broadcast_to", _expanded, _capture_expand, kernels="expand", back=_expand_back),
    view("repeat_interleave", _repeated, _capture_repeat_interleave, back=_repeat_interleave_back),
    view("repeat", _repeated, _capture_repeat),
    view("rearrange", _rearranged),
)
