"""The alternatives for a graph of operators: options by operator, layouts by tensor, and how to redistribute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from planner.sharding.layouts.collectives import SLICE, Cost
from planner.sharding.layouts.layout import DimSpec, Layout, divides_evenly
from planner.sharding.layouts.redistribution import RedistributionStep, Redistributor
from planner.sharding.operators.grouped_rows import grouped_rows
from planner.sharding.operators.operator import Operator
from planner.sharding.operators.options import (
    ShardingOption,
    combine_axis_specs,
    possible_reductions,
    sharding_options,
    split_dim_spec,
)
from planner.sharding.ops.annotation import Dim
from planner.sharding.problem.deadline import Deadline
from planner.sharding.problem.problem import ShardingProblem
from planner.sharding.problem.schedule import Schedule
from planner.sharding.solver.equivalence import Equivalence, find_equivalent
from planner.sharding.solver.pricing import BytesPricing, Pricing
from simulator.config.runtime import ELEMENT_BYTES


@dataclass(slots=True)
class LayoutCandidates:
    """The sharding options of every class of operators, and the layouts of every class of tensors.

    Both are those of the first member; if every class has one member, classes are numbered like operators.
    """

    problem: ShardingProblem
    pricing: Pricing
    equivalence: Equivalence
    options: list[list[ShardingOption]]
    layouts: dict[str, list[Layout]]
    deadline: Deadline = field(default_factory=Deadline)
    # tensors of one shape and dtype share their shortest paths
    _shared: dict[tuple[tuple[int, ...], str, frozenset[str], bool], Redistributor] = field(default_factory=dict)

    def redistributor_for(self, name: str, operator: int | None = None) -> Redistributor:
        """Return the redistributor of tensor `name`, or the one for moves to `operator` that its schedule allows."""
        excluded: frozenset[str] = frozenset()
        if operator is not None and self.problem.schedule:
            excluded = _excluded_kinds(self.problem, name, self.problem.operators[operator])
        tensor = self.problem.tensors[name]
        duals = name in self.problem.differentiated
        key = (tensor.shape, tensor.dtype, excluded, duals)
        if key not in self._shared:
            self._shared[key] = Redistributor(
                tensor.shape,
                tensor.dtype,
                self.problem.mesh,
                excluded_kinds=excluded,
                price=self._price(tensor.dtype, duals),
            )
        return self._shared[key]

    def _price(self, dtype: str, duals: bool) -> Callable[[RedistributionStep, Sequence[int]], Cost]:
        def price(step: RedistributionStep, after: Sequence[int]) -> Cost:
            slices = int(step.kind == SLICE)
            return self.pricing.collectives(
                step.collectives,
                slices=slices,
                sliced_bytes=prod(after) * ELEMENT_BYTES[dtype] if slices else 0,
                duals=duals,
            )

        return price


def enumerate_candidates(
    problem: ShardingProblem,
    pricing: Pricing | None = None,
    equivalence: Equivalence | None = None,
    deadline: Deadline | None = None,
) -> LayoutCandidates:
    """Return all alternatives of `problem`.

    Raises Infeasible if an operator has too many sharding options, or after `deadline`.
    """
    deadline = deadline or Deadline()
    options: list[list[ShardingOption]] = []
    if problem.policy is None and set(problem.graph.outputs) - set(problem.pins):
        options = _operator_options(problem, range(len(problem.operators)), deadline)
        finished = finished_outputs(problem, options)
        if finished:
            problem, options = replace(problem, pins={**finished, **problem.pins}), []
    tensors, fixed = problem.tensors, {**problem.input_layouts, **problem.pins}
    equivalence = equivalence or find_equivalent(problem.graph, fixed, fold=False)
    first = [members[0] for members in equivalence.members()]
    options = options if len(options) == len(first) else _operator_options(problem, first, deadline)
    names = [members[0] for members in equivalence.tensor_members()]
    needed: dict[int, dict[Layout, None]] = {number: {} for number in range(len(names))}
    members = equivalence.members()
    for found, same in zip(options, members, strict=True):
        for number in same:
            results = dict.fromkeys(option.result for option in found)
            needed[equivalence.tensors[problem.operators[number].result.name]] |= results
            for operand, name in enumerate(operand_names(problem, number)):
                needed[equivalence.tensors[name]] |= dict.fromkeys(option.operands[operand][1] for option in found)
    layouts = {}
    for number, name in enumerate(names):
        whole = Layout(((),) * len(tensors[name].shape))
        layouts[name] = [fixed[name]] if name in fixed else sorted(needed[number], key=repr) or [whole]
    candidates = LayoutCandidates(
        problem=problem,
        pricing=pricing or BytesPricing(problem.mesh.ranks),
        equivalence=equivalence,
        options=options,
        layouts=layouts,
        deadline=deadline,
    )
    for number, name in enumerate(names):
        candidates.redistributor_for(name).allow_irregular_specs([*layouts[name], *needed[number]])
    if problem.schedule:
        for number, operator in enumerate(problem.operators):
            for name, _ in operator.operands:
                wanted = needed[equivalence.tensors[name]]
                candidates.redistributor_for(name, number).allow_irregular_specs([*layouts[name], *wanted])
    return candidates


def operand_names(problem: ShardingProblem, number: int) -> list[str]:
    """Return the tensors that an operator reads, in the order of its options' operands."""
    operator = problem.operators[number]
    return [*(name for name, _ in operator.operands), *operator.unannotated]


