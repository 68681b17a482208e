"""What a rule is: a name, a grade, a predicate over columns, and a sentence with the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from planner.legality import Grade, Problem, Question
from simulator.plan import Plan
from simulator.plan_columns import PlanColumns

Mask = NDArray[np.bool_]


class Level(IntEnum):
    """The first stage of the enumeration at which all columns of a rule are known."""

    GRID = 0  # degrees, ZeRO stage, sequence parallelism
    BATCH = 1  # micro batch, virtual stages, schedule
    POLICY = 2  # recompute, resharding, overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`say` returns the message, and the field it is about with the nearest values that the rule accepts, if any."""

    name: str
    grade: Grade
    level: Level
    broken: Callable[[PlanColumns, Question], Mask]
    say: Callable[[Plan, Question], tuple[str, str, tuple[int, ...]]]
    applies: Callable[[Question], bool]

    def problem(self, plan: Plan, asked: Question) -> Problem:
        message, field, nearest = self.say(plan, asked)
        return Problem(rule=self.name, grade=self.grade, message=message, nearest=nearest, nearest_of=field)


def one_of(column: NDArray[np.str_], names: Iterable[str]) -> Mask:
    """Return where `column` is one of a few names; sorting words, as numpy's isin does, takes ten times as long."""
    found = np.zeros(len(column), dtype=np.bool_)
    for name in names:
        found |= column == name
    return found


def divisors(n: int) -> list[int]:
    """Return the divisors of `n` >= 1 in ascending order."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def around(values: list[int], value: int) -> tuple[int, ...]:
    """Return the largest of `values` below `value` and the smallest above it."""
    below = [v for v in values if v < value]
    above = [v for v in values if v > value]
    return tuple(([max(below)] if below else []) + ([min(above)] if above else []))


Say = Callable[[Plan, Question], tuple[str, str, tuple[int, ...]] | str]
Predicate = Callable[[PlanColumns, Question], Mask]


def rule(
    name: str,
    broken: Predicate,
    say: Say,
    *,
    grade: Grade = Grade.ILLEGAL,
    level: Level = Level.GRID,
    applies: Callable[[Question], bool] = lambda q: True,  # noqa: ARG005 - the signature is the interface
) -> Rule:
    def full(plan: Plan, asked: Question) -> tuple[str, str, tuple[int, ...]]:
        said = say(plan, asked)
        if isinstance(said, str):
            return said, "", ()
        text, field, values = said
        nearest = around([v for v in values if fills(field, v, asked)], int(getattr(plan, field)))
        hint = f"; nearest legal {field}: {' or '.join(map(str, nearest))}" if nearest else ""
        return text + hint, field, nearest

    return Rule(name=name, grade=grade, level=level, broken=broken, say=full, applies=applies)


def near(field: str, values: Sequence[int], text: str) -> tuple[str, str, tuple[int, ...]]:
    """Return what a rule says, with the values of a field that it would accept: the nearest of them are offered."""
    return text, field, tuple(values)


def fills(field: str, value: int, asked: Question) -> bool:
    """Return whether some plan with this degree fills the GPUs of the question: the other degrees may have to change."""
    return field not in {"tp", "cp", "pp"} or asked.gpus % value == 0
