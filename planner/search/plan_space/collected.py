"""What a search keeps as it goes through its plans: those that fit, and the value of the last that will be listed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.search.tie_groups import step_of_last
from simulator.columns.plan_columns import PlanColumns, concatenate
from simulator.columns.plan_table import Floats

Rows = NDArray[np.intp]


class Threshold:
    """The value of the last plan to list so far; infinite until there are enough plans.

    One of each grid are `keep`, or, with the `groups` of grids, as few as decide of which `tied` tie groups plans are
    listed.
    """

    def __init__(self, keep: int, *, one_per_grid: bool, grids: int, groups: Rows | None = None, tied: int = 0) -> None:
        self._keep, self._one_per_grid = keep, one_per_grid
        self._groups, self._tied = groups, tied
        self._best = np.full(grids if one_per_grid else 0, np.inf)
        self.value = self._value()

    def add(self, grid: Rows, values: Floats) -> None:
        if self._one_per_grid:
            np.minimum.at(self._best, grid, values)
        else:
            self._best = np.sort(np.concatenate([self._best, values]))[: self._keep]
        self.value = self._value()

    def of(self, grid: Rows) -> Floats:
        """Return what plans may take to be listed: no more than the best of their own grid, where one of each is
        listed.
        """
        return np.minimum(self._best[grid], self.value) if self._one_per_grid else np.full(len(grid), self.value)

    @property
    def missing(self) -> int:
        """How many more plans there have to be, of other grids where one of each is listed, before it is finite."""
        return max((self._tied or self._keep) - int(np.isfinite(self._best).sum()), 1)

    def _value(self) -> float:
        of_groups = np.inf if self._groups is None else step_of_last(self._best, self._groups, self._tied)
        if len(self._best) < self._keep:
            return float(of_groups)
        return float(min(of_groups, np.partition(self._best, self._keep - 1)[self._keep - 1]))


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
