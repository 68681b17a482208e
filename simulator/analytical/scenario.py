"""What a plan is for: the model, the machine, the workload and the runtime, with what was measured of them.

The analytical model, the search's screening, the lowering and the simulation all take a `Scenario` and plans. The
planner's `Question` adds a framework's rules to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.calibration.calibration import Calibration
from simulator.config.model import Model
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a cost depends on besides the plan. Without a `calibration` figures rest on datasheets."""

    model: Model
    cluster: Cluster
    workload: Workload
    runtime: Runtime
    calibration: Calibration | None = None

    @property
    def gpu_calibration(self) -> Calibration | None:
        """The calibration where it says more than what collectives take."""
        known = self.calibration
        return known if known is not None and known.gpu_measured else None

    @property
    def host_calibration(self) -> Calibration | None:
        """The calibration where it says what the host takes, as one of the CPU alone does as well."""
        known = self.calibration
        return known if known is not None and (known.gpu_measured or known.runtimes) else None
