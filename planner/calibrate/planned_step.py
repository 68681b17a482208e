"""A training step whose operators are to be measured: a plan, and what it was made for."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """What one training step runs; on `cluster`, or without one on as many GPUs as it needs of the machine at hand."""

    model: Model
    plan: Plan
    workload: Workload
    runtime: Runtime
    cluster: Cluster | None = None
