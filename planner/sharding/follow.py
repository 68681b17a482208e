"""Policies: which options of an operator are left to the price, given where its operands lie.

Fewest bytes is not always what is meant. On small activations it may be cheapest to gather the batch everywhere and
compute every gradient on every rank, which no one who sharded the batch wants. So there are three policies:

    (none)          an operator whose operands agree runs where they lie: nothing is moved before it, and what it leaves
                    pending is dealt with after it. Only where they disagree does the price decide who moves.
    follow_weights  an operator takes the sharding of its weight, as nvFuser's propagation does; activations move
    min_ring_bytes  the price decides everything

Operands agree when every axis has one sharding among those that are cut along it, and no mesh axis is wanted twice; an
operand that holds copies is cut for free. A `set` says that a tensor is moved there, as in nvFuser's IR: where it is not
pinned to where, it goes by the other operands of those who use it. nvFuser goes forward over the operators and lets a result take over the mesh
axes of its operands in an order of rank: for products the weight before the activation (usually the larger, so it should
stay), else the operand cut over most axes (NVIDIA/Fuser, csrc/preseg_passes/propagate_shardings.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.sharding.layout import Items, Layout
from planner.sharding.notation import Dim
from planner.sharding.operator import Operator
from planner.sharding.problem import Problem
from planner.sharding.rule import Option, lifted

_WEIGHTED = ("linear(", "matmul(", "grouped_mm(", "@", "mm(", "einsum(")


def settled(problem: Problem, found: Sequence[Sequence[Option]]) -> list[list[Option]]:
    """Return the options that each operator is left with when agreeing operands stay where they are."""
    layouts: dict[str, Layout] = dict(problem.given)
    moved = {o.result.name for o in problem.operators if o.text.startswith("set(")} - set(problem.pins)
    out = []
    for operator, every in zip(problem.operators, found, strict=True):
        staying = [(n, dims) for n, dims in operator.operands if n not in moved] or list(operator.operands)
        same = _agreeing(operator, every, staying, layouts, problem)
        out.append(same or list(every))
        if operator.result.name in problem.pins:
            layouts[operator.result.name] = problem.pins[operator.result.name]
        elif same:
            layouts[operator.result.name] = same[0].result
    return out


def _agreeing(
    operator: Operator,
    every: Sequence[Option],
    staying: Sequence[tuple[str, tuple[Dim, ...]]],
    layouts: Mapping[str, Layout],
    problem: Problem,
) -> list[Option]:
    """Return the options that use `staying` operands as they lie, none if they disagree or one lies nobody knows where."""
    placed: dict[str, Items] = {}
    used: dict[str, str] = {}
    for name, dims in staying:
        layout = layouts.get(name)
        if layout is None:
            return []
        for dim, items in zip(dims, layout.dims, strict=True):
            parts = lifted(items, dim, operator.sizes, problem.mesh)
            if parts is None:
                return []
            for axis, part in parts.items():
                if part and placed.setdefault(axis, part) != part:
                    return []
                if any(used.setdefault(item, axis) != axis for item in part if isinstance(item, str)):
                    return []
    return [
        option
        for option in every
        if {a: items for a, items in option.placed if a not in operator.created} == placed
        and all(layouts[n].pending == wanted.pending for n, wanted in option.operands if n in dict(staying))
    ]


def followed(problem: Problem, found: Sequence[Sequence[Option]]) -> list[list[Option]]:
    """Return, for every operator, the options that cut its axes as its weight is; all of them where none does."""
    layouts = dict(problem.given)
    out = []
    for operator, every in zip(problem.operators, found, strict=True):
        placed = _taken(operator, layouts, problem)
        same = [option for option in every if dict(option.placed) == placed] or list(every)
        out.append(same)
        layouts[operator.result.name] = problem.pins.get(operator.result.name, same[0].result)
    return out


def _taken(operator: Operator, layouts: Mapping[str, Layout], problem: Problem) -> dict[str, Items]:
    placed: dict[str, Items] = {}
    used: set[str] = set()
    for name, dims in _by_rank(operator, layouts):
        layout = layouts.get(name)
        if layout is None:
            continue
        for dim, items in zip(dims, layout.dims, strict=True):
            for axis, part in (lifted(items, dim, operator.sizes, problem.mesh) or {}).items():
                names = {item for item in part if isinstance(item, str)}
                if names and not names & used and axis not in placed and axis not in operator.whole:
                    placed[axis] = part
                    used |= names
    return placed


def _by_rank(operator: Operator, layouts: Mapping[str, Layout]) -> list[tuple[str, tuple[tuple[str, ...], ...]]]:
    operands = list(operator.operands)
    if len(operands) > 1 and any(word in operator.text for word in _WEIGHTED):
        return [operands[1], operands[0], *operands[2:]]
    return sorted(operands, key=lambda o: -len(layouts[o[0]].axes()) if o[0] in layouts else 0)
