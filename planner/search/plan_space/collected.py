"""What a search keeps as it goes through its plans: those that fit, and the value of the last that will be listed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_columns import PlanColumns, concatenate, distinct
from simulator.columns.plan_table import Floats

Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTies:
    """A list of `count` plans in which one stands for those of its tie group that are slower by no more than `tie`: one
    that is slower by no more than `margin`, both relative (`planner.search.tie_groups`).
    """

    count: int
    tie: float
    margin: float

    def last_step(self, steps: Floats, groups: Rows) -> float:
        """Return up to which step plans decide what the list has; infinite where there are too few.

        `steps` are those of the best plans of every grid, infinite where there is none, and `groups` the tie groups of
        these. Further plans do not raise it: there are as many ties of a group as it takes intervals of a tie's width
        to hold its plans.
        """
        kept: list[tuple[float, int]] = []
        for grid in np.argsort(steps, kind="stable"):
            step, group = float(steps[grid]), int(groups[grid])
            if not np.isfinite(step):
                break
            if not any(group == other and step <= best * (1 + self.tie) for best, other in kept):
                kept.append((step, group))
            if len(kept) == self.count:
                return step * (1 + self.margin)
        return float("inf")


def tie_groups(columns: PlanColumns) -> Rows:
    """Return a number for each plan, equal for those that split data parallelism differently and nothing else."""
    return distinct(columns.dp_replicate * columns.dp_shard, columns.cp, columns.tp, columns.pp, columns.ep)[1]


class Threshold:
    """The value of the last plan to list so far; infinite until there are enough plans.

    One of each grid are `keep`, or, with the `groups` of grids, as few as decide which of their ties are `listed`.
    """

    def __init__(
        self,
        keep: int,
        *,
        one_per_grid: bool,
        grids: int,
        listed: ListedTies | None = None,
        groups: Rows | None = None,
    ) -> None:
        self._keep, self._one_per_grid = keep, one_per_grid
        self._listed, self._groups = listed, groups
        self._best = np.full(grids if one_per_grid else 0, np.inf)
        self.value = self._value(self._best)

    def add(self, grid: Rows, values: Floats) -> None:
        self._best = self._best_with(grid, values)
        self.value = self._value(self._best)

    def value_with(self, grid: Rows, values: Floats) -> float:
        """Return what the value would be with some more plans."""
        return self._value(self._best_with(grid, values))

    def _best_with(self, grid: Rows, values: Floats) -> Floats:
        if not self._one_per_grid:
            return np.sort(np.concatenate([self._best, values]))[: self._keep]
        best = self._best.copy()
        np.minimum.at(best, grid, values)
        return best

    def of(self, grid: Rows) -> Floats:
        """Return what plans may take to be listed: no more than the best of their own grid, where one of each is
        listed.
        """
        return np.minimum(self._best[grid], self.value) if self._one_per_grid else np.full(len(grid), self.value)

    @property
    def missing(self) -> int:
        """How many more plans there have to be, of other grids where one of each is listed, before it is finite."""
        return max((self._listed.count if self._listed else self._keep) - int(np.isfinite(self._best).sum()), 1)

    def _value(self, best: Floats) -> float:
        of_ties = np.inf
        if self._listed is not None and self._groups is not None:
            of_ties = self._listed.last_step(best, self._groups)
        if len(best) < self._keep:
            return float(of_ties)
        return float(min(of_ties, np.partition(best, self._keep - 1)[self._keep - 1]))


class Collected:
    """Plans collected batch by batch, with their nodes and bytes; in the order of the nodes once concatenated."""

    def __init__(self) -> None:
        self._columns: list[PlanColumns] = []
        self._nodes: list[Rows] = []
        self._values: list[Floats] = []

    def __len__(self) -> int:
        return len(self._columns)

    def add(self, columns: PlanColumns, nodes: Rows, values: Floats) -> None:
        self._columns.append(columns)
        self._nodes.append(nodes)
        self._values.append(values)

    def concatenated(self) -> tuple[PlanColumns, Rows, Floats]:
        nodes = np.concatenate(self._nodes)
        order = np.argsort(nodes, kind="stable")
        return concatenate(self._columns).take(order), nodes[order], np.concatenate(self._values)[order]
