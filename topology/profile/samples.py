"""The samples that calibration measures: operators, host overheads, contention, overlap and layers.

A sample says what ran, its median time, the spread, and the clocks. Its `run` names a `Provenance` of the profile, so
that one profile can hold samples of several days and driver versions. A sample taken under a hardware or thermal
slowdown is stored with the reason in `invalid` and never used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from topology.codec import JsonObject, to_json

PHASES = ("decode", "prefill", "all_reduce", "host")
# Throttle reasons (`topology.readers.nvml.THROTTLE_BITS`) that make a sample invalid. A software power cap does not:
# sustained training reaches the power limit, too.
FAULTS = ("hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake")

OPERATOR_KINDS = ("matmul", "attention", "move")
DIRECTIONS = ("forward", "backward", "dgrad", "wgrad")
# Axes that a sample must have, by kind, and by name for moves whose cost depends on more than their bytes.
AXES: dict[str, tuple[str, ...]] = {
    "matmul": ("m", "n", "k"),
    "attention": ("b", "a", "s", "S", "d"),
    "copy": ("bytes",),
    **dict.fromkeys(("gather_pack", "gather_unpack", "reduce_pack", "adamw", "clip"), ("h", "q", "kv", "f", "ranks")),
}
REGIMES = ("sustained", "burst", "step")
OVERLAP_OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where and when samples were taken. `device` is `cuda`, or `cpu` for a dry run that describes no real machine."""

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

    `sm_clock_hz` is one reading of the driver. `mean_sm_clock_hz` is the mean over exactly the timed work, from the
    SMs' own counters; a driver reading can miss it, since clocks recover within milliseconds after the work.
    """

    sm_clock_hz: float | None = None
    mean_sm_clock_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Fields of every sample: repetitions behind the median, conditions, why it is invalid (if it is), and its run.

    `at_s` is when it was complete, in seconds from the beginning of its calibration; None where that was not noted.
    """

    count: int = 1
    conditions: Conditions = Conditions()
    invalid: str = ""
    run: str = ""
    at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSample(Sample):
    """One operator on one GPU. `shape` maps axes to sizes.

    `matmul` has axes m, n, k (and batch, if not 1) with the direction's memory layout; `attention` has b, a, kv, s, S,
    d (sequences, query heads, key/value heads, queries, keys, head width), causal; `move` has the axes that the runtime
    descriptions name (`simulator.columns.plan_table.axis_sizes`), or `bytes`. `seconds` is device time of one call,
    median over `count`; `spread` is (90th - 10th percentile) / median; `host_s` the host time to issue it. `runtime` is
    set where the kernels differ by framework. `regime` is `sustained` on a GPU kept busy, `burst` after a rest, `step`
    inside a training step, concurrent with its other work.
    """

    kind: str
    name: str
    shape: dict[str, int]
    dtype: str
    direction: str = "forward"
    seconds: float
    spread: float = 0.0
    host_s: float | None = None
    runtime: str = ""
    regime: str = "sustained"

    @property
    def times(self) -> dict[str, float]:
        """The times of the sample by name; each must be finite and positive."""
        return {"seconds": self.seconds}

    @property
    def key(self) -> tuple[Any, ...]:
        """Identity of what was measured: two samples with equal keys measured the same operator."""
        shape = tuple(sorted(self.shape.items()))
        return self.kind, self.name, shape, self.dtype, self.direction, self.runtime, self.regime


