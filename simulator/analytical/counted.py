"""A plan that was estimated among others, for what goes on from there."""

from __future__ import annotations

from typing import NamedTuple

from simulator.analytical.estimates import EstimateTable
from simulator.config.estimate import Estimate
from simulator.config.plan import Plan


class Counted(NamedTuple):
    """A plan by its row of a table of estimates."""

    table: EstimateTable
    row: int

    @property
    def plan(self) -> Plan:
        return self.table.plans[self.row]

    @property
    def step_s(self) -> float:
        return float(self.table.step_s[self.row])

    @property
    def estimate(self) -> Estimate:
        return self.table.estimate(self.row)


def counted_rows(table: EstimateTable) -> list[Counted]:
    """Return every plan of a table."""
    return [Counted(table, row) for row in range(len(table.plans))]
