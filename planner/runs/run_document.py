"""Types and ranges of everything that is read from a run's report, `run.json`.

A report is written by the executor and read much later, by other versions and from other machines. It stays plain data,
since it is kept and shown unchanged, but only checked reports are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.verify import ESTIMATE_RANGES, verify_model, verify_plan, verify_runtime, verify_workload
from simulator.config.workload import Workload
from topology import codec
from topology.catalog.verify import require_possible
from topology.cluster import Cluster
from topology.codec import JsonObject
from topology.errors import BadInput, PlannerError
from topology.profile.samples import OperatorSample
from topology.ranges import Range, out_of_range

SCHEMA_VERSION = 1
RANGES: dict[str, Range] = {**ESTIMATE_RANGES, "exit_code": (0, 255), "rank": (0, 1 << 20)}
Numbers = tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interval:
    value: float | None = None
    low: float | None = None
    high: float | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _PredictedMemory:
    peak_bytes: _Interval | None = None
    reserved_bytes: float | None = None
    by_category: dict[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Predicted:
    step_s: _Interval | None = None
    memory: _PredictedMemory | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    median: float | None = None
    spread: float | None = None
    all: Numbers = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Denominator:
    peak_flops: float | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClockChange:
    step: float
    before_hz: float
    after_hz: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    cores: float
    others: float
    stolen: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    steps: int | None = None
    steps_asked: int | None = None
    step_s: _Steps | None = None
    device_step_s: float | None = None
    sm_clock_hz: float | None = None
    sm_clock_change: _ClockChange | None = None
    host: _Host | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    mfu_denominator: _Denominator | None = None
    losses: Numbers | None = None
    gradient_norms: Numbers | None = None
    memory_by_rank: tuple[dict[str, float | None], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effect:
    what: str
    requested: Any
    effective: Any
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu:
    throttle: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    rank: int | None = None
    signal: str | None = None
    message: str | None = None
    suspects: tuple[str, ...] | None = None
    gpus: tuple[str, ...] | None = None
    memory: dict[str, JsonObject] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    status: str
    taken_at: str
    plan: JsonObject
    model: JsonObject
    workload: JsonObject
    runtime: JsonObject
    measured: _Measured
    id: str | None = None
    complete: bool | None = None
    exit_code: int | None = None
    device: str | None = None
    cluster: JsonObject | None = None
    predicted: _Predicted | None = None
    failure: _Failure | None = None
    versions: dict[str, str] | None = None
    effects: tuple[_Effect, ...] | None = None
    gpus: tuple[_Gpu, ...] | None = None
    missing: tuple[str, ...] | None = None
    survivors: tuple[int, ...] | None = None
    slow_ranks: tuple[str, ...] | None = None
    operator_samples: tuple[OperatorSample, ...] | None = None


def verify_run(document: Any, *, where: str) -> JsonObject:
    """Return `document` if it is a valid report of a run. Raises UserError with the field that is wrong."""
    if not isinstance(document, dict) or not {"status", "plan", "model", "measured", "taken_at"} <= set(document):
        raise BadInput(f"{where} is not the report of a run", remedy="planner apply makes one; planner runs lists them")
    codec.require_schema(document, SCHEMA_VERSION, where=where)
    report = codec.convert(document, _Report, where=where, others=True)
    if problem := next(out_of_range(document, RANGES), None):
        raise BadInput(f"{where}: {problem}", remedy="the report was altered: use the run's own run.json")
    verify_plan(codec.convert(report.plan, Plan, where=f"{where}: plan"), where=where)
    verify_model(codec.convert(report.model, Model, where=f"{where}: model"), where=where)
    verify_workload(codec.convert(report.workload, Workload, where=f"{where}: workload"), where=where)
    verify_runtime(codec.convert(report.runtime, Runtime, where=f"{where}: runtime"), where=where)
    if report.cluster is not None:
        require_possible(codec.convert(report.cluster, Cluster, where=f"{where}: cluster"), where=where)
    return document


def read_report(folder: str | Path) -> JsonObject | None:
    """Return the report in a run's directory; None without a readable one."""
    path = Path(folder) / "run.json"
    if not path.is_file():
        return None
    try:
        return verify_run(codec.read_json(path), where=str(path))
    except PlannerError:
        return None
