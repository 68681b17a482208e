"""The placements that people write: parameters whole on every rank, as in data parallelism, matrices of products
split by columns, then by rows, as in Megatron-LM, and sequences of attention in pieces, as in context parallelism.

A product with a matrix splits its columns where its operand is whole, and its rows where the operand is already split
by an earlier product, after which the sum over ranks is whole again (Shoeybi et al., arXiv 1909.08053, section 3). All
other parameters are whole. A choice adds up times, and a program overlaps them: so the programs of these placements are
among those that are compared, and no answer is predicted to be slower than them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.sharding.layouts.layout import Layout, divides_evenly
from planner.sharding.operators.operator import Operator
from planner.sharding.ops.annotation import Dim
from planner.sharding.problem.problem import ShardingProblem

_PRODUCTS = frozenset(("linear", "matmul", "mm", "bmm", "addmm", "einsum", "grouped_mm"))


def placed_by_hand(problem: ShardingProblem) -> Iterator[ShardingProblem]:
    """Yield the problem with all parameters that are open whole, with them split over each mesh axis, and with the
    rows of all attention over each.
    """
    shapes = {name: problem.tensors[name].shape for name in problem.graph.parameters}
    open_ones = {name: shape for name, shape in shapes.items() if name not in problem.input_layouts}
    whole = {name: Layout(((),) * len(shape)) for name, shape in open_ones.items()}
    if open_ones:
        yield replace(problem, input_layouts={**problem.input_layouts, **whole})
    for axis in problem.mesh.names if open_ones else ():
        split = {name: at for name, at in _split(problem, axis).items() if name in open_ones}
        if split:
            yield replace(problem, input_layouts={**problem.input_layouts, **whole, **split})
    for axis in problem.mesh.names:
        rows = _rows_of_attention(problem, axis)
        if rows:
            yield replace(problem, pins={**problem.pins, **rows})


def _rows_of_attention(problem: ShardingProblem, axis: str) -> dict[str, Layout]:
    """Return queries, keys, values and results of attention in pieces of rows: what goes around a ring."""
    found: dict[str, Layout] = {}
    for operator in problem.operators:
        if operator.kind == "attention":
            names = [operator.result.name, *(name for name, _ in operator.operands[:3])]
            shapes = [problem.tensors[name].shape for name in names]
            divides = all(divides_evenly(shape[-2], (axis,), problem.mesh) for shape in shapes)
            if divides and not {*problem.pins, *problem.input_layouts} & set(names):
                found |= {n: _along(len(s), len(s) - 2, axis) for n, s in zip(names, shapes, strict=True)}
    return found


def _split(problem: ShardingProblem, axis: str) -> dict[str, Layout]:
    """Return the layouts of matrices, and of what is added to their columns, that are split over a mesh axis."""
    found: dict[str, Layout] = {}
    parts = set[str]()  # of which ranks have some columns each
    columns: dict[str, int] = {}  # by product whose matrix is split by columns, the dim that they are
    for operator in problem.operators:
        names = [name for name, _ in operator.operands]
        matrix = next((name for name in names if name in problem.graph.parameters), "")
        arrives = any(name in parts for name in names)
        if not (_PRODUCTS & operator.functions and matrix and len(problem.tensors[matrix].shape) > 1):
            if arrives:
                parts.add(operator.result.name)
                for name in columns.keys() & set(names):
                    found |= _added(operator, problem, operator.dims[columns[name]], axis)
            continue
        dims = dict(operator.operands)[matrix]
        wanted = {a for dim in operator.dims for a in dim} if not arrives else operator.reduced
        possible = (d for d in reversed(range(len(dims))) if dims[d] and set(dims[d]) <= wanted)
        at = next((d for d in possible if arrives or dims[d] in operator.dims), -1)
        if at < 0 or not divides_evenly(problem.tensors[matrix].shape[at], (axis,), problem.mesh):
            continue
        found[matrix] = _along(len(dims), at, axis)
        if not arrives:
            parts.add(operator.result.name)
            columns[operator.result.name] = operator.dims.index(dims[at])
            found = {**_added(operator, problem, dims[at], axis), **found}
    return found


def _added(operator: Operator, problem: ShardingProblem, columns: Dim, axis: str) -> dict[str, Layout]:
    """Return the layouts of the parameters of an operator that have the columns of a product, as biases do."""
    return {
        name: _along(len(dims), dims.index(columns), axis)
        for name, dims in operator.operands
        if name in problem.graph.parameters and columns in dims
    }


def _along(rank: int, at: int, axis: str) -> Layout:
    return Layout(tuple((axis,) if d == at else () for d in range(rank)))
