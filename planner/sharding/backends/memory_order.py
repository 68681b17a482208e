"""The order of dims of a rank's pieces in memory (nvFuser's allocation domain), independent of which elements they
have.

NCCL takes and returns pieces one after the other, so a tensor gathered or scattered along a dim is copied unless that
dim is outermost in memory. The program can choose the outermost dim: with `[batch, sequence, width]` in the order
sequence, batch, width, gathers and scatters of the sequence copy nothing, and products, norms and attention are
computed in that order as well. For each exchange that copies, the order with its dim outermost is tried, and kept if it
reduces the bytes copied in exchanges and kernels.

Kernels propagate orders as in torch: a view has that of its base, elementwise and row-wise kernels keep theirs, and all
others give results in the order of dims. If a kernel needs another order than its operand has, torch copies the
operand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod

import msgspec

from planner.sharding.backends.lifetimes import short_name
from planner.sharding.backends.local_copies import copies_of, lies_in
from planner.sharding.backends.works import Work
from planner.sharding.layouts.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER
from planner.sharding.layouts.layout import Mesh, divides_evenly
from planner.sharding.ops.table import is_elementwise
from simulator.config.runtime import ELEMENT_BYTES
from simulator.sharded.graph import tensors_in
from simulator.sharded.program import OVERLAPPED, RING_ATTENTION, Buffer, Exchange, Kernel

Order = tuple[int, ...]  # dims, outermost first; empty means the order of the dims
Strides = tuple[int, ...]
# Groups of exchanges alike, those that copy most, that are tried with their dim outermost and in the order of dims.
_MOST_GROUPS = 8
_CUT = (ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)
_ELEMENTS = frozenset(("bias", "cast", "clone", "rotary"))
_ATTENTION = ("attention", RING_ATTENTION)
_PRODUCTS = frozenset(("linear", "matmul"))  # with a matrix
_ROWS = _PRODUCTS | {"softmax", "log_softmax", "layernorm", "rmsnorm"}


@dataclass(frozen=True, slots=True)
class MemoryOrders:
    """By buffer, its order if it is not that of its dims; by result, the bytes copied around an exchange, or by a
    kernel that needs another order.
    """

    orders: Mapping[str, Order]
    around: Mapping[str, int]
    inside: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.around.values()) + sum(self.inside.values())


def choose_orders(
    works: Sequence[Work],
    buffers: Mapping[str, Buffer],
    mesh: Mesh,
    *,
    returned: Sequence[str],
    stated: Mapping[str, Order],
) -> tuple[MemoryOrders, MemoryOrders]:
    """Return the orders of all buffers with fewest bytes copied, and the orders with every exchange in the order of
    dims.

    Buffers in `returned` are copied to the order of their dims at the end. `stated` has orders of tensors by name.
    """
    every = _Pass(works, buffers, tuple(returned), stated)
    plain = best = every.orders({})
    groups: dict[tuple[object, ...], dict[str, Order]] = {}
    for work in works:
        do, target = work.do, buffers[work.writes[0]]
        if isinstance(do, Exchange) and do.kind in _CUT and plain.around.get(work.writes[0]):
            read = buffers[work.reads[0]]
            dim = do.to_dim if do.kind == ALL_TO_ALL else do.dim
            if _is_even(read, mesh) and _is_even(target, mesh) and not every.said(work.writes[0]):
                alike = (do.kind, do.dim, do.to_dim, read.local, target.local, target.gradient)
                groups.setdefault(alike, {})[work.writes[0]] = outermost(dim, len(target.local))
    largest = sorted(groups.values(), key=lambda group: -sum(plain.around[name] for name in group))
    together = {name: order for group in largest for name, order in group.items()}
    for start in ({}, together) if groups else ():
        chosen = dict(start)
        found = every.orders(chosen)
        for group in largest[:_MOST_GROUPS]:
            is_chosen = next(iter(group)) in chosen
            other = {n: order for n, order in chosen.items() if n not in group} if is_chosen else {**chosen, **group}
            tried = every.orders(other)
            if tried.total < found.total:
                chosen, found = other, tried
        best = min(best, found, key=lambda one: one.total)
    return best, plain


def _by_result(works: Sequence[Work]) -> dict[str, Work]:
    return {work.writes[0]: work for work in works}


def _is_even(buffer: Buffer, mesh: Mesh) -> bool:
    return all(divides_evenly(size, spec, mesh) for size, spec in zip(buffer.shape, buffer.dims, strict=True))


def outermost(dim: int, dims: int) -> Order:
    """Return the order with one dim outermost and the others as numbered."""
    return (dim, *(other for other in range(dims) if other != dim))


@cache
def strides_of(shape: Sequence[int], order: Order = ()) -> Strides:
    """Return the strides of a dense tensor with this order of dims."""
    strides, step = [1] * len(shape), 1
    for dim in reversed(order or range(len(shape))):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


@cache
def order_of(shape: Sequence[int], strides: Strides) -> Order:
    """Return the order of dims by stride; dims of one element can be anywhere. A tensor with broadcast dims has the
    order of its dims.
    """
    wide = [dim for dim, size in enumerate(shape) if size > 1]
    if any(not strides[dim] for dim in wide):
        return ()
    found = sorted(wide, key=lambda dim: -strides[dim])
    return () if found == wide else (*(dim for dim, size in enumerate(shape) if size <= 1), *found)


@cache
def viewed(shape: Sequence[int], strides: Strides, as_shape: Sequence[int]) -> Strides | None:
    """Return the strides of a view of another shape, or None where torch copies.

    (ATen/TensorUtils.cpp, computeStride.)
    """
    if not prod(shape) or not shape or not as_shape:
        return strides_of(as_shape)
    found, at = [0] * len(as_shape), len(as_shape) - 1
    base, held, seen = strides[-1], 1, 1
    for dim in reversed(range(len(shape))):
        held *= shape[dim]
        if dim and (shape[dim - 1] == 1 or strides[dim - 1] == held * base):
            continue
        while at >= 0 and (seen < held or as_shape[at] == 1):
            found[at] = seen * base
            seen *= as_shape[at]
            at -= 1
        if seen != held:
            return None
        base, held, seen = strides[dim - 1] if dim else 1, 1, 1
    return tuple(found) if at < 0 else None


@dataclass(frozen=True, slots=True)
class _Pass:
    """The strides of all buffers, as instructions propagate them."""

    works: Sequence[Work]
    buffers: Mapping[str, Buffer]
    returned: tuple[str, ...]
    stated: Mapping[str, Order]

    def said(self, name: str) -> Order:
        """Return the stated order of a buffer's tensor; none for gradients."""
        buffer = self.buffers[name]
        return () if buffer.gradient else self.stated.get(buffer.tensor, ())

    def orders(self, chosen: Mapping[str, Order]) -> MemoryOrders:
        """Return the orders of all buffers if exchanges give those in `chosen` these orders."""
        state = _State(self.buffers)
        forward = _by_result(self.works)
        for work in self.works:
            if isinstance(work.do, Exchange):
                state.exchange(work, work.do, self.said(work.writes[0]) or chosen.get(work.writes[0], ()))
            elif work.do.op == "backward":
                kernel = forward[work.do.args[0]]
                state.backward(work, kernel)
            else:
                state.kernel(work, work.do)
        for name in self.returned:
            state.ask(name, name, ())
        orders = {
            name: order
            for name, strides in state.strides.items()
            if (order := order_of(self.buffers[name].local, strides))
        }
        return MemoryOrders(orders, state.around, state.inside)


