"""The one rule: which mesh axes an operator's axes are cut over says what its operands must look like, and its result.

An *assignment* gives every mesh axis to one axis of the operator, to a reduction that is already pending and passes
through, or to nothing (the operator is repeated there). Operands and result are projections of it: a dim is cut as the
axes in it are, in their order. What is left to say is what may be assigned:

    an axis that goes through    always, where it divides
    a reduced axis               if the formula is linear in a tensor that has it, in every term; the result is pending
    a reduced or kept axis       if the operator merges pieces itself (`planner.sharding.merging`); nothing is pending
    a needed-whole axis          never
    a pending sum                if every term is linear in exactly one tensor that is pending
    an axis of the result alone  if the operator scatters into it: every rank then keeps the rows it owns
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import prod

from planner.sharding.collectives import Collective
from planner.sharding.layout import Items, Layout, fits, trimmed
from planner.sharding.merging import merges, merging
from planner.sharding.mesh import Mesh
from planner.sharding.notation import Dim
from planner.sharding.operator import Operator, Tensor

MAX_OPTIONS = 4000
_LINEAR_REDUCERS = ("sum", "avg")
_PENDING_KINDS = {"sum": "sum", "avg": "avg", "max": "max", "min": "min", "product": "product", "scatter": "sum"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to shard an operator: layouts that operands must have, that the result has, and collectives inside.

    `idle` counts mesh axes over which a result that every rank could keep a part of is kept whole.
    """

    placed: tuple[tuple[str, Items], ...]
    operands: tuple[tuple[str, Layout], ...]
    result: Layout
    inside: tuple[Collective, ...] = ()
    idle: int = 0


@dataclass(frozen=True, slots=True)
class _Through:
    """A reduction pending in `tensors` over the mesh axis that is given this."""

    reducer: str
    tensors: frozenset[str]


def options(
    operator: Operator,
    tensors: Mapping[str, Tensor],
    mesh: Mesh,
    *,
    pending: Mapping[str, frozenset[str]],
    special: Mapping[str, frozenset[tuple[int, Items]]],
) -> list[Option]:
    """Return every way to shard `operator`.

    `pending` are reducers that tensors may hold; `special` are cuts of their dims, with whole blocks or uneven, that
    something given has and that are therefore worth keeping.
    """
    unusual: dict[str, set[Items]] = {}
    for name, dims in operator.operands:
        for dim, items in special.get(name, ()):
            for axis, part in (lifted(items, dims[dim], operator.sizes, mesh) or {}).items():
                unusual.setdefault(axis, set()).add(part)
    for dim, items in special.get(operator.result.name, ()):
        for axis, part in (lifted(items, operator.dims[dim], operator.sizes, mesh) or {}).items():
            unusual.setdefault(axis, set()).add(part)
    allowed = [axis for axis in operator.axes if _may_cut(operator, axis)]
    through = list(_passing(operator, pending))
    found: dict[tuple[tuple[tuple[str, Layout], ...], Layout], Option] = {}
    for chosen in product([None, *allowed, *through], repeat=len(mesh.names)):
        given = dict(zip(mesh.names, chosen, strict=True))
        for placed in _orders(operator, given, unusual, mesh):
            option = _option(operator, tensors, placed, given, mesh)
            if option is not None:
                found.setdefault((option.operands, option.result), option)
        if len(found) > MAX_OPTIONS:
            break
    return list(found.values())


def _may_cut(operator: Operator, axis: str) -> bool:
    if operator.sizes[axis] == 1 or axis in operator.whole:
        return False
    if merges(operator, axis):
        return True
    if axis in operator.kept:
        return False
    if axis in operator.created:
        return operator.kind == "scatter"
    if axis not in operator.reduced:
        return True
    if operator.kind not in _PENDING_KINDS:
        return False
    if operator.kind in {"max", "min", "product"}:
        return True
    having = {name for name, dims in operator.operands if any(axis in dim for dim in dims)}
    return bool(operator.terms) and all(term.linear & having for term in operator.terms)


def _passing(operator: Operator, pending: Mapping[str, frozenset[str]]) -> Iterator[_Through]:
    """Yield the ways in which a pending reduction passes through, over one mesh axis."""
    listed = {name for name, _ in operator.operands}
    reducers = sorted({reducer for name in listed for reducer in pending.get(name, ())})
    for reducer in reducers:
        if operator.is_view:
            yield _Through(reducer, frozenset(listed))
            continue
        if reducer not in _LINEAR_REDUCERS or operator.kind not in {"sum", "avg", "scatter"}:
            continue
        holders = [sorted(n for n in t.linear & listed if reducer in pending.get(n, ())) for t in operator.terms]
        if not operator.terms or prod(len(h) for h in holders) > 64:
            continue
        for pick in dict.fromkeys(frozenset(pick) for pick in product(*holders)):
            if all(len(t.linear & pick) == 1 and not t.other & pick for t in operator.terms):
                yield _Through(reducer, pick)


