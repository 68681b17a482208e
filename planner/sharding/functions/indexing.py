"""Parts of a tensor by number: indices and slices, which need the whole dim that they take from."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from planner.sharding.formulas.annotation import Dim
from planner.sharding.formulas.axis_flow import AxisFlow, NotUnderstood, Value, number_of


def indexed(
    flow: AxisFlow, value: Value, parts: Sequence[ast.expr], index_of: Callable[[ast.expr], Value | None]
) -> Value:
    """Return a value indexed by integers, slices, None, an ellipsis or a tensor, whose value `index_of` gives."""
    out, at = list[Dim](), 0
    taken = sum(1 for p in parts if not (isinstance(p, ast.Constant) and (p.value is None or p.value is ...)))
    if taken > len(value.dims):
        raise NotUnderstood("more indices than dims")
    for part in parts:
        match part:
            case ast.Constant(value=None):
                out.append(())
            case ast.Constant(value=value_) if value_ is ...:
                skipped = len(value.dims) - taken
                out += value.dims[at : at + skipped]
                at += skipped
            case ast.Slice():
                out.append(_sliced(flow, value.dims[at], part))
                at += 1
            case _ if number_of(part) is not None:
                flow.keep_unsharded(value.dims[at], "an index takes one element of it", contradicts=True)
                at += 1
            case _:
                numbers = index_of(part)
                if numbers is None:
                    raise NotUnderstood("an index that is no number")
                flow.keep_unsharded(value.dims[at], "an index takes elements of it by number", contradicts=True)
                out += numbers.dims
                at += 1
    return Value((*out, *value.dims[at:]), value.pending)


def _sliced(flow: AxisFlow, dim: Dim, part: ast.Slice) -> Dim:
    ends = [None if end is None else number_of(end) for end in (part.lower, part.upper, part.step)]
    if any(e is not None and n is None for e, n in zip((part.lower, part.upper, part.step), ends, strict=True)):
        raise NotUnderstood("a slice whose ends are no numbers")
    size = flow.size(dim)
    length = len(range(*slice(*ends).indices(size)))
    if length == size and (ends[2] or 1) > 0:
        return dim
    return part_of(flow, dim, length, "a slice takes a part of it")


def part_of(flow: AxisFlow, dim: Dim, length: int, why: str) -> Dim:
    """Return a dim of `length` that is made of all of `dim`."""
    flow.keep_unsharded(dim, why, contradicts=True)
    made = flow.new_dim(length)
    flow.keep_unsharded(made, why)
    return made


def position(at: int, value: Value) -> int:
    """Return the index of a dim from 0. Raises NotUnderstood."""
    if not -len(value.dims) <= at < len(value.dims):
        raise NotUnderstood(f"dim {at} of {len(value.dims)}")
    return at % len(value.dims)
