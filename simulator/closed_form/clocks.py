"""At which clocks a GPU works that is idle at moments: its power limiter averages over them."""

from __future__ import annotations

import numpy as np

from simulator.columns.plan_table import Floats
from simulator.kernels.roofline import efficiency
from simulator.step.context import CostContext


def working_clocks(breakdown: dict[str, Floats], context: CostContext) -> Floats:
    """Return what arithmetic takes at the clocks that a step's idle moments leave to its busy ones, over what it takes
    on a GPU that is never idle; one without a calibration, whose efficiencies are of whole steps.
    """
    calibration, gpu = context.calibration, context.roofline.gpu
    if calibration is None:
        return np.ones(len(context.table))
    busy = sum((breakdown[name] for name in BUSY), np.zeros(len(context.table)))
    # A limiter averages over a moment, so of a long pause only the end of it is credited to what follows. Links and
    # memory at work draw power too: communication is no pause.
    idle = breakdown["host"] + np.minimum(breakdown["bubble"], POWER_WINDOW_S)
    return calibration.clocks(busy / np.maximum(busy + idle, 1e-12), efficiency(gpu.architecture).power_exponent)


# Over how long a GPU's power limiter averages. Source: assumed.
POWER_WINDOW_S = 0.1

# Parts of a step in which kernels run.
BUSY = ("compute", "recompute", "copies", "contention", "optimizer", "exposed_communication")
