"""At which clocks products run in a step: what a power limit leaves them."""

import numpy as np
import pytest

from simulator.analytical.clocks import POWER_WINDOW_S, working_clocks
from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.kernels.operators import WorkKind
from simulator.lowering.training import plan_context
from simulator.step.host import step_host_s
from topology.catalog.clusters import cluster

PARTS = ("compute", "recompute", "copies", "contention", "optimizer", "exposed_communication", "host", "bubble")


def test_of_a_long_pause_only_the_end_is_credited():
    """Loading two sequences takes longer than the power limiter averages over; what the host waits besides is in short
    gaps.
    """
    scenario = Scenario(
        model=load_model("llama3-8b"),
        cluster=cluster("dgx-h200"),
        workload=Workload(task="train", seq_len=65536, global_batch_size=2),
        runtime=Runtime(name="torchtitan", logs_each_step=True),
    )
    context = plan_context(scenario, Plan())
    loading = float(step_host_s(context.spec.host, context)[0])
    shares = {WorkKind.MATMUL: np.array([0.9]), WorkKind.ATTENTION: np.array([0.0])}

    def clocks(**seconds: float) -> float:
        parts = {part: np.array([seconds.get(part, 0.0)]) for part in PARTS}
        return float(working_clocks(parts, shares, context)[0])

    assert loading > 10 * POWER_WINDOW_S
    assert clocks(compute=1.0, host=loading) == pytest.approx(clocks(compute=1.0, bubble=POWER_WINDOW_S))
    assert clocks(compute=1.0, host=loading + 0.3) < clocks(compute=1.0, host=loading) < clocks(compute=1.0)
