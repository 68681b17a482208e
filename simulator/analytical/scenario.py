"""What a plan is costed for: model, cluster, workload and runtime, with their measurements.

The analytical model, the search's screening, the lowering and the simulation all take a `Scenario` and plans. The
planner's `Question` adds a framework's rules to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.calibration.calibration import Calibration
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology.cluster import Cluster
from topology.errors import BadPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a cost depends on besides the plan. Without a `calibration`, costs come from datasheets."""

    model: Model
    cluster: Cluster
    workload: Workload
    runtime: Runtime
    calibration: Calibration | None = None

    @property
    def gpu_calibration(self) -> Calibration | None:
        """The calibration, if it has more than collectives."""
        known = self.calibration
        return known if known is not None and known.gpu_measured else None

    @property
    def host_calibration(self) -> Calibration | None:
        """The calibration, if it has host costs; one measured on a CPU alone has them too."""
        known = self.calibration
        return known if known is not None and (known.gpu_measured or known.runtimes) else None


def require_gpus(plans: Sequence[Plan], cluster: Cluster) -> None:
    """Raise BadPlan where a plan needs more GPUs than `cluster` has."""
    most = max(plans, key=lambda plan: plan.gpus, default=None)
    if most is not None and most.gpus > cluster.gpu_count:
        raise BadPlan(
            f"a plan needs {most.gpus} GPUs and {cluster.name} has {cluster.gpu_count}",
            why="its groups would span GPUs that are not there, so their communication has no time",
            remedy="lower its degrees, or predict it on a cluster of that size (--nodes, --gpus)",
        )
