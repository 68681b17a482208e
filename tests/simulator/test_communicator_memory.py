"""What NCCL's communicators take: buffers as its own log shows them, by what a group is used for, on a full GPU
that ran.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.analytical.estimates import calibrated_operators, cost_context
from simulator.analytical.memory import CONTEXT_BYTES
from simulator.analytical.scenario import Scenario
from simulator.collectives.buffers import CONNECTION_BYTES, MIB, PAGE, communicator_bytes
from simulator.columns.plan_table import plan_table
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology.catalog.clusters import cluster

GIB = 2.0**30
FRESH = Path(__file__).parents[2] / "examples" / "validation" / "fresh.jsonl"


def held(plan: Plan, machine: str = "dgx-h200", *, cp_method: str = "all_gather") -> float:
    scenario = Scenario(
        model=load_model("mixtral-8x7b" if plan.ep > 1 else "llama3-8b"),
        cluster=cluster(machine, max(plan.gpus, 8)),
        workload=Workload(seq_len=4096, global_batch_size=64),
        runtime=Runtime(),
    )
    table = plan_table([plan], scenario.workload, cp_method=cp_method)
    return float(communicator_bytes(cost_context(scenario, table, calibrated_operators(scenario)).groups)[0])


def test_a_connection_has_the_two_buffers_that_nccls_log_of_allocations_names() -> None:
    """github.com/NVIDIA/nccl/issues/1685: allocations of 10,485,760 and of 2,097,152 bytes."""
    assert (CONNECTION_BYTES - PAGE, PAGE) == (10_485_760, 2_097_152)


def test_an_all_to_all_among_eight_takes_about_what_was_seen() -> None:
    """The same log: 1.06 GB before the first all-to-all among eight H100, 4.34 after it."""
    plan = Plan(dp_shard=8, ep=8)

    assert held(plan, "dgx-h100") - held(Plan(dp_shard=8), "dgx-h100") == pytest.approx(3.28e9, rel=0.2)


def test_one_process_holds_nothing_and_more_uses_hold_more() -> None:
    assert held(Plan()) == 0
    assert 0.2 * GIB < held(Plan(dp_shard=2)) < held(Plan(dp_shard=2, cp=2)) < held(Plan(dp_shard=2, cp=2, pp=2))
    assert held(Plan(cp=4), cp_method="ring") > held(Plan(cp=4)), "peers have more channels than a ring"
    across = held(Plan(pp=16), "dgx-h100") - held(Plan(dp_shard=16), "dgx-h100")
    assert across < 100 * MIB, "stages on two nodes share the network's few channels"


def test_a_run_that_filled_its_gpus_had_what_context_and_communicators_leave() -> None:
    runs = map(json.loads, FRESH.read_text("utf-8").splitlines())
    full = next(run for run in runs if run["id"] == "2026-11-23.1/14")
    left = cluster("h200x4", 4).gpu_memory_bytes - CONTEXT_BYTES - held(Plan(cp=2))

    assert full["measured"]["retries"] > 0
    assert full["measured"]["reserved_bytes"] == pytest.approx(left, rel=0.005)
