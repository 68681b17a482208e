"""A quick answer: the best of those in which all mesh axes together shard one dim, as if the mesh had one axis.

It has far fewer alternatives than the whole mesh, so it is found before those are listed. Tensors that the question
places on single mesh axes (inputs, pins) are moved from or to these. Its bound is what the arithmetic and the memory of
all ranks allow, without any communication.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from planner.sharding.layouts.layout import Layout, Mesh, local_shape
from planner.sharding.operators.options import ShardingOption
from planner.sharding.operators.work import operator_work
from planner.sharding.problem.deadline import NO_DEADLINE
from planner.sharding.problem.problem import ShardingProblem
from planner.sharding.solver.candidates import LayoutCandidates
from planner.sharding.solver.equivalence import Equivalence
from planner.sharding.solver.pricing import PICOSECONDS, TimePricing
from simulator.config.runtime import ELEMENT_BYTES

ALL = "every_axis"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAnswer:
    """Options by operator, layouts by tensor, an upper bound of their cost, and a lower bound for every answer."""

    options: tuple[ShardingOption, ...]
    layouts: dict[str, Layout]
    candidates: LayoutCandidates
    cost: int
    bound: float


def with_one_axis(problem: ShardingProblem) -> ShardingProblem:
    """Return the problem on a mesh of one axis; tensors placed on single axes are whole there."""
    mesh = Mesh(names=(ALL,), shape=(problem.mesh.ranks,))
    inputs, pins = (
        {name: Layout(((),) * len(problem.tensors[name].shape)) for name in given}
        for given in (problem.input_layouts, problem.pins)
    )
    return replace(problem, mesh=mesh, input_layouts=inputs, pins=pins, deadline=NO_DEADLINE)


def first_answer(
    problem: ShardingProblem,
    pricing: TimePricing,
    equivalence: Equivalence,
    options: tuple[ShardingOption, ...],
    layouts: dict[str, Layout],
    cost: int,
) -> FirstAnswer:
    """Return the answer to `problem` that corresponds to the one for `with_one_axis`; `cost` is the latter's cost."""
    given = {**problem.input_layouts, **problem.pins}
    # gradients have the layouts of their parameters
    fixed = {other: given[name] for name, other in problem.graph.gradients.items() if name in given} | given
    real_options = tuple(_option(option, problem.mesh) for option in options)
    real_layouts = {name: fixed.get(name, on_all_axes(layout, problem.mesh)) for name, layout in layouts.items()}
    candidates = LayoutCandidates(problem=problem, pricing=pricing, equivalence=equivalence, options=[], layouts={})
    needed: dict[str, set[tuple[Layout, Layout]]] = {}
    for operator, option in zip(problem.operators, real_options, strict=True):
        for name, at in option.operands:
            needed.setdefault(name, set()).add((real_layouts[name], at))
        needed.setdefault(operator.result.name, set()).add((option.result, real_layouts[operator.result.name]))
    for name, moves in needed.items():
        candidates.redistributor_for(name).allow_irregular_specs([at for pair in moves for at in pair])
    for name, moves in needed.items():
        moves_of = candidates.redistributor_for(name)
        for source, target in moves:
            if source != target and name in fixed:
                cost += int(moves_of.costs_between([source], [target])[0][0, 0])
            elif source != target:  # in `cost`, as over one axis
                cost += _slices_between(problem, pricing, name, source, target)
    return FirstAnswer(
        options=real_options,
        layouts=real_layouts,
        candidates=candidates,
        cost=cost,
        bound=min(float(cost), _least_s(problem, pricing) * PICOSECONDS),
    )


def _slices_between(problem: ShardingProblem, pricing: TimePricing, name: str, source: Layout, target: Layout) -> int:
    """Return the additional cost of a slice over several mesh axes in turn, for its intermediate tensors; 0 for other
    moves.
    """
    pairs = list(zip(source.dims, target.dims, strict=True))
    if source.pending != target.pending or any(after[: len(before)] != before for before, after in pairs):
        return 0
    cut = [item for before, after in pairs for item in after[len(before) :] if isinstance(item, str)]
    tensor = problem.tensors[name]
    nbytes = float(prod(local_shape(tensor.shape, source, problem.mesh)) * ELEMENT_BYTES[tensor.dtype])
    left = [nbytes := nbytes / problem.mesh.size((axis,)) for axis in cut[:-1]]
    return int(pricing.copy(np.array(left)).sum()) * (2 if name in problem.differentiated else 1)


def _least_s(problem: ShardingProblem, pricing: TimePricing) -> float:
    """Return the seconds that all ranks together need for the arithmetic and memory traffic of all operators."""
    total, ranks = 0.0, problem.mesh.ranks
    known: dict[Hashable, float] = {}
    for operator in problem.operators:
        if operator.is_view:
            continue
        key = (operator.likeness, *(problem.tensors[name].dtype for name, _ in operator.operands))
        if key in known:
            total += known[key]
            continue
        sizes = {axis: np.array([float(size)]) for axis, size in operator.sizes.items()}
        work, roofline = operator_work(operator, problem.tensors, sizes), pricing.roofline(operator.result.dtype)
        peak = roofline.gpu.peak_flops.get(roofline.dtype, max(roofline.gpu.peak_flops.values()))
        rate = roofline.gpu.memory_bytes_per_s
        # a rank holds at least its share of what is written; operands may be in its caches
        written = prod(operator.result.shape) * ELEMENT_BYTES[operator.result.dtype]
        known[key] = max(float(np.max(work.flops)) / peak, written / rate) / ranks
        total += known[key]
    return total


def on_all_axes(layout: Layout, mesh: Mesh) -> Layout:
    """Return a layout on a mesh of one axis with that axis replaced by all axes of `mesh`."""
    names = mesh.names
    dims = tuple(tuple(one for item in spec for one in (names if item == ALL else (item,))) for spec in layout.dims)
    return Layout(dims, tuple((name, how) for _, how in layout.pending for name in names))


def _option(option: ShardingOption, mesh: Mesh) -> ShardingOption:
    names = mesh.names
    specs = tuple(
        (axis, tuple(one for item in spec for one in (names if item == ALL else (item,))))
        for axis, spec in option.axis_specs
    )
    return replace(
        option,
        axis_specs=specs,
        operands=tuple((name, on_all_axes(at, mesh)) for name, at in option.operands),
        result=on_all_axes(option.result, mesh),
        collectives=tuple(replace(c, axes=names, mesh_dim=mesh.group_name(names)) for c in option.collectives),
    )
