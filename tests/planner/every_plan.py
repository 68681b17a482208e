"""Every leaf of the search tree, one by one: what the search must not differ from, and what rules are counted on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from planner.search.infeasible import ConstrainedQuestion
from planner.search.plan_space.candidates import Bounds, enumerate_nodes, plan_of
from simulator.columns.plan_columns import PlanColumns
from topology.cluster import Cluster

UNBOUNDED = Bounds(
    max_tp=1 << 20,
    max_micro_batch=None,
    max_virtual_stages=None,
    min_tokens_per_context_rank=1,
    without_sequence_parallel=True,
    odd_virtual_stages=True,
)


def grids(gpus: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (tp, cp, pp, dp_replicate, dp_shard) of every mesh of exactly so many GPUs."""
    numbers = [n for n in range(1, gpus + 1) if gpus % n == 0]
    yield from (grid for grid in itertools.product(numbers, repeat=5) if prod(grid) == gpus)


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


def enumerate_candidates(question, *, bounds=None):
    """Return all legal plans that use exactly the GPUs of the question."""
    nodes = enumerate_nodes(question, bounds=bounds)
    leaves, of_node = nodes.leaves(np.arange(len(nodes)))
    columns, _ = nodes.variants(leaves, of_node)
    return Candidates(columns=columns, cluster=question.cluster, rejected=nodes.rejected, pruned=nodes.pruned)


def leanest_gap(question, *, bounds=None):
    """Return the bytes missing to the plan that needs least memory; negative when it fits."""
    return ConstrainedQuestion(question=question, bounds=bounds or Bounds()).gap()
