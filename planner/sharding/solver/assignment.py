"""What a solver answers: an option of every operator and a layout of every tensor; or that there is none."""

from __future__ import annotations

from dataclasses import dataclass

from planner.sharding.layouts.layout import Layout
from planner.sharding.problem.problem import MemoryLimit
from topology.errors import Infeasible
from topology.units import GIB


@dataclass(frozen=True, slots=True)
class Assignment:
    """The option of every class of operators, by its number, and the layout of every class of tensors.

    Without a limit of memory, all copies are kept.
    """

    options: tuple[int, ...]
    layouts: tuple[Layout, ...]
    kept: frozenset[tuple[int, Layout]] = frozenset()  # copies of tensors that stay until the backward pass


@dataclass(frozen=True, slots=True)
class Found:
    """A solution: its cost, and whether no other costs less."""

    assignment: Assignment
    cost: float
    proved: bool


def unsatisfiable(memory: MemoryLimit | None = None) -> Infeasible:
    if memory is not None:
        return Infeasible(
            f"no choice of layouts fits {memory.limit_bytes / GIB:.3g} GiB of memory",
            why="parameters with their state, and what the backward pass saves, are larger however they are sharded",
            remedy="a larger limit, more ranks, or fewer tokens",
        )
    return Infeasible(
        "no choice of layouts satisfies what is pinned",
        why="some pinned layout cannot be made, such as a pending sum that nothing leaves pending",
        remedy="leave out a pin",
    )
