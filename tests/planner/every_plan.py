"""Every leaf of the search tree, one by one: what the search must not differ from, and what rules are counted on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.candidates import Bounds, enumerate_nodes, plan_of
from planner.infeasible import Constrained
from simulator.plan_columns import PlanColumns
from simulator.screening import Screening
from topology.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Legal plans as columns, with the account of the rest."""

    columns: PlanColumns
    cluster: Cluster
    rejected: dict[str, int]
    pruned: dict[str, int]

    @property
    def total(self) -> int:
        return len(self) + sum(self.rejected.values()) + sum(self.pruned.values())

    def __len__(self) -> int:
        return len(self.columns)

    def plans(self, start=0, stop=None):
        """Return the plans of rows `start` to `stop`, placed."""
        rows = range(start, len(self) if stop is None else min(stop, len(self)))
        return [plan_of(self.columns, row, self.cluster) for row in rows]


def enumerate_candidates(model, cluster, workload, framework, *, gpus=None, runtime=None, bounds=None):
    """Return all legal plans that use exactly `gpus` GPUs (default: the whole cluster)."""
    nodes = enumerate_nodes(model, cluster, workload, framework, gpus=gpus, runtime=runtime, bounds=bounds)
    leaves, of_node = nodes.leaves(np.arange(len(nodes)))
    columns, _ = nodes.variants(leaves, of_node)
    return Candidates(columns=columns, cluster=cluster, rejected=nodes.rejected, pruned=nodes.pruned)


def leanest_gap(model, cluster, workload, framework, runtime, gpus, *, bounds=None):
    """Return the bytes missing to the plan that needs least memory on `gpus` GPUs; negative when it fits."""
    screening = Screening(model=model, cluster=cluster, workload=workload, runtime=runtime)
    return Constrained(screening=screening, framework=framework, bounds=bounds or Bounds(), gpus=gpus).gap()
