"""A chosen graph in program order: redistributions before the operators that need them, and after those that leave them."""

from __future__ import annotations

from dataclasses import dataclass, replace

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

    `needed_by` is the result whose operator needs it there, empty where the tensor itself is to lie there.
    """

    tensor: str
    needed_by: str = ""
    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    runs: tuple[Collective, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """An operator on local pieces; `runs` are collectives inside it."""

    operator: int
    option: Option
    runs: tuple[Collective, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The chosen layouts and the whole program in order."""

    choice: Choice
    program: tuple[Move | Compute, ...]

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(one for step in self.program for one in step.runs)


def answer(problem: Problem) -> Answer:
    """Return the best choice for `problem` as a program. Raises Infeasible where there is none."""
    choice, graph = choose(problem)
    program: list[Move | Compute] = []
    held: set[tuple[str, Layout]] = set()
    for number, (operator, option) in enumerate(zip(problem.operators, choice.options, strict=True)):
        schedule = problem.schedule.get(operator.result.name, Schedule())
        before = []
        for name, layout in option.operands:
            if layout != choice.layouts[name] and (name, layout) not in held:
                held.add((name, layout))
                moves = graph.to_operand(name, number)
                before.append(_move(name, moves, choice.layouts[name], layout, operator.result.name))
        program += _scheduled(before, schedule)
        program.append(Compute(operator=number, option=option, runs=option.inside))
        name = operator.result.name
        if option.result != choice.layouts[name]:
            kept = schedule if schedule.kind != "ring" else Schedule()
            program += _scheduled([_move(name, graph.moves[name], option.result, choice.layouts[name])], kept)
    return Answer(choice=choice, program=tuple(program))


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
