"""The effect of a formula along every axis, found by walking it with axes in the place of numbers.

A `Value` describes a part of a formula: the axes of each dim, and reductions (sums, maxima, ...) along axes that are
gone, which could still be performed later if the axis were sharded. Operators (`planner.sharding.ops`) map values to
values and tell the `AxisFlow` their effects on axes:

    unsharded   the function needs all of the axis: a sort, a slice, a running sum, a convolution's window; the reason
                is kept for the user
    merged      the function is computed from statistics of pieces: softmax and norms over the axis, keys of attention
    positional  the function depends on where along the axis an element is: a rank that has a piece needs its offset
    created     the axis is in no operand; every rank can make its own piece of it

An axis in the last value and in none of these passes through. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from planner.sharding.ops.annotation import Dim, axis_name

Shape = tuple[int, ...]


class NotUnderstood(Exception):
    """A part of a formula whose effect on axes is not known."""


@dataclass(frozen=True, slots=True)
class Value:
    """Axes by dim, major first (`()` is a dim of size 1), and reductions along axes that are gone: axis -> reducer."""

    dims: tuple[Dim, ...]
    pending: Mapping[str, str] = field(default_factory=dict)


SCALAR = Value(())


@dataclass(slots=True)
class AxisFlow:
    """Everything that a walk through a formula has found about its axes.

    `sizes` has every axis, `given` those of the annotation; axes created during the walk turn out to be equal to others
    or are new.
    """

    tensors: Mapping[str, Value]
    sizes: dict[str, int]
    given: frozenset[str] = frozenset()
    unsharded: dict[str, str] = field(default_factory=dict)  # axis -> why
    contradicted: set[str] = field(default_factory=set)  # of those: axes that are read in part, or in order
    merged: dict[str, str] = field(default_factory=dict)  # axis -> function
    positional: set[str] = field(default_factory=set)
    created: set[str] = field(default_factory=set)
    reduced: set[str] = field(default_factory=set)
    multiplies: bool = False  # two tensors are multiplied
    same: dict[str, Dim] = field(default_factory=dict)  # axis created here -> the axis that it is equal to
    _made: int = 0

    def new_axis(self, size: int) -> str:
        """Return a new axis."""
        name = f".{self._made}"
        self._made += 1
        self.sizes[name] = size
        return name

    def new_dim(self, size: int) -> Dim:
        return () if size == 1 else (self.new_axis(size),)

    def dim(self, dim: Dim) -> Dim:
        """Return a dim with the known axes, without those of size 1."""
        out: list[str] = []
        for axis in dim:
            if axis in self.same:
                out += self.dim(self.same[axis])
            elif self.sizes[axis] != 1:
                out.append(axis)
        return tuple(out)

    def dims(self, value: Value) -> tuple[Dim, ...]:
        return tuple(self.dim(dim) for dim in value.dims)

    def size(self, dim: Dim) -> int:
        return prod(self.sizes[axis] for axis in self.dim(dim))

    def keep_unsharded(self, dim: Dim, why: str, *, contradicts: bool = False) -> None:
        """Note that no axis of `dim` can be sharded. `contradicts`: the axis can neither be reduced nor pass
        through.
        """
        for axis in self.dim(dim):
            self.unsharded.setdefault(axis, why)
            if contradicts:
                self.contradicted.add(axis)

    def finish(self, value: Value, why: str) -> Value:
        """Return `value` with its reductions performed, since the next function cannot use partial results."""
        for axis in value.pending:
            self.keep_unsharded((axis,), why)
        return Value(value.dims)

    def unify(self, first: Dim, second: Dim, why: str) -> Dim:
        """Return the common dim of two dims, one of which may have size 1. Raises NotUnderstood."""
        first, second = self.dim(first), self.dim(second)
        if first == second or not second:
            return first
        if not first:
            return second
        if self.size(first) != self.size(second):
            raise NotUnderstood(f"{why} of dims of {self.size(first)} and {self.size(second)}")
        for one, other in ((first, second), (second, first)):
            if len(one) == 1 and one[0] not in self.given and one[0] not in other:
                self._replace(one[0], other)
                return other
        if self._unify_parts(first, second):
            return self.dim(first)
        self.keep_unsharded((*first, *second), f"{why} takes {_names(first)} and {_names(second)} for one axis")
        return first

    def _unify_parts(self, first: Dim, second: Dim) -> bool:
        """Unify two dims of several axes, axis by axis; False if they do not match."""
        if [self.sizes[a] for a in first] != [self.sizes[a] for a in second]:
            return False
        pairs = [(a, b) for a, b in zip(first, second, strict=True) if a != b]
        if any(a in self.given and b in self.given for a, b in pairs):
            return False
        for a, b in pairs:
            old, new = (b, a) if b not in self.given else (a, b)
            self._replace(old, (new,))
        return True

    def _replace(self, axis: str, dim: Dim) -> None:
        """Identify an axis created here with `dim`; facts about one hold for the other."""
        self.same[axis] = dim
        for part in dim:
            if axis in self.unsharded:
                self.unsharded.setdefault(part, self.unsharded[axis])
            if axis in self.merged:
                self.merged.setdefault(part, self.merged[axis])
            for facts in (self.contradicted, self.positional, self.reduced):
                if axis in facts:
                    facts.add(part)
        if axis in self.created and all(part not in self.given for part in dim):
            self.created.update(dim)

    def broadcast(self, dims: Sequence[tuple[Dim, ...]], why: str) -> tuple[Dim, ...]:
        """Return the dims of an elementwise function of values with `dims`, aligned at the last one."""
        rank = max((len(each) for each in dims), default=0)
        padded = [((),) * (rank - len(each)) + tuple(each) for each in dims]
        out: list[Dim] = []
        for column in zip(*padded, strict=True):
            dim: Dim = ()
            for each in column:
                dim = self.unify(dim, each, why)
            out.append(dim)
        return tuple(out)

    def add(self, values: Sequence[Value], why: str = "the sum") -> Value:
        """Return the sum of values: it stays partial only if every term is partial."""
        shared = set.intersection(*(set(value.pending) for value in values))
        kept = {a: values[0].pending[a] for a in shared if all(v.pending[a] in {"sum", "avg"} for v in values)}
        for value in values:
            self.finish(Value((), {a: r for a, r in value.pending.items() if a not in kept}), f"{why} counts it once")
        return Value(self.broadcast([value.dims for value in values], why), kept)

    def multiply(self, values: Sequence[Value], why: str = "the product") -> Value:
        """Return the elementwise product of values."""
        return Value(self.broadcast([value.dims for value in values], why), self.pending_of_product(values, why))

    def pending_of_product(self, values: Sequence[Value], why: str) -> dict[str, str]:
        """Return the reductions that may still follow a product: a sum along an axis that only one factor has."""
        pending: dict[str, str] = {}
        self.multiplies |= sum(bool(value.dims) for value in values) > 1
        for number, value in enumerate(values):
            others = [other for at, other in enumerate(values) if at != number]
            taken = {axis for other in others for dim in self.dims(other) for axis in dim}
            taken |= {axis for other in others for axis in other.pending}
            for axis, reducer in value.pending.items():
                if reducer in {"sum", "avg"} and axis not in taken:
                    pending[axis] = reducer
                else:
                    self.keep_unsharded((axis,), f"{why} needs the finished {reducer}")
        return pending

    def elementwise(self, values: Sequence[Value], why: str) -> Value:
        """Return a nonlinear elementwise function of values."""
        finished = [self.finish(value, f"{why} needs finished sums") for value in values]
        return Value(self.broadcast([value.dims for value in finished], why))

    def contract(self, dims: Sequence[Dim], value: Value, reducer: str, why: str) -> Value:
        """Return `value` with the axes of `dims` reduced; the remaining dims are its dims."""
        pending = dict(value.pending)
        left = {axis for dim in self.dims(value) for axis in dim}
        for axis in (axis for dim in dims for axis in self.dim(dim)):
            self.reduced.add(axis)
            mixed = any(other != reducer for other in pending.values())
            if axis in left or axis in pending or mixed:
                self.keep_unsharded((axis,), f"{why} reduces it besides another use of it")
            else:
                pending[axis] = reducer
        return Value(value.dims, pending)


def _names(dim: Dim) -> str:
    return " ".join(axis_name(axis) for axis in dim)
