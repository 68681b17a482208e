"""A chosen graph in program order: redistributions before the operators that need them, and after those that leave them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from planner.sharding.choose import Choice, choose
from planner.sharding.collectives import Collective
from planner.sharding.layout import Layout
from planner.sharding.problem import Problem
from planner.sharding.redistribute import Redistributor, Step
from planner.sharding.rule import Option
from planner.sharding.schedule import Schedule, carried_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A tensor brought from one layout to another, step by step; `runs` are the collectives as scheduled.

    `needed_by` is the result whose operator needs it there, empty where the tensor itself is to lie there. A tensor that
    is sent to another stage, or whose rows are routed, keeps its layout.
    """

    tensor: str
    needed_by: str = ""
    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    runs: tuple[Collective, ...]
    stage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """An operator on local pieces; `runs` are collectives inside it."""

    operator: int
    option: Option
    runs: tuple[Collective, ...]
    stage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The chosen layouts and the whole program in order."""

    choice: Choice
    program: tuple[Move | Compute, ...]

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(one for step in self.program for one in step.runs)

    @property
    def ring_send_bytes(self) -> Fraction:
        """Bytes that a rank of the busiest stage sends; where ranks of a group differ, the busiest of them."""
        worst: dict[int, Fraction] = {}
        for stage in {step.stage for step in self.program}:
            every = [one for step in self.program if step.stage == stage for one in step.runs]
            even = sum((one.ring_send_bytes for one in every if not one.rows), Fraction(0))
            uneven = [[sent * one.row_bytes for _, _, sent in one.rows] for one in every if one.rows]
            worst[stage] = even + max((sum(sent) for sent in zip(*uneven, strict=False)), default=0)
        return max(worst.values(), default=Fraction(0))


def answer(problem: Problem) -> Answer:
    """Return the best choice for `problem` as a program. Raises Infeasible where there is none."""
    choice, graph = choose(problem)
    program: list[Move | Compute] = []
    held: set[tuple[str, Layout, int]] = set()
    made: dict[str, int] = {}
    for number, (operator, option) in enumerate(zip(problem.operators, choice.options, strict=True)):
        result, stage = operator.result.name, problem.stages.of[number] if problem.stages is not None else 0
        schedule = problem.schedule.get(result, Schedule())
        before = []
        for name, layout in option.operands:
            lies = choice.layouts[name]
            if problem.stages is not None and made.get(name, stage) != stage and (name, lies, stage) not in held:
                held.add((name, lies, stage))
                sent = problem.stages.sent(problem.tensors[name], lies, problem.mesh)
                program.append(_kept(name, lies, sent, result, made[name]))
            if layout != lies and (name, layout, stage) not in held:
                held.add((name, layout, stage))
                move = _move(name, graph.to_operand(name, number), lies, layout, result)
                before.append(replace(move, stage=stage))
        program += _scheduled(before, schedule)
        routing = problem.routed.get(result)
        if routing is not None:
            name, layout = option.operands[0]
            dispatch = routing.dispatched(problem.tensors[name], layout, problem.mesh)
            program.append(_kept(name, layout, dispatch, result, stage))
        program.append(Compute(operator=number, option=option, runs=option.inside, stage=stage))
        if routing is not None:
            back = routing.combined(operator.result, option.result, problem.mesh)
            program.append(_kept(result, option.result, (back,), "", stage))
        made[result] = stage
        if option.result != choice.layouts[result]:
            kept = schedule if schedule.kind != "ring" else Schedule()
            move = _move(result, graph.moves[result], option.result, choice.layouts[result])
            program += _scheduled([replace(move, stage=stage)], kept)
    return Answer(choice=choice, program=tuple(program))


def _kept(name: str, layout: Layout, runs: tuple[Collective, ...], needed_by: str, stage: int) -> Move:
    """Return a move between ranks that leaves the layout as it is."""
    return Move(tensor=name, needed_by=needed_by, source=layout, target=layout, steps=(), runs=runs, stage=stage)


def _move(name: str, moves: Redistributor, source: Layout, target: Layout, needed_by: str = "") -> Move:
    steps = moves.path(source, target)
    runs = tuple(replace(one, tensor=name) for step in steps for one in step.collectives)
    return Move(tensor=name, needed_by=needed_by, source=source, target=target, steps=steps, runs=runs)


def _scheduled(before: list[Move], schedule: Schedule) -> list[Move]:
    """Return the moves with their collectives as `schedule` says; what is packed together runs with the last of them."""
    if not before or schedule.kind == "whole":
        return before
    runs = carried_out([one for move in before for one in move.runs], schedule)
    return [*(replace(move, runs=()) for move in before[:-1]), replace(before[-1], runs=runs)]
