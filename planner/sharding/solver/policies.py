"""Policies: which sharding options of an operator remain, given the layouts of its operands.

The fewest bytes are not always what the user means. With small activations it may be cheapest to gather the batch and
compute every gradient on every rank, which nobody who sharded the batch wants. There are four policies:

    (none)          if the operands of an operator agree, it runs without redistributing them, and pending reductions are
                    performed after it; only where they disagree does the cost decide which operand is redistributed
    follow_weights  an operator takes the sharding of its weight, as in nvFuser's propagation; activations move
    min_ring_bytes  the cost decides everything: ring bytes
    min_time        the cost decides everything: time on a machine

Operands agree if all that are sharded along an axis have the same spec for it, and no mesh axis is used for two axes; a
replicated operand agrees with any, as slicing is free. A `set` marks where a tensor is redistributed, as in nvFuser's
IR; unless its result is pinned, it adapts to the other operands of its consumers. nvFuser visits the operators in order
and lets a result inherit the mesh axes of its operands by priority: for products the weight before the activation (it
is usually larger, so it should stay), otherwise the operand sharded over most mesh axes (NVIDIA/Fuser,
csrc/preseg_passes/propagate_shardings.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.sharding.layouts.layout import DimSpec, Layout
from planner.sharding.operators.operator import Operator
from planner.sharding.operators.options import ShardingOption, split_dim_spec
from planner.sharding.ops.annotation import Dim
from planner.sharding.problem.problem import ShardingProblem

_PRODUCTS = ("linear(", "matmul(", "grouped_mm(", "@", "mm(", "einsum(")


def keep_agreeing_operands(
    problem: ShardingProblem, all_options: Sequence[Sequence[ShardingOption]]
) -> list[list[ShardingOption]]:
    """Return the options of each operator that keep agreeing operands in place; all of them where operands disagree."""
    layouts: dict[str, Layout] = dict(problem.input_layouts)
    moved = {o.result.name for o in problem.operators if o.text.startswith("set(")} - set(problem.pins)
    kept = []
    for operator, options in zip(problem.operators, all_options, strict=True):
        staying = [(n, dims) for n, dims in operator.operands if n not in moved] or list(operator.operands)
        matching = _options_without_moves(operator, options, staying, layouts, problem)
        kept.append(matching or list(options))
        if operator.result.name in problem.pins:
            layouts[operator.result.name] = problem.pins[operator.result.name]
        elif matching:
            layouts[operator.result.name] = matching[0].result
    return kept


def _options_without_moves(
    operator: Operator,
    options: Sequence[ShardingOption],
    staying: Sequence[tuple[str, tuple[Dim, ...]]],
    layouts: Mapping[str, Layout],
    problem: ShardingProblem,
) -> list[ShardingOption]:
    """Return the options that use `staying` operands as they are; none if they disagree or one has no layout yet."""
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
    """Return the options of each operator that follow the sharding of its weight; all of them where none does."""
    layouts = dict(problem.input_layouts)
    kept = []
    for operator, options in zip(problem.operators, all_options, strict=True):
        axis_specs = _specs_by_priority(operator, layouts, problem)
        matching = [option for option in options if dict(option.axis_specs) == axis_specs] or list(options)
        kept.append(matching)
        layouts[operator.result.name] = problem.pins.get(operator.result.name, matching[0].result)
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
