"""A plan as text, one line per tensor, in the notation of nvFuser's figures: domains with the axes that devices
share.
"""

from __future__ import annotations

from planner.sharding.layouts.layout import Layout
from planner.sharding.layouts.loop_domain import loop_text
from planner.sharding.plans.plan import ShardingPlan, TensorMove
from planner.sharding.problem.problem import ShardingProblem


def program_text(problem: ShardingProblem, plan: ShardingPlan) -> str:
    """Return the program: `y = linear(a, w): [t, h, r{d}]`, then `all_reduce over d: y [t, h]`."""

    def domain(name: str, layout: Layout) -> str:
        tensor = problem.tensors[name]
        return loop_text(layout, tensor.shape, problem.mesh, tensor.axes)

    lines: list[str] = []
    shown: set[str] = set()
    for step in plan.steps:
        needed = [step.tensor] if isinstance(step, TensorMove) else [name for name, _ in step.option.operands]
        for name in needed:
            if name in problem.inputs and name not in shown:
                shown.add(name)
                lines.append(f"{name}: {domain(name, plan.choice.layouts[name])}")
        if isinstance(step, TensorMove):
            joined = not step.collectives and any(one.collectives for one in step.steps)
            kinds = [one.kind for one in step.collectives] or ["in the next buffer" if joined else "local slice"]
            for kind in dict.fromkeys(kinds):
                times = f"{kinds.count(kind)} x " if kinds.count(kind) > 1 else ""
                over = f" over {step.collectives[0].mesh_dim}" if step.collectives else ""
                lines.append(f"    {times}{kind}{over}: {step.tensor} {domain(step.tensor, step.target)}")
            continue
        operator = problem.operators[step.operator]
        name = operator.result.name
        lines += [f"    {one.kind} over {one.mesh_dim}, {one.note}" for one in step.collectives]
        lines.append(f"{name} = {operator.text}: {domain(name, step.option.result)}")
    return "\n".join(lines)