def _operator_options(
    problem: ShardingProblem, numbers: Sequence[int], deadline: Deadline
) -> list[list[ShardingOption]]:
    """Return the sharding options, for the operators with these numbers, that the policy of `problem` allows."""
    irregular_specs = _irregular_specs(problem)
    pending = possible_reductions(problem.operators, problem.input_layouts, problem.mesh)
    grouped = grouped_rows(problem.operators)
    options = []
    for operator in (problem.operators[number] for number in numbers):
        deadline.check()
        found = sharding_options(
            operator,
            problem.tensors,
            problem.mesh,
            pending=pending,
            irregular_specs=irregular_specs,
            grouped=grouped,
        )
        if operator.result.name in problem.differentiated:  # the gradient of a largest value goes to one rank's element
            found = [
                one for one in found if all(how in ("sum", "avg", "mask") for _, how in one.result.pending)
            ] or found
        options.append(found)
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
    """Return the (dim, spec) pairs by tensor that enumeration would not find: uneven ones, and ones with blocks.

    They come from tensors with given or pinned layouts and are propagated through the operators in both directions,
    since a view that joins dims turns a regular spec into one with blocks.
    """
    mesh = problem.mesh
    found: dict[str, set[tuple[int, DimSpec]]] = {name: set() for name in problem.tensors}
    for name, layout in {**problem.input_layouts, **problem.pins}.items():
        found[name] |= {(dim, spec) for dim, spec in enumerate(layout.dims) if spec}

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

    for _ in range(2):  # the second pass carries results of the first one's backward half
        for operator in problem.operators:
            for name, dims in operator.operands:
                propagate(name, dims, operator.result.name, operator.dims, operator)
        for operator in reversed(problem.operators):
            for name, dims in operator.operands:
                propagate(operator.result.name, operator.dims, name, dims, operator)

    def is_irregular(name: str, dim: int, spec: DimSpec) -> bool:
        blocks = any(isinstance(item, int) for item in spec)
        return blocks or not divides_evenly(problem.tensors[name].shape[dim], spec, mesh)

    return {name: frozenset(one for one in specs if is_irregular(name, *one)) for name, specs in found.items()}


_PRODUCTS = ("linear(", "matmul(", "grouped_mm(", "@", "mm(", "einsum(")


def keep_agreeing_operands(
    problem: ShardingProblem, all_options: Sequence[Sequence[ShardingOption]]
) -> list[list[ShardingOption]]:
    """Return the options of each operator that keep agreeing operands in place; all options if operands disagree.

    Layouts are propagated from operands to results, and then back: an operator whose operands are all copies is sharded
    like its result.
    """
    layouts: dict[str, Layout] = dict(problem.input_layouts)
    moved = {o.result.name for o in problem.operators if o.text.startswith("set(")} - set(problem.pins)
    kept: list[list[ShardingOption]] = []
    silent: list[int] = []  # operators of copies
    for number, (operator, options) in enumerate(zip(problem.operators, all_options, strict=True)):
        staying = [(n, dims) for n, dims in operator.operands if n not in moved] or list(operator.operands)
        matching = _options_without_moves(operator, options, staying, layouts, problem)
        kept.append(matching or list(options))
        if matching and all(not layouts[n].pending and not layouts[n].axes() for n, _ in operator.operands):
            silent.append(number)
        if operator.result.name in problem.pins:
            layouts[operator.result.name] = problem.pins[operator.result.name]
        elif matching:
            layouts[operator.result.name] = matching[0].result
    _shard_as_results(problem, all_options, kept, silent)
    return kept


def _shard_as_results(
    problem: ShardingProblem,
    all_options: Sequence[Sequence[ShardingOption]],
    kept: list[list[ShardingOption]],
    silent: Sequence[int],
) -> None:
    """Let operators on copies give their results in the layouts in which these are needed, from pinned results back, in
    `kept`.
    """
    wanted = {name: layout for name, layout in problem.pins.items() if layout.axes() and not layout.pending}
    uses: dict[str, list[int]] = {}
    for number, operator in enumerate(problem.operators):
        for name, _ in operator.operands:
            uses.setdefault(name, []).append(number)
    for number in reversed(silent):
        operator = problem.operators[number]
        layout = wanted.get(operator.result.name)
        found = [one for one in all_options[number] if one.result == layout and not one.collectives]
        if not found:
            continue
        kept[number] = found
        for name, needed in found[0].operands:
            alone = uses[name] == [number] and len({dict(one.operands)[name] for one in found}) == 1
            if alone and needed.axes() and not needed.pending and name not in problem.graph.outputs:
                wanted.setdefault(name, needed)


