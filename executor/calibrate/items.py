"""What a job measures: its items by kind of job, read from the request of `planner calibrate`."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorItem:
    """An operator on one GPU, as in `topology.profile.samples.OperatorSample`."""

    kind: str
    name: str
    shape: dict[str, int]
    dtype: str
    direction: str = "forward"
    runtime: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.direction} {self.shape} {self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveItem:
    """A collective among all ranks of the job, at sizes in bytes."""

    op: str
    sizes: tuple[int, ...]
    ranks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionItem:
    """A kernel (`matmul` or `copy`) and a collective of `nbytes` that run at the same time."""

    compute: str
    shape: dict[str, int]
    op: str
    nbytes: int
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapItem:
    """A tensor-parallel matmul with its collective, as in `topology.profile.samples.OverlapSample`."""

    operation: str
    ranks: int
    rows: int
    columns: tuple[int, ...]
    depth: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerItem:
    """Training steps of a model with so many layers, each of `counts` in turn, on `ranks` GPUs."""

    model: Model
    plan: Plan
    workload: Workload
    runtime: Runtime
    counts: tuple[int, ...] = (1, 2)
    ranks: int = 1

    def __str__(self) -> str:
        plan = {name: getattr(self.plan, name) for name in self.plan.__dataclass_fields__}
        degrees = {name: value for name, value in plan.items() if isinstance(value, int) and value > 1}
        return f"{self.runtime.name} {self.model.name} seq {self.workload.seq_len} {degrees}"
