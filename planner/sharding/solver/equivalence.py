"""Equivalent layers: classes of operators and tensors that are placed alike.

A model's program repeats: the operators of layer 2 are those of layer 1 with other weights, also in the backward pass.
Runs of operators that repeat with a period are found, and operators at the same place in such a run form a class.
Tensors form a class if operators of the same classes make and use them. A class is placed once, and its cost counts
once for each member; the answer is the best of those that place equivalent layers alike.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.sharding.layouts.layout import Layout
from planner.sharding.operators.graph import Graph
from planner.sharding.operators.operator import Operator

_NAME = re.compile(r"\b[A-Za-z_]\w*")
SHORTEST_PERIOD = 4  # operators: a row of equal products is not a layer


@dataclass(frozen=True, slots=True)
class Equivalence:
    """The class of every operator (by index) and of every tensor, numbered from 0."""

    operators: tuple[int, ...]
    tensors: Mapping[str, int]

    def members(self) -> list[list[int]]:
        """Return the operators of every class, first ones first."""
        found: list[list[int]] = [[] for _ in range(max(self.operators, default=-1) + 1)]
        for number, each in enumerate(self.operators):
            found[each].append(number)
        return found

    def tensor_members(self) -> list[list[str]]:
        found: list[list[str]] = [[] for _ in range(max(self.tensors.values(), default=-1) + 1)]
        for name, each in self.tensors.items():
            found[each].append(name)
        return found


def find_equivalent(graph: Graph, fixed: Mapping[str, Layout], *, fold: bool) -> Equivalence:
    """Return the classes of `graph`, whose tensors have `fixed` layouts; without `fold`, each class has one member."""
    if not fold:
        return Equivalence(
            operators=tuple(range(len(graph.operators))),
            tensors={name: number for number, name in enumerate(graph.tensors)},
        )
    signatures = [_signature(operator, graph, fixed) for operator in graph.operators]
    start = len(signatures) if graph.backward_start is None else graph.backward_start
    operators = _operator_classes(signatures[:start])
    operators += [max(operators, default=-1) + 1 + each for each in _operator_classes(signatures[start:])]
    producers, consumers = graph.producers, graph.consumers
    parameter_of = {gradient: name for name, gradient in graph.gradients.items()}
    keys: dict[Hashable, int] = {}
    tensors: dict[str, int] = {}

    def uses(name: str) -> tuple[tuple[int, int], ...]:
        return tuple(sorted({(operators[number], position) for number, position in consumers.get(name, ())}))

    for name, tensor in graph.tensors.items():
        made = operators[producers[name]] if name in producers else None
        role = (name in graph.parameters, name in graph.outputs, name in graph.gradients)
        parameter = parameter_of.get(name)
        of = None if parameter is None else (uses(parameter), fixed.get(parameter))
        # inputs used in the same way form one class only if they are used equally often
        count = len(consumers.get(name, ())) if made is None else 0
        key = (made, uses(name), tensor.shape, tensor.dtype, fixed.get(name), role, of, count)
        tensors[name] = keys.setdefault(key, len(keys))
    return Equivalence(operators=tuple(operators), tensors=tensors)


def _signature(operator: Operator, graph: Graph, fixed: Mapping[str, Layout]) -> Hashable:
    """Return a key that is equal for operators that may be in one class."""
    local = {name: f"#{position}" for position, (name, _) in enumerate(operator.operands)}
    renamed = _NAME.sub(lambda found: local.get(found.group(), found.group()), operator.text)
    tensors = [graph.tensors[name] for name, _ in operator.operands]
    return (
        renamed,
        operator.index,
        _numbered([*(dims for _, dims in operator.operands), operator.dims]),
        operator.result.dtype,
        # activations of the first layer may be given, and those of the last one pinned; weights of all layers have
        # equal layouts
        tuple((t.shape, t.dtype, fixed.get(t.name) if t.name in graph.parameters else None) for t in tensors),
        len(operator.unannotated),
    )


def _numbered(operands: Sequence[Sequence[Sequence[str]]]) -> Hashable:
    """Return dims with axes numbered in order of appearance, since their names do not matter."""
    numbers: dict[str, int] = {}
    return tuple(
        tuple(tuple(numbers.setdefault(axis, len(numbers)) for axis in dim) for dim in dims) for dims in operands
    )


def _operator_classes(signatures: Sequence[Hashable]) -> list[int]:
    ids: dict[Hashable, int] = {}
    codes = np.array([ids.setdefault(each, len(ids)) for each in signatures], dtype=np.int64)
    classes = np.full(len(codes), -1, dtype=np.int64)
    number = 0
    waiting = [(0, len(codes))]
    while waiting:
        start, stop = waiting.pop()
        found = _longest_run(codes[start:stop])
        if found is None:
            classes[start:stop] = np.arange(number, number + stop - start)
            number += stop - start
            continue
        first, period, length = found
        copies = length // period
        for at in range(period):
            classes[start + first + at : start + first + copies * period : period] = number + at
        number += period
        waiting += [(start, start + first), (start + first + copies * period, stop)]
    _, compact = np.unique(classes, return_inverse=True)
    return [int(each) for each in compact]


def _longest_run(codes: np.ndarray) -> tuple[int, int, int] | None:
    """Return (start, period, length) of the longest stretch that repeats at least twice, of the shortest such
    period.
    """
    best: tuple[int, int, int] | None = None
    for period in range(SHORTEST_PERIOD, len(codes) // 2 + 1):
        equal = codes[period:] == codes[:-period]
        if best is not None and int(equal.sum()) + period <= best[2]:
            continue
        edges = np.flatnonzero(np.diff(np.concatenate([[0], equal.astype(np.int8), [0]])))
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            length = (int(stop - start) + period) // period * period
            if length >= 2 * period and (best is None or length > best[2]):
                best = (int(start), period, length)
    return best
