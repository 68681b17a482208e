"""Plans with a calibration each take what they take under that calibration by themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.calibrate.terms import effects, terms_of
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.calibration.calibration import Calibration, RuntimeCosts
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from tests.planner.conftest import LLAMA8B, MIXTRAL, make_cluster

CLUSTER = make_cluster(nodes=2)
COSTS = (
    RuntimeCosts(),
    RuntimeCosts(kernel_factor=1.3, collective_factor=1.4),
    RuntimeCosts(network_factor=2.0, crossing_s=1e-4, layer_factor=1.2),
    RuntimeCosts(host={"launch_s": 1e-4, "fsdp_layer_s": 3e-3, "tp_layer_s": 2e-3, "pp_pass_s": 5e-3, "rest_s": 0.1}),
)
PLANS = (
    Plan(dp_shard=16, recompute="full"),
    Plan(dp_shard=8, tp=2, sequence_parallel=True, recompute="selective"),
    Plan(dp_shard=4, pp=4, schedule="1F1B"),
    Plan(pp=2, dp_shard=8, virtual_stages=2, schedule="Interleaved1F1B"),
)


def scenario(model, *, compiled):
    return Scenario(
        model=model,
        cluster=CLUSTER,
        workload=Workload(seq_len=1024, global_batch_size=64),
        runtime=Runtime(name="torchtitan", compile=compiled),
        calibration=Calibration(gpu=CLUSTER.slowest_kind),
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("model", [LLAMA8B, MIXTRAL], ids=lambda model: model.name)
def test_a_plan_under_its_own_calibration_takes_what_it_takes_alone(model, compiled):
    asked = scenario(model, compiled=compiled)
    known = [replace(asked.calibration, runtimes={("torchtitan", compiled): costs}) for costs in COSTS]

    together = estimate_plans(asked, [*PLANS] * len(known), each_with=[one for one in known for _ in PLANS])
    alone = [estimate_plans(replace(asked, calibration=one), [plan]).step_s[0] for one in known for plan in PLANS]

    assert together.step_s == pytest.approx(np.array(alone), rel=1e-12)
    assert len(set(alone)) > len(PLANS)


def test_effects_are_those_of_every_change_by_itself():
    asked = scenario(LLAMA8B, compiled=False)
    terms = terms_of(PLANS, [asked.runtime], ["all_gather", "reduce_scatter", "send_recv"])

    found, table = effects(asked, PLANS, terms)

    for place, term in enumerate(terms):
        if term.change is not None:
            changed = estimate_plans(replace(asked, calibration=term.change(asked)), PLANS)
            expected = np.log(changed.step_s / table.step_s[: len(PLANS)])
            assert found[:, place] == pytest.approx(expected, abs=1e-12), term.name
