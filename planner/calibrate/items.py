"""What the executor can be asked to measure, an item a kind; as JSON, items of its jobs (`executor.calibrate`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class PairItem:
    """A kernel of a `shape` while a collective of `nbytes` runs over all GPUs."""

    compute: str
    shape: Mapping[str, int]
    dtype: str
    op: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteItem:
    """A tensor-parallel product with its collective, in every overlap mode: `rows` by each of `columns`."""

    operation: str
    ranks: int
    rows: int
    columns: tuple[int, ...]
    depth: int
    dtype: str

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of its sample (`topology.profile.samples.OverlapSample`)."""
        return self.operation, self.ranks, self.rows, self.columns, self.depth, self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerItem:
    """Runs of so many layers (`counts`) of a model of one layer."""

    ranks: int
    model: Model
    plan: Plan
    workload: Workload
    runtime: Runtime
    counts: tuple[int, ...] = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveItem:
    """A collective of `ranks` at `sizes` in bytes, ascending."""

    op: str
    ranks: int
    sizes: tuple[int, ...]