def _orders(
    operator: Operator,
    given: Mapping[str, str | _Through | None],
    unusual: Mapping[str, set[Items]],
    mesh: Mesh,
) -> Iterator[dict[str, Items]]:
    """Yield the assignments that give every axis its mesh axes, in every order in which they divide it."""
    cutting: dict[str, list[str]] = {}
    for name, target in given.items():
        if isinstance(target, str):
            cutting.setdefault(target, []).append(name)
    choices = []
    for axis, names in cutting.items():
        plain = {p for p in permutations(names) if fits(operator.sizes[axis], p, mesh)}
        kept = {items for items in unusual.get(axis, ()) if {i for i in items if isinstance(i, str)} == set(names)}
        choices.append([(axis, items) for items in sorted(plain | kept, key=repr)])
    for pick in product(*choices):
        yield dict(pick)


def _option(
    operator: Operator,
    tensors: Mapping[str, Tensor],
    placed: Mapping[str, Items],
    given: Mapping[str, str | _Through | None],
    mesh: Mesh,
) -> Option | None:
    through = {name: target for name, target in given.items() if isinstance(target, _Through)}
    needed = []
    for name, dims in operator.operands:
        cuts = [
            projected(dim, operator.sizes, placed, mesh) if size > 1 else ()
            for dim, size in zip(dims, tensors[name].shape, strict=True)
        ]
        if any(items is None for items in cuts):
            return None
        held = tuple((axis, t.reducer) for axis, t in through.items() if name in t.tensors)
        needed.append((name, Layout(tuple(items or () for items in cuts), held)))
    out = [projected(dim, operator.sizes, placed, mesh) for dim in operator.dims]
    if any(items is None for items in out):
        return None
    left = {axis: t.reducer for axis, t in through.items()}
    for axis, items in placed.items():
        if axis in operator.reduced and not merges(operator, axis):
            left.update({str(i): _PENDING_KINDS[operator.kind] for i in items if isinstance(i, str)})
    needed += [(name, Layout(((),) * len(tensors[name].shape))) for name in operator.unlisted]
    return Option(
        placed=tuple(placed.items()),
        operands=tuple(needed),
        result=Layout(
            tuple(items or () for items in out), tuple((name, left[name]) for name in mesh.names if name in left)
        ),
        inside=merging(operator, placed, mesh),
        idle=sum(target is None for target in given.values()) if operator.kind == "scatter" else 0,
    )


def projected(dim: Dim, sizes: Mapping[str, int], placed: Mapping[str, Items], mesh: Mesh) -> Items | None:
    """Return how a dim made of axes is cut when they are cut as `placed`, or None where that is no cut of the dim.

    What an axis leaves whole is a block that the cuts of a later one stand inside.
    """
    if len(dim) == 1:
        return placed.get(dim[0], ())
    out: list[str | int] = []
    for axis in dim:
        items = placed.get(axis, ())
        pieces = prod(item if isinstance(item, int) else mesh.size(item) for item in items)
        if sizes[axis] % pieces:
            return None
        out += [*items, sizes[axis] // pieces]
    return trimmed(out)


def lifted(items: Items, dim: Dim, sizes: Mapping[str, int], mesh: Mesh) -> dict[str, Items] | None:
    """Return how the axes that make a dim are cut when it is cut by `items`; None where a cut falls across two axes."""
    if len(dim) == 1:
        return {dim[0]: items}
    out: dict[str, Items] = {}
    left = list(items)
    for axis in dim:
        part: list[str | int] = []
        room = sizes[axis]
        while left and room > 1:
            item = left[0]
            size = item if isinstance(item, int) else mesh.size(item)
            if room % size == 0:
                part.append(item)
                room //= size
                left.pop(0)
            elif isinstance(item, int) and item % room == 0:  # a block reaches into the next axis
                left[0] = item // room
                room = 1
            else:
                return None
        out[axis] = trimmed(part)
    return None if left else out


def may_pend(operators: Sequence[Operator], given: Mapping[str, Layout], mesh: Mesh) -> dict[str, frozenset[str]]:
    """Return which reductions every tensor could hold at all, by following them through the operators in order."""
    found = {name: frozenset(reducer for _, reducer in layout.pending) for name, layout in given.items()}
    if mesh.ranks == 1:
        return found
    for operator in operators:
        here = {t.reducer for t in _passing(operator, found)}
        if any(
            axis in operator.reduced and _may_cut(operator, axis) and not merges(operator, axis)
            for axis in operator.axes
        ):
            here.add(_PENDING_KINDS[operator.kind])
        found[operator.result.name] = found.get(operator.result.name, frozenset()) | here
    return found
