"""The request for a run: one JSON file, written by `planner apply` and read by every rank."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology.codec import JsonObject

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`gpus` are device numbers as CUDA counts them, rank by rank. `peak_flops` is MFU's denominator, per GPU.

    `start_timeout_s` and `collective_timeout_s` bound how long a rank waits for another one. `own_table` runs our own
    schedule table even if torch has the schedule. `predicted`, `fingerprints`, `cluster` (that of the prediction) and
    `notes` (how the run differs from what was planned) are copied into the report. `trainer` selects the training step:
    `own`, or `torchtitan`, whose numbers are not checked.
    """

    schema_version: int = SCHEMA_VERSION
    plan: Plan
    model: Model
    workload: Workload
    runtime: Runtime
    device: str = "cuda"
    gpus: tuple[int, ...] = ()
    steps: int = 10
    warm_up: int = 3
    seed: int = 0
    own_table: bool = False
    trainer: str = "own"
    profile: bool = True  # run one more step under the profiler, after the timed steps
    peak_flops: float | None = None
    peak_flops_source: str = ""
    start_timeout_s: float = 60.0
    collective_timeout_s: float = 60.0
    predicted: JsonObject | None = None
    fingerprints: dict[str, str] | None = None
    cluster: JsonObject | None = None
    notes: tuple[str, ...] = ()
