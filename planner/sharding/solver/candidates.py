"""The alternatives a graph of operators leaves open: options by operator, layouts by tensor, and how to redistribute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.sharding.layouts.layout import DimSpec, Layout, divides_evenly
from planner.sharding.layouts.redistribution import Redistributor
from planner.sharding.operators.operator import Operator
from planner.sharding.operators.options import (
    ShardingOption,
    combine_axis_specs,
    possible_reductions,
    sharding_options,
    split_dim_spec,
)
from planner.sharding.problem import ShardingProblem
from planner.sharding.schedule import Schedule
from planner.sharding.solver.policies import follow_weights, keep_agreeing_operands


@dataclass(slots=True)
class LayoutCandidates:
    """The sharding options of every operator, the layouts of every tensor, and the redistributions between them."""

    options: list[list[ShardingOption]]
    layouts: dict[str, list[Layout]]
    redistributors: dict[str, Redistributor]
    # by (tensor, operator), where a schedule restricts how the operand may be moved
    scheduled_redistributors: dict[tuple[str, int], Redistributor] = field(default_factory=dict)
    # by tensor: (operator, position among its operands)
    consumers: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def redistributor_for(self, name: str, operator: int) -> Redistributor:
        """Return the redistributor that brings tensor `name` to `operator`."""
        return self.scheduled_redistributors.get((name, operator), self.redistributors[name])


def enumerate_candidates(problem: ShardingProblem) -> LayoutCandidates:
    """Return all alternatives of `problem`. Raises Infeasible where an operator has too many sharding options."""
    mesh, tensors = problem.mesh, problem.tensors
    options = _operator_options(problem)
    consumers: dict[str, list[tuple[int, int]]] = {}
    needed: dict[str, set[Layout]] = {name: set() for name in tensors}
    for number, (operator, operator_options) in enumerate(zip(problem.operators, options, strict=True)):
        for operand, (name, _) in enumerate(operator_options[0].operands):
            consumers.setdefault(name, []).append((number, operand))
            needed[name] |= {option.operands[operand][1] for option in operator_options}
        needed[operator.result.name] |= {option.result for option in operator_options}
    fixed = {**problem.input_layouts, **problem.pins}
    layouts = {
        name: [fixed[name]] if name in fixed else sorted(needed[name], key=repr) or [Layout(((),) * len(t.shape))]
        for name, t in tensors.items()
    }
    # tensors of one shape and dtype share their shortest paths
    shared: dict[tuple[tuple[int, ...], str, frozenset[str]], Redistributor] = {}

    def redistributor(name: str, excluded_kinds: frozenset[str]) -> Redistributor:
        tensor = tensors[name]
        key = (tensor.shape, tensor.dtype, excluded_kinds)
        if key not in shared:
            shared[key] = Redistributor(tensor.shape, tensor.dtype, mesh, excluded_kinds=excluded_kinds)
        shared[key].allow_irregular_specs([*layouts[name], *needed[name]])
        return shared[key]

    candidates = LayoutCandidates(
        options=options,
        layouts=layouts,
        redistributors={name: redistributor(name, frozenset()) for name in tensors},
        consumers=consumers,
    )
    for number, operator in enumerate(problem.operators):
        for name, _ in operator.operands:
            if excluded_kinds := _excluded_kinds(problem, name, operator):
                candidates.scheduled_redistributors[name, number] = redistributor(name, excluded_kinds)
    return candidates


def _operator_options(problem: ShardingProblem) -> list[list[ShardingOption]]:
    """Return the sharding options of every operator that the policy of `problem` leaves open."""
    irregular_specs = _irregular_specs(problem)
    pending = possible_reductions(problem.operators, problem.input_layouts, problem.mesh)
    options = [
        sharding_options(operator, problem.tensors, problem.mesh, pending=pending, irregular_specs=irregular_specs)
        for operator in problem.operators
    ]
    if problem.policy == "follow_weights":
        return follow_weights(problem, options)
    return keep_agreeing_operands(problem, options) if problem.policy is None else options


def _excluded_kinds(problem: ShardingProblem, name: str, operator: Operator) -> frozenset[str]:
    """Return the primitives that schedules forbid for moving tensor `name` to `operator`."""
    of_result = problem.schedule.get(operator.result.name, Schedule())
    of_operand = problem.schedule.get(name, Schedule())
    excluded = of_result.excluded_kinds if of_result.kind != "stay" else frozenset()
    return excluded | (of_operand.excluded_kinds if of_operand.kind == "stay" else frozenset())


def _irregular_specs(problem: ShardingProblem) -> dict[str, frozenset[tuple[int, DimSpec]]]:
    """Return the (dim, spec) pairs by tensor that enumeration alone would not find: uneven ones, and ones with blocks.

    They start at tensors whose layout is given or pinned, and are propagated through the operators in both directions.
    """
    mesh = problem.mesh
    found: dict[str, set[tuple[int, DimSpec]]] = {name: set() for name in problem.tensors}
    for name, layout in {**problem.input_layouts, **problem.pins}.items():
        for dim, spec in enumerate(layout.dims):
            size = problem.tensors[name].shape[dim]
            if any(isinstance(item, int) for item in spec) or not divides_evenly(size, spec, mesh):
                found[name].add((dim, spec))

    def propagate(
        source: str,
        source_dims: Sequence[Sequence[str]],
        target: str,
        target_dims: Sequence[Sequence[str]],
        operator: Operator,
    ) -> None:
        for dim, spec in list(found[source]):
            axis_specs = split_dim_spec(spec, tuple(source_dims[dim]), operator.sizes, mesh) or {}
            for position, target_dim in enumerate(target_dims):
                if set(target_dim) & set(axis_specs):
                    target_spec = combine_axis_specs(tuple(target_dim), operator.sizes, axis_specs, mesh)
                    if target_spec:
                        found[target].add((position, target_spec))

    for _ in range(2):  # the second pass carries what the backward half of the first one found
        for operator in problem.operators:
            for name, dims in operator.operands:
                propagate(name, dims, operator.result.name, operator.dims, operator)
        for operator in reversed(problem.operators):
            for name, dims in operator.operands:
                propagate(operator.result.name, operator.dims, name, dims, operator)
    return {name: frozenset(specs) for name, specs in found.items()}
