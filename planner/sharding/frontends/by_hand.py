"""Placements as people write them: parameters whole on every rank, as in data parallelism; matrices of products split
by columns, then by rows, as in Megatron-LM; and sequences of attention in pieces, as in context parallelism.

The matrix of a product is split by columns if its operand is whole, and by rows if an earlier product has split the
operand; the sum over ranks is then whole again (Shoeybi et al., arXiv 1909.08053, section 3). In fused matrices, such
as queries, keys and values in one, the columns of each part are split. All other parameters are whole.

A choice minimises a sum of times, but a program overlaps them. So the programs of these placements are compared as
well, and no answer is predicted to be slower than them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from planner.sharding.layouts.layout import Layout, divides_evenly
from planner.sharding.operators.operator import Operator
from planner.sharding.ops.annotation import Dim
from planner.sharding.problem.problem import ShardingProblem

_PRODUCTS = frozenset(("linear", "matmul", "mm", "bmm", "addmm", "einsum", "grouped_mm"))


def placed_by_hand(problem: ShardingProblem) -> Iterator[ShardingProblem]:
    """Yield the problem with all open parameters whole, with them split over each mesh axis, and with the rows of all
    attention split over each.
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
        rows = rows_of_attention(problem, axis)
        if rows:
            yield replace(problem, pins={**problem.pins, **rows})


def rows_of_attention(
    problem: ShardingProblem, axis: str, among: Mapping[str, Mapping[str, Layout]] | None = None
) -> dict[str, Layout]:
    """Return the layouts of queries, keys, values and results of attention split by rows, for a ring.

    `among` has by result the attention that is meant, with layouts whose other dims stay as they are; without it all
    attention is, and nothing else of it is split.
    """
    found: dict[str, Layout] = {}
    stated = {**problem.pins, **problem.input_layouts}
    for operator in problem.operators:
        if operator.kind == "attention" and (among is None or operator.result.name in among):
            names = [operator.result.name, *(name for name, _ in operator.operands[:3])]
            shapes = [problem.tensors[name].shape for name in names]
            split: dict[str, Layout] = {}
            for name, shape in zip(names, shapes, strict=True):
                dims = ((),) * len(shape) if among is None else among[operator.result.name][name].dims
                dims = tuple(tuple(item for item in spec if item != axis) for spec in dims)
                split[name] = Layout((*dims[:-2], (axis,), dims[-1]))
            divides = all(divides_evenly(shape[-2], (axis,), problem.mesh) for shape in shapes)
            if divides and all(stated.get(name, at) == at for name, at in split.items()):
                found |= split
    return found


def _split(problem: ShardingProblem, axis: str) -> dict[str, Layout]:
    """Return the layouts of matrices that are split over a mesh axis, and of the terms that are added to their
    columns.
    """
    found: dict[str, Layout] = {}
    parts = set[str]()  # tensors of which each rank has some columns
    columns: dict[str, tuple[int, int]] = {}  # by product split by columns: their dim, and the number of fused matrices
    for operator in problem.operators:
        names = [name for name, _ in operator.operands]
        matrix = next((name for name in names if name in problem.graph.parameters), "")
        arrives = any(name in parts for name in names)
        if not (_PRODUCTS & operator.functions and matrix and len(problem.tensors[matrix].shape) > 1):
            if arrives:
                parts.add(operator.result.name)
                for name in columns.keys() & set(names):
                    at, blocks = columns[name]
                    found |= _added(operator, problem, operator.dims[at], axis, blocks)
            continue
        dims = dict(operator.operands)[matrix]
        wanted = {a for dim in operator.dims for a in dim} if not arrives else operator.reduced
        possible = (d for d in reversed(range(len(dims))) if dims[d] and set(dims[d]) <= wanted)
        at = next((d for d in possible if arrives or dims[d] in operator.dims), -1)
        if at < 0:
            continue
        blocks = 1 if arrives else _side_by_side(problem, operator.result.name, operator.dims.index(dims[at]))
        if not divides_evenly(problem.tensors[matrix].shape[at], (blocks, axis), problem.mesh):
            continue
        found[matrix] = _along(len(dims), at, axis, blocks)
        if not arrives:
            parts.add(operator.result.name)
            columns[operator.result.name] = operator.dims.index(dims[at]), blocks
            found = {**_added(operator, problem, dims[at], axis, blocks), **found}
    return found


def _side_by_side(problem: ShardingProblem, name: str, dim: int) -> int:
    """Return the number of parts into which the readers of a product split a dim of its result."""
    for operator in problem.operators:
        dims = dict(operator.operands).get(name)
        if dims is None:
            continue
        outer, *inner = dims[dim] or ("",)
        if inner and outer not in {axis for one in operator.dims for axis in one}:
            return operator.sizes[outer]
        if dims == operator.dims:  # the added term
            return _side_by_side(problem, operator.result.name, dim)
    return 1


def _added(operator: Operator, problem: ShardingProblem, columns: Dim, axis: str, blocks: int) -> dict[str, Layout]:
    """Return the layouts of an operator's parameters that have the columns of a product, such as biases."""
    return {
        name: _along(len(dims), dims.index(columns), axis, blocks)
        for name, dims in operator.operands
        if name in problem.graph.parameters and columns in dims
    }


def _along(rank: int, at: int, axis: str, blocks: int = 1) -> Layout:
    spec = (axis,) if blocks == 1 else (blocks, axis)
    return Layout(tuple(spec if d == at else () for d in range(rank)))
