"""Rows of a linear program, collected one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(slots=True)
class SparseRows:
    """Rows of a sparse matrix, and their right-hand sides."""

    rows: list[Integers] = field(default_factory=list)
    columns: list[Integers] = field(default_factory=list)
    values: list[Numbers] = field(default_factory=list)
    sides: list[float] = field(default_factory=list)

    def add(self, columns: Sequence[Integers], factors: Sequence[float | Numbers], side: float) -> None:
        """Add one row, given as groups of columns with their factors."""
        for group, factor in zip(columns, factors, strict=True):
            self.rows.append(np.full(len(group), len(self.sides), dtype=np.int64))
            self.columns.append(np.asarray(group, dtype=np.int64))
            self.values.append(np.broadcast_to(np.asarray(factor, dtype=np.float64), len(group)))
        self.sides.append(side)

    def add_flows(self, numbers: Integers, out: Sequence[Integers]) -> None:
        """Add a row for every row of `numbers`: its variables (-1: none) sum to those of the group in `out`."""
        rows, columns = np.nonzero(numbers >= 0)
        start = len(self.sides)
        sizes = [len(group) for group in out]
        self.rows += [rows + start, np.repeat(np.arange(start, start + len(out)), sizes)]
        self.columns += [numbers[rows, columns], np.concatenate([np.zeros(0, dtype=np.int64), *out])]
        self.values += [np.ones(len(rows)), -np.ones(sum(sizes))]
        self.sides += [0.0] * len(out)

    def add_pairs(self, first: Integers, second: Integers) -> None:
        """Add a row `first - second` = 0 for every pair of columns."""
        rows = np.arange(len(self.sides), len(self.sides) + len(first), dtype=np.int64)
        self.rows += [rows, rows]
        self.columns += [first, second]
        self.values += [np.ones(len(first)), -np.ones(len(first))]
        self.sides += [0.0] * len(first)

    def matrix(self, width: int) -> csr_matrix | None:
        if not self.sides:
            return None
        joined = (np.concatenate(self.values), (np.concatenate(self.rows), np.concatenate(self.columns)))
        return csr_matrix(joined, shape=(len(self.sides), width))
