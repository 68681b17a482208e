"""What a calibration can measure, one type per kind. The planner requests items (`planner.calibrate`); as JSON they are
the items of the executor's jobs (`executor.calibrate`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorItem:
    """A kernel to be measured alone; fields as in `topology.profile.samples.OperatorSample`."""

    kind: str
    name: str
    shape: dict[str, int]
    dtype: str
    direction: str = "forward"
    runtime: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.direction} {dict(self.shape)} {self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveItem:
    """A collective of `ranks` at `sizes` in bytes, ascending."""

    op: str
    ranks: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionItem:
    """A kernel (`matmul` or `copy`) of a `shape` while a collective of `nbytes` runs over all GPUs."""

    compute: str
    shape: dict[str, int]
    dtype: str
    op: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapItem:
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
    """Training steps of a model with each number of layers in `counts`, on `ranks` GPUs."""

    ranks: int
    model: Model
    plan: Plan
    workload: Workload
    runtime: Runtime
    counts: tuple[int, ...] = (1, 2)

    def __str__(self) -> str:
        plan = {name: getattr(self.plan, name) for name in self.plan.__dataclass_fields__}
        degrees = {name: value for name, value in plan.items() if isinstance(value, int) and value > 1}
        return f"{self.runtime.name} {self.model.name} seq {self.workload.seq_len} {degrees}"
