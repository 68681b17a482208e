"""What a search keeps as it goes through its plans: those that fit, and the value of the last that will be listed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.columns.plan_columns import PlanColumns, concatenate
from simulator.columns.plan_table import Floats

Rows = NDArray[np.intp]


class Threshold:
    """The value of the last plan to list so far; infinite until there are enough plans."""

    def __init__(self, keep: int, *, one_per_grid: bool, grids: int) -> None:
        self._keep, self._one_per_grid = keep, one_per_grid
        self._best = np.full(grids if one_per_grid else 0, np.inf)

    def add(self, grid: Rows, values: Floats) -> None:
        if self._one_per_grid:
            np.minimum.at(self._best, grid, values)
        else:
            self._best = np.sort(np.concatenate([self._best, values]))[: self._keep]

    def of(self, grid: Rows) -> Floats:
        """Return what plans may take to be listed: no more than the best of their own grid, where one of each is
        listed.
        """
        return np.minimum(self._best[grid], self.value) if self._one_per_grid else np.full(len(grid), self.value)

    @property
    def value(self) -> float:
        if len(self._best) < self._keep:
            return float("inf")
        return float(np.partition(self._best, self._keep - 1)[self._keep - 1])


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