def finished_outputs(problem: ShardingProblem, kept: Sequence[Sequence[ShardingOption]]) -> dict[str, Layout]:
    """Return the layouts of unpinned outputs that need finished sums of pending operands: those that follow from the
    operands after an all-reduce. An output that can be a pending sum itself stays one.
    """
    layouts, found = dict(problem.input_layouts), dict[str, Layout]()
    for operator, options in zip(problem.operators, kept, strict=True):
        name = operator.result.name
        finished = {n: Layout(layout.dims) for n, layout in layouts.items()}
        matching = _options_without_moves(operator, options, operator.operands, layouts, problem)
        after_sums = matching or _options_without_moves(operator, options, operator.operands, finished, problem)
        if name in problem.pins:
            layouts[name] = problem.pins[name]
        elif after_sums:
            layouts[name] = after_sums[0].result
            if name in problem.graph.outputs and not matching:
                found[name] = Layout(after_sums[0].result.dims)
    return found


def _options_without_moves(
    operator: Operator,
    options: Sequence[ShardingOption],
    staying: Sequence[tuple[str, tuple[Dim, ...]]],
    layouts: Mapping[str, Layout],
    problem: ShardingProblem,
) -> list[ShardingOption]:
    """Return the options that use `staying` operands unchanged; none if they disagree or one has no layout yet."""
    axis_specs: dict[str, DimSpec] = {}
    used: dict[str, str] = {}
    for name, dims in staying:
        layout = layouts.get(name)
        if layout is None:
            return []
        for dim, spec in zip(dims, layout.dims, strict=True):
            parts = split_dim_spec(spec, dim, operator.sizes, problem.mesh)
            if parts is None:
                return []
            for axis, part in parts.items():
                if part and axis_specs.setdefault(axis, part) != part:
                    return []
                if any(used.setdefault(item, axis) != axis for item in part if isinstance(item, str)):
                    return []
    return [
        option
        for option in options
        if {a: spec for a, spec in option.axis_specs if a not in operator.output_only} == axis_specs
        and all(layouts[n].pending == wanted.pending for n, wanted in option.operands if n in dict(staying))
    ]


def follow_weights(
    problem: ShardingProblem, all_options: Sequence[Sequence[ShardingOption]]
) -> list[list[ShardingOption]]:
    """Return the options of each operator that follow the sharding of its weight; all options if none does.

    An operator whose operands are copies or sums over ranks is sharded like its result; sums are then scattered.
    """
    layouts = dict(problem.input_layouts)
    kept: list[list[ShardingOption]] = []
    silent: list[int] = []
    for number, (operator, options) in enumerate(zip(problem.operators, all_options, strict=True)):
        axis_specs = _specs_by_priority(operator, layouts, problem)
        silent += [] if axis_specs else [number]
        matching = [option for option in options if dict(option.axis_specs) == axis_specs] or list(options)
        kept.append(matching)
        layouts[operator.result.name] = problem.pins.get(operator.result.name, matching[0].result)
    _shard_as_results(problem, all_options, kept, silent)
    return kept


def _specs_by_priority(
    operator: Operator, layouts: Mapping[str, Layout], problem: ShardingProblem
) -> dict[str, DimSpec]:
    axis_specs: dict[str, DimSpec] = {}
    used: set[str] = set()
    for name, dims in _operands_by_priority(operator, layouts):
        layout = layouts.get(name)
        if layout is None:
            continue
        for dim, spec in zip(dims, layout.dims, strict=True):
            for axis, part in (split_dim_spec(spec, dim, operator.sizes, problem.mesh) or {}).items():
                names = {item for item in part if isinstance(item, str)}
                if names and not names & used and axis not in axis_specs and axis not in operator.roles.unsharded:
                    axis_specs[axis] = part
                    used |= names
    return axis_specs


def _operands_by_priority(
    operator: Operator, layouts: Mapping[str, Layout]
) -> list[tuple[str, tuple[tuple[str, ...], ...]]]:
    operands = list(operator.operands)
    if len(operands) > 1 and any(word in operator.text for word in _PRODUCTS):
        return [operands[1], operands[0], *operands[2:]]
    return sorted(operands, key=lambda o: -len(layouts[o[0]].axes()) if o[0] in layouts else 0)