# Host samples of a layer's forward and backward pass on the CPU alone: without tensor parallelism, and divided on
# DTensors.
LAYER_PLAIN, LAYER_CUT = "layer", "layer on DTensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """Host seconds of one call of `name`: `eager` (a kernel launch), `autograd`, `dtensor`, `compiled`, `graph`, ..."""

    name: str
    seconds: float
    spread: float = 0.0
    count: int = 1
    run: str = ""
    at_s: float | None = None

    @property
    def times(self) -> dict[str, float]:
        return {"seconds": self.seconds}

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionSample(Sample):
    """A kernel and a collective: seconds of each alone, and of each (`_beside_s`) while the other runs throughout."""

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

    @property
    def times(self) -> dict[str, float]:
        names = ("compute_alone_s", "compute_beside_s", "collective_alone_s", "collective_beside_s")
        return {name: getattr(self, name) for name in names}

    @property
    def key(self) -> tuple[Any, ...]:
        return self.compute, tuple(sorted(self.shape.items())), self.dtype, self.op, self.ranks, self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSample(Sample):
    """A tensor-parallel matmul with its collective over `ranks` GPUs of one node, per overlap mode, and its parts
    alone.

    `rows` are the tokens of all ranks; `columns` the output widths on a rank, several where matmuls share an
    all-gather; `depth` the contracted width. `seconds` (of one call among several in a row, the slowest rank), `spread`
    and `host_s` (to issue one call) are by mode. The parts are for all matmuls together, 0 where not measured:
    `product_s` on all rows, `shard_product_s` on one rank's rows, `slice_product_s` on a slice of every shard in one
    batched matmul, `first_s` the first matmul; `collective_s`, and `slice_collective_s` on the bytes of a slice;
    `copy_s` one shard by a copy engine. `hop_s` is of earlier versions, and not read.
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

    @property
    def times(self) -> dict[str, float]:
        modes = {f"seconds.{mode}": seconds for mode, seconds in self.seconds.items()}
        return {"product_s": self.product_s, "collective_s": self.collective_s, **modes}

    @property
    def key(self) -> tuple[Any, ...]:
        return self.operation, self.ranks, self.rows, self.columns, self.depth, self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSample(Sample):
    """A training step of one or two layers of a real model under a real runtime.

    `model`, `plan`, `workload` and `runtime` are the fields of the simulator's types as plain data; the model's number
    of layers is 1 or 2, of narrow layers that show the host up to 8. `step_s` is the median step, `host_s` the host
    time to issue forward and backward where it was measured, `reserved_bytes` the allocator's peak, `data_s` the part
    of the step spent on data loading.
    """

    model: JsonObject
    plan: JsonObject
    workload: JsonObject
    runtime: JsonObject
    step_s: float
    spread: float = 0.0
    host_s: float | None = None
    data_s: float | None = None
    reserved_bytes: float | None = None

    @property
    def times(self) -> dict[str, float]:
        return {"step_s": self.step_s}

    @property
    def layers(self) -> int:
        return int(self.model.get("layers", 0))

    @property
    def key(self) -> tuple[Any, ...]:
        parts = (self.model, self.plan, self.workload, self.runtime)
        return tuple(tuple(sorted((k, str(v)) for k, v in part.items())) for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSample(Sample):
    """Seconds of a serving engine, in its slowest rank.

    `decode` is a step that generates one token for each of `batch` answers, with `context` tokens cached each,
    `prefill` one that reads `batch` prompts of `context` tokens. `seconds` is with the host waiting for each step,
    `queued_s` with the host ahead of the device, `issued_s` the host's time to issue a step. `all_reduce` is one sum
    over the ranks of `batch` tokens' hidden vectors with the residual and the norm that follow, replayed from a graph.
    `host` is the time for which the device waits for the host between two steps under load, with `batch` answers in
    progress on average. Fields that a phase does not have are 0. `model` has the fields of the simulator's type as
    plain data; `all_reduce` names the kernel, `own` or `nccl`.
    """

    engine: str
    phase: str
    model: JsonObject
    tp: int = 1
    batch: float = 1.0
    context: int = 0
    all_reduce: str = ""
    seconds: float
    queued_s: float = 0.0
    issued_s: float = 0.0

    @property
    def times(self) -> dict[str, float]:
        return {"seconds": self.seconds}

    @property
    def key(self) -> tuple[Any, ...]:
        return self.engine, self.phase, to_json(self.model), self.tp, self.batch, self.context, self.all_reduce
