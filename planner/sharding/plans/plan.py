"""The solver's answer: the sharded graph in program order, operators and the redistributions before and after them.

Back ends need nothing but a `ShardingPlan`:

    plan.choice.layouts   by tensor of the graph: its layout, one spec a dim and what is pending
      (`layouts.layout.Layout`)
    plan.choice.options   by operator of the graph: the layouts it needs its operands in, and the one it produces
    plan.steps            in order: a `TensorMove` (a tensor from one layout to another, as primitives and as the
                          collectives that run) or an `OperatorStep` (an operator on local shards)

`layouts.layout.placements_of` writes a layout as placements, one a mesh axis.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from planner.sharding.layouts.collectives import Collective
from planner.sharding.layouts.layout import Layout
from planner.sharding.layouts.redistribution import RedistributionStep, Redistributor
from planner.sharding.operators.options import ShardingOption
from planner.sharding.problem.problem import ShardingProblem
from planner.sharding.problem.schedule import Schedule, apply_schedule
from planner.sharding.solver.choose import Choice, choose


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMove:
    """The redistribution of a tensor; `collectives` are those of `steps` with the schedule applied.

    `consumer` is the result whose operator needs the tensor in `target`, or empty if `target` is the tensor's own
    layout. A tensor that is sent to another pipeline stage or whose rows are routed to experts keeps its layout.
    """

    tensor: str
    consumer: str = ""
    source: Layout
    target: Layout
    steps: tuple[RedistributionStep, ...]
    collectives: tuple[Collective, ...]
    stage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorStep:
    """An operator on local shards, and the collectives inside it."""

    operator: int
    option: ShardingOption
    collectives: tuple[Collective, ...]
    stage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """The chosen options and layouts, and all steps in order."""

    choice: Choice
    steps: tuple[TensorMove | OperatorStep, ...]

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(one for step in self.steps for one in step.collectives)

    @property
    def ring_send_bytes(self) -> Fraction:
        """Bytes sent by the rank that sends most, over all stages and ranks."""
        worst: dict[int, Fraction] = {}
        for stage in {step.stage for step in self.steps}:
            every = [one for step in self.steps if step.stage == stage for one in step.collectives]
            even = sum((one.ring_send_bytes for one in every if not one.rows), Fraction(0))
            uneven = [[sent * one.row_bytes for _, _, sent in one.rows] for one in every if one.rows]
            worst[stage] = even + max((sum(sent) for sent in zip(*uneven, strict=False)), default=0)
        return max(worst.values(), default=Fraction(0))


def plan_sharding(problem: ShardingProblem) -> ShardingPlan:
    """Choose options and layouts for `problem` and order the steps. Raises Infeasible if there is none."""
    choice, candidates = choose(problem)
    steps: list[TensorMove | OperatorStep] = []
    available: set[tuple[str, Layout, int]] = set()
    stage_of: dict[str, int] = {}
    for number, (operator, option) in enumerate(zip(problem.operators, choice.options, strict=True)):
        if number == problem.graph.backward_start and choice.kept is not None:
            available = {each for each in available if each[:2] in choice.kept}
        result, stage = (
            operator.result.name,
            problem.stages.operator_stages[number] if problem.stages is not None else 0,
        )
        schedule = problem.schedule.get(result, Schedule())
        operand_moves = []
        for name, needed in option.operands:
            current = choice.layouts[name]
            if (
                problem.stages is not None
                and stage_of.get(name, stage) != stage
                and (name, current, stage) not in available
            ):
                available.add((name, current, stage))
                sent = problem.stages.send_collectives(problem.tensors[name], current, problem.mesh)
                steps.append(_move_without_relayout(name, current, sent, result, stage_of[name]))
            if needed != current and (name, needed, stage) not in available:
                available.add((name, needed, stage))
                move = _redistribute(name, candidates.redistributor_for(name, number), current, needed, result)
                operand_moves.append(replace(move, stage=stage))
        steps += apply_to_moves(operand_moves, schedule)
        routing = problem.routed.get(result)
        if routing is not None:
            name, needed = option.operands[0]
            dispatch = routing.dispatch_collectives(problem.tensors[name], needed, problem.mesh)
            steps.append(_move_without_relayout(name, needed, dispatch, result, stage))
        steps.append(OperatorStep(operator=number, option=option, collectives=option.collectives, stage=stage))
        if routing is not None:
            combine = routing.combine_collective(operator.result, option.result, problem.mesh)
            steps.append(_move_without_relayout(result, option.result, (combine,), "", stage))
        stage_of[result] = stage
        if option.result != choice.layouts[result]:
            result_schedule = schedule if schedule.kind != "ring" else Schedule()
            move = _redistribute(result, candidates.redistributor_for(result), option.result, choice.layouts[result])
            steps += apply_to_moves([replace(move, stage=stage)], result_schedule)
    return ShardingPlan(choice=choice, steps=tuple(steps))


def _move_without_relayout(
    name: str, layout: Layout, collectives: tuple[Collective, ...], consumer: str, stage: int
) -> TensorMove:
    """Return a move between ranks that keeps the layout."""
    return TensorMove(
        tensor=name, consumer=consumer, source=layout, target=layout, steps=(), collectives=collectives, stage=stage
    )


def _redistribute(name: str, moves: Redistributor, source: Layout, target: Layout, consumer: str = "") -> TensorMove:
    steps = moves.path(source, target)
    collectives = tuple(replace(one, tensor=name) for step in steps for one in step.collectives)
    return TensorMove(
        tensor=name, consumer=consumer, source=source, target=target, steps=steps, collectives=collectives
    )


def apply_to_moves(moves: list[TensorMove], schedule: Schedule) -> list[TensorMove]:
    """Return the moves with `schedule` applied to their collectives, all of which run with the last move; unchanged
    where it says nothing of them.
    """
    if not moves or schedule.kind in {"whole", "stay"}:
        return moves
    collectives = apply_schedule([one for move in moves for one in move.collectives], schedule)
    return [*(replace(move, collectives=()) for move in moves[:-1]), replace(moves[-1], collectives=collectives)]