@dataclass(slots=True)
class _State:
    buffers: Mapping[str, Buffer]
    strides: dict[str, Strides] = field(default_factory=dict)
    around: dict[str, int] = field(default_factory=dict)
    inside: dict[str, int] = field(default_factory=dict)

    def local(self, name: str) -> tuple[int, ...]:
        return self.buffers[name].local

    def lies(self, name: str) -> Strides:
        """Return the strides of a buffer; inputs have their stated order."""
        if name not in self.strides:
            self.strides[name] = strides_of(self.local(name), self.buffers[name].order)
        return self.strides[name]

    def order(self, name: str) -> Order:
        return order_of(self.local(name), self.lies(name))

    def ask(self, by: str, name: str, order: Order) -> None:
        """Count the copy of a buffer that is not in `order`."""
        if not lies_in(self.local(name), self.order(name), order):
            self.inside[by] = (
                self.inside.get(by, 0) + 2 * prod(self.local(name)) * ELEMENT_BYTES[self.buffers[name].dtype]
            )

    def made(self, name: str, order: Order = ()) -> None:
        self.strides[name] = strides_of(self.local(name), order)

    def exchange(self, work: Work, do: Exchange, order: Order) -> None:
        source, target = work.reads[0], work.writes[0]
        if do.kind in {ALL_REDUCE, PERMUTE}:
            order = self.order(source)
        elif do.kind not in _CUT:
            self.ask(target, source, ())
        self.made(target, order)
        read, written = (msgspec.structs.replace(self.buffers[n], order=self.order(n)) for n in (source, target))
        before, after = copies_of(do, read, written)
        self.around[target] = int(sum(one.bytes for one in (*before, *after)))

    def view(self, do: Kernel, source: str, target: str) -> Strides | None:
        """Return the strides of a view, or None if `do` is no view without a copy."""
        strides, shape = self.lies(source), self.local(target)
        match do.op:
            case "same" | "detach" | "piece":
                return strides
            case "permute":
                return tuple(strides[dim] for dim in do.args[1])
            case "reshape":
                return viewed(self.local(source), strides, shape)
            case "select":
                return tuple(one for dim, one in enumerate(strides) if dim != do.args[1] % len(strides))
            case "range" if do.args[4] == 1:
                return strides
            case "expand":
                extra, old = len(shape) - len(strides), self.local(source)
                kept = [one if old[dim] == shape[dim + extra] else 0 for dim, one in enumerate(strides)]
                return (*([0] * extra), *kept)
        return None

    def kernel(self, work: Work, do: Kernel) -> None:
        operands, target = _operands(do), work.writes[0]
        if not operands:
            return self.made(target)
        x, shape = operands[0], self.local(target)
        strides = self.view(do, x, target)
        if strides is not None:
            self.strides[target] = strides
            return None
        if is_of_elements(do):
            alike = [name for name in operands if self.local(name) == shape]
            order = self.order(alike[0]) if alike else ()
            for name in alike[1:]:
                self.ask(target, name, order)
            return self.made(target, order)
        if do.op in _ATTENTION:
            return self.made(target, self.order(x))
        if do.op.startswith(OVERLAPPED):  # rows of the exchanged dim are outermost
            order = outermost(do.kwargs["dim"], len(shape))
            self.ask(target, x, order)
            return self.made(target, order)
        rows = self.rows(do)
        order = self.order(x)
        if rows and keeps_rows(order, rows):
            return self.made(target, order)
        if rows and is_turned(do, order):
            return self.made(target)
        for name in (x,) if rows or do.op == "reshape" else operands:
            self.ask(target, name, ())
        return self.made(target)

    def backward(self, work: Work, forward: Work) -> None:
        """Set the order of a gradient: that of its operand for row-wise kernels, else its own."""
        do, (_, wanted), by = forward.do, work.do.args, work.writes[0]  # type: ignore[union-attr]
        incoming, result = work.reads[0], forward.writes[0]
        assert isinstance(do, Kernel)  # noqa: S101 - exchanges have duals of their own
        if do.op in {"same", "permute", "reshape"}:
            (target,) = work.writes
            back = Kernel(op=do.op, args=({"tensor": incoming}, _inverse(do.args[1]))) if do.op == "permute" else do
            strides = self.view(back, incoming, target)
            if strides is None:
                self.ask(by, incoming, ())
                return self.made(target)
            self.strides[target] = strides
            return None
        kept = is_of_elements(do) or do.op in _ATTENTION or do.op.startswith(OVERLAPPED) or self.rows(do)
        self.ask(by, incoming, self.order(result) if kept else ())
        for name, target in zip(wanted, work.writes, strict=True):
            self.made(target, self.gradient(do, name, incoming))
        return None

    def gradient(self, do: Kernel, name: str, incoming: str) -> Order:
        """Return the order in which a kernel makes the gradient of one operand."""
        x = next(iter(_operands(do)), "")
        if do.op.startswith(OVERLAPPED):
            return outermost(do.kwargs["dim"], len(self.local(x))) if name == x else ()
        if is_of_elements(do):
            return self.order(incoming) if self.local(name) == self.local(incoming) else ()
        rows = self.rows(do)
        keeps = keeps_rows(self.order(x), rows) if name == x else short_name(do.op) in _PRODUCTS
        return self.order(name) if do.op in _ATTENTION or (rows and keeps) else ()

    def rows(self, do: Kernel) -> int:
        """Return how many of the last dims form the rows that a kernel computes one by one; 0 for other kernels."""
        name, operands = short_name(do.op), _operands(do)
        if name not in _ROWS or (name == "matmul" and [len(self.local(one)) for one in operands[1:]] != [2]):
            return 0
        if name in {"layernorm", "rmsnorm"}:
            return int(do.args[1])
        dims = len(self.local(operands[0]))
        return 1 if name in _PRODUCTS else int(do.args[1] % dims == dims - 1)


def _operands(do: Kernel) -> tuple[str, ...]:
    return tensors_in([*do.args, *do.kwargs.values()])


def is_of_elements(do: Kernel) -> bool:
    """Return whether a kernel is elementwise."""
    return do.op in _ELEMENTS or is_elementwise(do.op) or short_name(do.op) in _ELEMENTS


def keeps_rows(order: Order, rows: int) -> bool:
    """Return whether the dims of rows are innermost, as numbered."""
    return order[len(order) - rows :] == tuple(range(len(order)))[len(order) - rows :]


def is_turned(do: Kernel, order: Order) -> bool:
    """Return whether a product reads its rows as columns: their dim outermost, all others as numbered."""
    last = len(order) - 1
    return short_name(do.op) in _PRODUCTS and order == (last, *range(last))


def _inverse(order: Sequence[int]) -> list[int]:
    return [list(order).index(dim) for dim in range(len(order))]
