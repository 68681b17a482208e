"""At which clocks products run in a step: what a power limit leaves them."""

from unittest.mock import patch

import numpy as np
import pytest

from simulator.analytical import clocks
from simulator.analytical.scenario import Scenario
from simulator.bounds.screening import Screening
from simulator.columns.plan_columns import plan_columns
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.kernels.efficiency import efficiency
from topology.catalog.clusters import cluster

TENSORS = {"tp": 4, "sequence_parallel": True, "micro_batch_size": 8}  # longer on the device than on the host
PLANS = [Plan(), Plan(recompute="full"), Plan(**TENSORS), Plan(dp_shard=4), Plan(dp_replicate=4)]


def inputs_of(plan, *, seq_len=4096):
    scenario = Scenario(
        model=load_model("llama3-8b"),
        cluster=cluster("dgx-h200"),
        workload=Workload(seq_len=seq_len, global_batch_size=8),
        runtime=Runtime(name="torchtitan", compile=True),
    )
    screening, columns = Screening(scenario), plan_columns([plan])
    return screening.plans(columns, screening.blocks(columns, ("none", "full")), np.arange(1))


@pytest.mark.parametrize("plan", PLANS)
def test_the_work_of_a_step_draws_the_power_limit(plan) -> None:
    """Energy over time, with what the account of the step says of the update and of collectives that stand alone.
    Kernels that run again are like the others.
    """
    with patch.object(clocks, "CLOCK_SPREAD", 0.0):
        found = inputs_of(plan)
        account, m = found.account, 8 / plan.data_parallel / plan.micro_batch_size
        blocks = found.inputs.blocks

    def seconds(quantity: str) -> float:
        layers = {"dense": 32, "embedding": 1, "head": 1}
        return m * sum(
            count * float(np.ravel(getattr(cost, quantity))[0])
            for name, count in layers.items()
            for cost in (blocks[name].forward, blocks[name].backward)
        )

    kernels, products, attention = (seconds(name) for name in ("compute_s", "products_s", "attention_s"))
    faster = 1.0 - (1.0 - account.clocks[0]) * kernels / products
    exponent = efficiency("hopper").power_exponent
    work = [  # (seconds, share of the limit)
        (faster * products, faster ** (-1 / exponent)),
        (attention, clocks.ATTENDING),
        (kernels - products - attention + float(account.parts_s["optimizer"][0]), clocks.MOVING),
        (float(account.parts_s["tp"][0]), clocks.SENDING),
        (float(min(found.context.spec.host.step_s + found.context.spec.host.cut_step_s, 0.02)), clocks.IDLE),
    ]

    assert clocks.fastest(found.context) < faster < 1.0
    assert sum(time * share for time, share in work) == pytest.approx(sum(time for time, _ in work), rel=2e-3)


def test_of_a_long_pause_only_the_end_is_credited() -> None:
    def after(pause_s: float) -> float:
        with patch.object(clocks, "step_host_s", lambda *_: np.array([pause_s])):
            return float(inputs_of(Plan()).inputs.clocks[0])

    assert after(1.0) == after(clocks.POWER_WINDOW_S) < after(0.0)


def test_ranks_wait_for_the_slowest_gpu() -> None:
    """The largest of several normal values, drawn."""
    drawn = np.random.default_rng(0).normal(1.0, clocks.CLOCK_SPREAD, (20_000, 8)).max(axis=1).mean()
    with patch.object(clocks, "CLOCK_SPREAD", 0.0):
        alike = inputs_of(Plan(dp_replicate=8), seq_len=16384).inputs
        as_one = alike.clocks
    products, kernels = (
        sum(getattr(cost, name)[0] for cost in (alike.blocks["dense"].forward, alike.blocks["dense"].backward))
        for name in ("products_s", "compute_s")
    )
    slower = (inputs_of(Plan(dp_replicate=8), seq_len=16384).inputs.clocks - as_one)[0]

    assert slower == pytest.approx(products / kernels * (drawn - 1.0), rel=0.25)
