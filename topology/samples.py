"""What calibration measures: samples of operators, host overheads, contention and layers, each with its provenance.

A sample says what ran, how long it took in the median, how much that spread, and under which clocks. Its `run` names a
`Provenance` of the profile that holds it, so that samples of several days and machines can lie side by side. What ran
under a hardware or thermal slowdown is kept with `invalid`, and never used: it says nothing of the machine in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Throttle reasons (executor.gpu_state.REASONS) under which a time means nothing. A software power cap is no fault:
# it is what a GPU runs into when it works hard for long, and training does.
FAULTS = ("hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake")

OPERATOR_KINDS = ("matmul", "attention", "move")
DIRECTIONS = ("forward", "backward", "dgrad", "wgrad")
REGIMES = ("sustained", "burst", "step")
OVERLAP_OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where and when a run of samples was taken. `device` is `cuda`, or `cpu` for a stand-in that means no machine."""

    machine: str
    gpu: str  # catalogue name, or "cpu"
    device: str = "cuda"
    gpus: int = 1
    driver: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    taken_at: str = ""  # ISO 8601, UTC
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Clocks while a sample was taken; None where the driver does not say. `throttle` are reasons seen meanwhile.

    `sm_clock_hz` is what the driver read at some moment. `mean_sm_clock_hz` is the mean over the timed work and nothing
    else, by the processors' own counters: when the work is over clocks are up again within milliseconds.
    """

    sm_clock_hz: float | None = None
    mean_sm_clock_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: tuple[str, ...] = ()

    @property
    def faulty(self) -> bool:
        return any(reason in FAULTS for reason in self.throttle)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSample:
    """One operator on one GPU. `shape` maps axes to sizes.

    `matmul` has axes m, n, k (and batch, if not 1) with the direction's memory layout; `attention` has b, a, kv, s, S, d
    (sequences, query heads, key/value heads, queries, keys, head width), causal; `move` has the axes that the runtime
    descriptions name (`simulator.plan_table.axis_sizes`), or `bytes`. `seconds` is device time of one call, median over
    `count`; `spread` is (90th - 10th percentile) / median; `host_s` what issuing it cost. `runtime` is set where the
    kernels differ by framework. `regime` is `sustained` on a GPU kept busy, `burst` after a rest, `step` inside a
    training step, beside whatever else runs there.
    """

    kind: str
    name: str
    shape: dict[str, int]
    dtype: str
    direction: str = "forward"
    seconds: float
    spread: float = 0.0
    count: int = 1
    host_s: float | None = None
    runtime: str = ""
    regime: str = "sustained"
    conditions: Conditions = Conditions()
    invalid: str = ""
    run: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What the sample is of: two samples with one key measured the same thing."""
        shape = tuple(sorted(self.shape.items()))
        return self.kind, self.name, shape, self.dtype, self.direction, self.runtime, self.regime


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """Host seconds of one call of `name`: `eager` (a kernel launch), `autograd`, `dtensor`, `compiled`, `graph`, ..."""

    name: str
    seconds: float
    spread: float = 0.0
    count: int = 1
    run: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionSample:
    """Compute beside a collective: seconds of each alone and with the other running all the time."""

    compute: str  # matmul or copy
    shape: dict[str, int]
    dtype: str
    op: str
    ranks: int
    nbytes: int
    compute_alone_s: float
    compute_beside_s: float
    collective_alone_s: float
    collective_beside_s: float
    spread: float = 0.0
    count: int = 1
    conditions: Conditions = Conditions()
    invalid: str = ""
    run: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.compute, tuple(sorted(self.shape.items())), self.dtype, self.op, self.ranks, self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSample:
    """A tensor-parallel product with its collective over `ranks` GPUs of one node, by overlap mode, and its parts alone.

    `rows` are tokens of all ranks together; `columns` the widths of the products on a rank, several where they share a
    gather; `depth` the width that they contract. `seconds`, `spread` and `host_s` are by mode: one call of several in a
    row, the largest over ranks, and what issuing one cost the host. Parts are of all products together, 0 where they
    were not measured: all rows, a shard of them, a slice of every shard in one batched product; the first product; the
    collective, and on the bytes of a slice; one shard by a copy engine and by NCCL's send and receive.
    """

    operation: str
    ranks: int
    rows: int
    columns: tuple[int, ...]
    depth: int
    dtype: str
    seconds: dict[str, float]
    spread: dict[str, float] = field(default_factory=dict)
    host_s: dict[str, float] = field(default_factory=dict)
    product_s: float
    shard_product_s: float = 0.0
    slice_product_s: float = 0.0
    first_s: float = 0.0
    collective_s: float
    slice_collective_s: float = 0.0
    copy_s: float = 0.0
    hop_s: float = 0.0
    count: int = 1
    conditions: Conditions = Conditions()
    invalid: str = ""
    run: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.operation, self.ranks, self.rows, self.columns, self.depth, self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSample:
    """A training step of one or two layers of a real model under a real runtime.

    `model`, `plan`, `workload` and `runtime` are the fields of the simulator's types as plain data; the model's number
    of layers is 1 or 2. `step_s` is the median step, `host_s` what issuing forward and backward cost the host where
    that was seen apart, `reserved_bytes` the most the allocator held, `data_s` the part of the step spent on loading.
    """

    model: dict[str, Any]
    plan: dict[str, Any]
    workload: dict[str, Any]
    runtime: dict[str, Any]
    step_s: float
    spread: float = 0.0
    count: int = 1
    host_s: float | None = None
    data_s: float | None = None
    reserved_bytes: float | None = None
    conditions: Conditions = Conditions()
    invalid: str = ""
    run: str = ""

    @property
    def layers(self) -> int:
        return int(self.model.get("layers", 0))

    @property
    def key(self) -> tuple[Any, ...]:
        parts = (self.model, self.plan, self.workload, self.runtime)
        return tuple(tuple(sorted((k, str(v)) for k, v in part.items())) for part in parts)
