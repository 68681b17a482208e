"""A training step whose operators are to be measured: a plan with its question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from simulator.analytical.scenario import Scenario
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A training step on `cluster`, or without one on as many GPUs of the present machine as it needs."""

    model: Model
    plan: Plan
    workload: Workload
    runtime: Runtime
    cluster: Cluster | None = None

    @classmethod
    def of(cls, asked: Scenario, plan: Plan) -> Self:
        """Return the step of a plan on the cluster that is asked about."""
        return cls(model=asked.model, plan=plan, workload=asked.workload, runtime=asked.runtime, cluster=asked.cluster)
