"""The account of a step on better machines and of more micro batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from simulator.analytical import account
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from tests.planner.conftest import make_cluster
from topology.catalog.clusters import cluster
from topology.cluster import Cluster

DEGREES = (
    {"dp_shard": 16},
    {"dp_replicate": 2, "dp_shard": 8},
    {"dp_replicate": 4, "dp_shard": 4, "reshard_after_forward": False},
    {"dp_replicate": 16},
    {"tp": 2, "dp_shard": 8},
    {"cp": 4, "dp_shard": 4},
    {"pp": 2, "dp_shard": 8, "schedule": "1F1B"},
    {"pp": 4, "dp_shard": 4, "schedule": "Interleaved1F1B", "virtual_stages": 2},
    {"pp": 2, "dp_shard": 8, "schedule": "ZBVZeroBubble", "virtual_stages": 2},
    {"pp": 4, "tp": 2, "dp_shard": 2, "schedule": "LoopedBFS", "virtual_stages": 2},
    {"pp": 8, "tp": 2, "schedule": "1F1B"},  # the head takes longer than the layer before it
    {"tp": 16},
)
PLANS = [
    Plan(**degrees, micro_batch_size=size, recompute=recompute, sequence_parallel=degrees.get("tp", 1) > 1)
    for degrees in DEGREES
    for size, recompute in ((1, "full"), (2, "none"))
]


def steps(machines: Sequence[Cluster]) -> np.ndarray:
    """Return the steps of PLANS on machines that differ in the rates of links, shape (machines, plans)."""
    asked = Scenario(
        model=replace(load_model("llama3-8b"), layers=8),
        cluster=machines[0],
        workload=Workload(seq_len=2048, global_batch_size=64),
        runtime=Runtime(name="torchtitan"),
    )
    each_on = [machine for machine in machines for _ in PLANS]
    table = estimate_plans(asked, PLANS * len(machines), each_on=each_on)
    # NCCL's buffers are larger on faster networks, which may make a full allocator retry.
    return np.reshape(table.step_s - table.breakdown_s["allocator"], (len(machines), len(PLANS)))


@pytest.mark.parametrize(
    ("what", "rates"),
    [
        ("network", (3e9, 6e9, 12e9, 25e9, 50e9, 100e9, 400e9)),
        ("nvlink_rate", (100e9, 200e9, 450e9, 900e9, 3600e9)),
        ("power_w", (350.0, 600.0, 700.0, 1400.0)),
    ],
)
def test_a_better_machine_slows_no_plan(what, rates) -> None:
    """Also where waits that it shortens leave power to products."""
    machines = [make_cluster(2, 8, **{what: rate}) for rate in rates]
    # All at once, but for GPUs that differ.
    together = [machines] if what != "power_w" else [[machine] for machine in machines]
    reported = np.concatenate([steps(some) for some in together])

    slower = np.nonzero((reported[1:] > reported[:-1] * (1 + 1e-9)).any(axis=0))[0]
    assert [PLANS[row] for row in slower] == []
    assert (reported[-1] < reported[0]).mean() > 0.8


def test_each_further_micro_batch_takes_as_long() -> None:
    """Without a pipeline: the host runs ahead until the queue is full, and then as fast as the device."""
    plan = Plan(cp=4, micro_batch_size=2, reshard_after_forward=False)
    batches = (4, 8, 32, 1024)
    asked = Scenario(
        model=load_model("llama3-8b"),
        cluster=cluster("dgx-a100", 4),
        workload=Workload(seq_len=8192, global_batch_size=batches[0]),
        runtime=Runtime(name="torchtitan", logs_each_step=True),  # else the device hides some of what is loaded
    )
    by_batch = []
    for batch in batches:
        workload = replace(asked.workload, global_batch_size=batch)
        by_batch.append(float(estimate_plans(replace(asked, workload=workload), [plan]).step_s[0]))

    further = np.diff(by_batch) / np.diff(batches)
    np.testing.assert_allclose(further, further[0], rtol=1e-3)


@pytest.mark.parametrize("seq_len", [1024, 1920, 2048])
def test_a_host_that_catches_up_late_holds_up_the_rest_of_a_pipeline(seq_len, monkeypatch) -> None:
    """A first pass that gathers parameters puts the host ahead; slower than the device, it loses a little of that with
    every micro batch, until the device waits for it. Rounds that repeat each other take what all of them take.
    """
    degrees = {"dp_shard": 2, "tp": 4, "pp": 2, "ep": 4, "schedule": "1F1B"}
    plan = Plan(**degrees, micro_batch_size=1, sequence_parallel=True, recompute="none", reshard_after_forward=False)
    asked = Scenario(
        model=load_model("qwen3-30b-a3b"),
        cluster=cluster("l40s-x8", 16),
        workload=Workload(seq_len=seq_len, global_batch_size=32),
        runtime=Runtime(name="pytorch"),
    )
    extrapolated = float(estimate_plans(asked, [plan]).step_s[0])
    monkeypatch.setattr(account, "walked", lambda _name, _ranks, micro_batches, _stages: micro_batches)
    whole = float(estimate_plans(asked, [plan]).step_s[0])

    assert extrapolated == pytest.approx(whole, rel=1e-6)
