"""Symmetric memory of overlap modes against hand arithmetic; tests/executor/test_overlap_streams.py has the
executor's.
"""

import pytest

from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.memory.replay import MemoryReplay
from simulator.runtimes.stated import resolve
from simulator.step.symmetric_memory import buffer_bytes
from topology.catalog.clusters import cluster

MIB = 2**20


def held(plan: Plan, *, model: str = "llama3-8b", rank: int = 0, seq_len: int = 8192) -> float:
    workload = Workload(seq_len=seq_len, global_batch_size=2 * plan.dp_replicate * plan.dp_shard)
    machine = cluster("h200x4", gpus=max(4, plan.gpus)) if plan.gpus <= 4 else cluster("dgx-h100", gpus=plan.gpus)
    runtime = resolve({"name": "meshwright"})[0]
    table = estimate_plans(
        Scenario(model=load_model(model), cluster=machine, workload=workload, runtime=runtime), [plan]
    )
    return float(table.memory.categories["symmetric_buffers"][0, rank])


def test_a_buffer_holds_two_sets_in_whole_pages_and_a_page_of_flags() -> None:
    assert buffer_bytes(64 * MIB) == (128 + 2) * MIB
    assert buffer_bytes(1) == (2 + 2) * MIB


def test_a_pushing_plan_holds_the_tokens_four_times() -> None:
    """8,192 tokens x 4,096 x 2 bytes are 64 MiB: two sets for gathers, two for scatters, and two pages of flags."""
    whole = (4 * 64 + 2 * 2) * MIB

    assert held(Plan(tp=4, sequence_parallel=True, tp_overlap="fused")) == whole
    assert held(Plan(tp=2, dp_shard=2, sequence_parallel=True, tp_overlap="copy_engine")) == whole
    assert held(Plan(tp=4, sequence_parallel=True, tp_overlap="mlp_out=fused")) == whole  # backward gathers
    assert held(Plan(tp=4, sequence_parallel=True, tp_overlap="fused", micro_batch_size=2)) == whole + 4 * 64 * MIB
    assert held(Plan(tp=2, cp=2, sequence_parallel=True, tp_overlap="fused")) == whole - 2 * 64 * MIB


@pytest.mark.parametrize("mode", ["none", "chunked", "async"])
def test_other_modes_hold_none(mode: str) -> None:
    assert held(Plan(tp=4, sequence_parallel=True, tp_overlap=mode)) == 0


def test_sites_that_no_layer_has_hold_none() -> None:
    sparse = {"model": "mixtral-8x7b"}

    assert held(Plan(tp=4, sequence_parallel=True, tp_overlap="mlp_in=fused"), **sparse) == 0
    assert held(Plan(tp=4, sequence_parallel=True, tp_overlap="attention_in=fused"), **sparse) > 0


@pytest.mark.parametrize("mode", ["none", "fused"])
def test_the_formula_and_the_replay_hold_the_same(mode: str) -> None:
    plan = Plan(tp=2, pp=2, sequence_parallel=True, tp_overlap=mode)
    workload, machine = Workload(seq_len=4096, global_batch_size=4), cluster("h200x4")
    model, runtime = load_model("llama3-8b"), resolve({"name": "meshwright"})[0]
    scenario = Scenario(model=model, cluster=machine, workload=workload, runtime=runtime)
    formula, replay = estimate_plans(scenario, [plan]), MemoryReplay(scenario, plan)

    expected = 0 if mode == "none" else (4 * 32 + 2 * 2) * MIB
    assert [float(x) for x in formula.memory.categories["symmetric_buffers"][0, :2]] == [expected] * 2
    for rank in range(2):  # in segments of 20 MiB
        assert 0 <= replay.rank(rank).by_stream.get("peers", 0) - expected < 20 * MIB
