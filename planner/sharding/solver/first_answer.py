"""A first answer, operator by operator: the cheapest option given what is placed already.

It is good enough to be returned when time runs out, and its cost tells the solver which variables cannot be better.
"""

from __future__ import annotations

import numpy as np

from planner.sharding.layouts.layout import Layout
from planner.sharding.solver.assignment import Assignment
from planner.sharding.solver.solvable_program import SolvableProgram


def first_answer(program: SolvableProgram) -> Assignment | None:
    """Return an assignment, or None where going through once finds none (or none that memory allows)."""
    homes: dict[int, Layout] = {each: found[0] for each, found in enumerate(program.layout_lists) if len(found) == 1}
    alike, problem = program.candidates.alike, program.problem
    options: list[int] = [-1] * len(program.members)
    gradient_of = {
        alike.tensors[gradient]: alike.tensors[name]
        for name, gradient in problem.graph.gradients.items()
        if name in problem.graph.parameters
    }
    for each in sorted(range(len(program.members)), key=lambda e: program.members[e][0]):
        found = program.candidates.options[each]
        total = program.option_costs[each].astype(float)
        operands = program.operands(each)
        for position, tensor in enumerate(operands):
            needs, numbers = program.needs_of(each, position)
            possible = [homes[tensor]] if tensor in homes else program.layout_lists[tensor]
            costs = program.move_costs(tensor, possible, needs, program.members[each][0])[0].min(axis=0)
            for cost, at in zip(costs, numbers, strict=True):
                total[at] += cost * len(program.members[each])
        results = {alike.tensors[problem.operators[n].result.name] for n in program.members[each]}
        for result in results:
            made, numbers = program.results_of(each)
            wanted = _home_of_result(program, result, homes, gradient_of)
            costs = program.move_costs(result, made, wanted)[0].min(axis=1)
            for cost, at in zip(costs, numbers, strict=True):
                total[at] += cost * len(program.tensor_members[result])
        options[each] = int(np.argmin(total))
        if not np.isfinite(total[options[each]]):
            return None
        chosen = found[options[each]]
        for position, tensor in enumerate(operands):
            if tensor not in homes:
                need, possible = chosen.operands[position][1], program.layout_lists[tensor]
                costs = program.move_costs(tensor, possible, [need])[0][:, 0]
                homes[tensor] = possible[int(np.argmin(costs))]
        for result in results:
            possible = _home_of_result(program, result, homes, gradient_of)
            costs = program.move_costs(result, [chosen.result], possible)[0][0]
            homes[result] = possible[int(np.argmin(costs))]
    layouts = tuple(homes.get(each, found[0]) for each, found in enumerate(program.layout_lists))
    held = sum(
        program.held_bytes(names[0], layout) * len(names)
        for names, layout in zip(program.tensor_members, layouts, strict=True)
    )
    if problem.memory is not None and held > problem.memory.limit_bytes:
        return None
    return Assignment(options=tuple(options), layouts=layouts)


def _home_of_result(
    program: SolvableProgram, result: int, homes: dict[int, Layout], gradient_of: dict[int, int]
) -> list[Layout]:
    if result in homes:
        return [homes[result]]
    parameter = gradient_of.get(result)
    if parameter is not None and parameter in homes:
        return [homes[parameter]]
    return program.layout_lists[result]
