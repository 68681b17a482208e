"""A host that reads something off the device waits for it; what it launches next comes that much later."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator.analytical.clock_advance import NEVER, ClockAdvance, launching
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.columns.plan_table import plan_table
from simulator.config.hf_config import load_model
from simulator.config.model import MixtureOfExperts, Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.lowering.block_code import Detail
from simulator.lowering.simulation import simulate_plan
from simulator.lowering.training import plan_context
from simulator.runtimes.library import runtime_spec, wraps_one
from simulator.runtimes.model_operators import operators_for
from simulator.runtimes.stated import resolve
from simulator.step.host import compiled, layer_host_s, loading_host_s, tiles_host_s
from topology.catalog.cluster_file import load_cluster

EXPERTS = MixtureOfExperts(experts=8, experts_per_token=2, ffn=1024)
MODEL = Model(
    name="experts",
    family="qwen3_moe",
    layers=6,
    hidden=2048,
    heads=16,
    kv_heads=4,
    head_dim=128,
    ffn=4096,
    vocab=32000,
    moe=EXPERTS,
)


def run(launches: list[tuple[float, float] | None], device_s: float, host_s: float) -> tuple[float, float]:
    """Return when device and host are done with (host, device) seconds of launches; None: the host waits."""
    for launch in launches:
        if launch is None:
            host_s = device_s = max(host_s, device_s)
        else:
            host_s += launch[0]
            device_s = max(device_s, host_s - launch[0]) + launch[1]
    return device_s, host_s


def advance_of(launches: list[tuple[float, float] | None]) -> ClockAdvance:
    """Return the same as a matrix, put together launch by launch."""
    zero = np.zeros(1)
    total = ClockAdvance(device_s=zero, late_s=zero + NEVER, host_s=zero, waits_s=zero + NEVER)
    for launch in launches:
        if launch is None:
            total = total.waited()
        else:
            host_s, device_s = launch
            total = total.then(launching(zero + device_s, zero + NEVER, zero + host_s))
    return total


@pytest.mark.parametrize("begin", [(0.0, 0.0), (7.0, 0.0), (0.0, 7.0)])
def test_a_pace_moves_clocks_as_the_launches_it_stands_for_do(begin: tuple[float, float]) -> None:
    """Whatever the clocks were before: a device behind its host, or a host behind its device."""
    launches = [(1.0, 3.0), None, (2.0, 0.5), (2.0, 0.5), None, (0.5, 4.0)]
    advance, (device_s, host_s) = advance_of(launches), begin

    assert run(launches, device_s, host_s) == (
        max(device_s + advance.device_s[0], host_s + advance.late_s[0]),
        max(host_s + advance.host_s[0], device_s + advance.waits_s[0]),
    )


def test_a_pass_that_follows_itself_takes_the_largest_mean_of_a_cycle_of_clocks() -> None:
    launches = [(1.0, 3.0), None, (2.0, 0.5), (2.0, 0.5), None, (0.5, 4.0)]
    advance, many = advance_of(launches), 500

    device_s, host_s = run(launches * many, 0.0, 0.0)

    expected_s = max(advance.device_s[0], advance.host_s[0], (advance.late_s[0] + advance.waits_s[0]) / 2)
    assert max(device_s, host_s) / many == pytest.approx(expected_s, rel=0.01)


def scenario(seq_len: int, runtime: str = "torchtitan") -> Scenario:
    return Scenario(
        model=MODEL,
        cluster=load_cluster("h200x4"),
        workload=Workload(seq_len=seq_len, global_batch_size=4),
        runtime=Runtime(name=runtime, param_dtype="float32", compute_dtype="bfloat16", reduce_dtype="float32"),
    )


@pytest.mark.parametrize("seq_len", [512, 8192])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_the_account_waits_where_the_simulation_does(seq_len: int, recompute: str) -> None:
    """Whether the host decides (few tokens) or the device (many)."""
    plan = Plan(dp_shard=4, ep=4, recompute=recompute, micro_batch_size=1)
    question = scenario(seq_len)

    account = estimate_plans(question, [plan]).step_s[0]

    assert account == pytest.approx(simulate_plan(question, plan, detail=Detail.LAYER).run.step_s, rel=0.04)


def test_experts_on_other_ranks_have_the_host_wait_for_the_device() -> None:
    """Without expert parallelism torchtitan's grouped products take their counts from the device's memory."""
    question = scenario(4096)

    def waits(plan: Plan) -> int:
        spans = simulate_plan(question, plan, detail=Detail.LAYER).run.trace.spans
        return sum(span.name.startswith("read") for span in spans)

    assert waits(Plan(dp_shard=4)) == 0
    assert waits(Plan(dp_shard=4, ep=2)) == MODEL.layers
    assert waits(Plan(dp_shard=4, ep=2, recompute="full")) == 2 * MODEL.layers


def test_compiled_layers_are_not_wrapped_to_recompute_them() -> None:
    host = runtime_spec("torchtitan").host

    assert host.wrapping_s("full") > 0
    assert compiled(host).wrapping_s("full") == compiled(host).wrapping_s("selective-op") == 0.0
    assert compiled(host).fsdp_layer_s == host.fsdp_layer_s  # its hooks stay around the compiled block


def test_experts_are_part_of_a_compiled_layers_graph() -> None:
    """Dynamo makes one graph of our layer with experts (hosts.md); torchtitan compiles around its experts."""
    own, titan = runtime_spec("meshwright").host, runtime_spec("torchtitan").host

    assert own.moe_layer_s > compiled(own).moe_layer_s == 0.0
    assert compiled(titan).moe_layer_s == titan.moe_layer_s > 0


def test_layers_that_keep_queries_as_dtensors_take_the_host_longer() -> None:
    """Torchtitan's Qwen3 has two more norms, views and rotary positions on DTensors than its Llama; the executor has
    none on DTensors. Dispatch is part of a compiled layer's graph.
    """

    def added(model: str, runtime: str, **changes: bool) -> float:
        spec = operators_for(load_model(model), Runtime(name=runtime)).spec
        host = compiled(spec.host) if changes else spec.host
        plans = [Plan(tp=2), Plan(dp_replicate=2)]
        table = plan_table(plans, Workload(seq_len=512, global_batch_size=2))
        passes = layer_host_s(replace(spec, host=host), table, sparse="a3b" in model)
        cut, whole = np.add(*passes)
        return float(cut - whole)

    llama, qwen, experts = (added(name, "torchtitan") for name in ("llama3-8b", "qwen3-8b", "qwen3-30b-a3b"))

    assert llama < qwen == experts
    assert added("llama3-8b", "torchtitan", compiled=True) < 0.5 * llama
    assert added("llama3-8b", "meshwright") == added("qwen3-8b", "meshwright")


@pytest.mark.parametrize(
    ("name", "stored", "wrapped"),
    [
        ("meshwright", "float32", [True, True, True]),
        ("meshwright", "bfloat16", [False, True, True]),
        ("torchtitan", "float32", [True, True, True]),
        ("torchtitan", "bfloat16", [False, False, False]),
    ],
)
def test_a_single_rank_is_wrapped_for_its_types_or_what_it_shares(name: str, stored: str, wrapped: list[bool]) -> None:
    """Tensor parallelism alone, with stages, with replicas."""
    runtime = Runtime(name=name, param_dtype=stored, compute_dtype="bfloat16", reduce_dtype="float32")
    plans = [Plan(tp=2), Plan(tp=2, pp=2), Plan(tp=2, dp_replicate=2)]
    table = plan_table(
        plans, Workload(seq_len=64, global_batch_size=4), wraps_one=wraps_one(runtime_spec(name), runtime)
    )

    assert table.fully_sharded.tolist() == wrapped
    assert table.casts_own.tolist() == [name == "meshwright" and stored == "float32", False, False]


# Seconds of all calls of `_chunk_cat` in a step, mean of two ranks, by glibc's defaults and with memory kept (None: not
# measured), and the calls with the elements of each: runs 2026-11-30.26/01, /03, /09 and /18 again on two machines with
# two H200, the first 1.25 times as slow as described hosts, the other about as quick (examples/profiles/hosts.md).
PACKED = (
    (0.391, 0.096, ((14, 840e6), (4, 410e6))),
    (0.049, 0.054, ((68, 107.5e6), (8, 73.7e6))),
    (0.132, 0.051, ((23, 277.7e6), (2, 46.9e6))),
    (0.010, None, ((21, 46.5e6), (2, 21e6))),
)


@pytest.mark.parametrize(("fresh_s", "kept_s", "calls"), PACKED)
def test_lists_of_tiles_keep_the_host_as_busy_as_they_did(
    fresh_s: float, kept_s: float | None, calls: tuple[tuple[int, float], ...]
) -> None:
    fresh, kept = (
        sum(count * float(tiles_host_s(4 * elements, keeps_memory=keeps)) for count, elements in calls)
        for keeps in (False, True)
    )

    assert 0.6 < 1.25 * fresh / fresh_s < 1.5
    assert kept_s is None or 0.8 < kept / kept_s < 1.2


def test_wide_experts_that_one_rank_packs_hold_up_its_host() -> None:
    """FSDP2 packs the gradients of a single rank, too; shared among four ranks, each list is a quarter."""
    question = replace(scenario(512), model=replace(MODEL, moe=replace(EXPERTS, experts=64, ffn=4096)))
    one, four = Plan(tp=2, dp_shard=1, micro_batch_size=4), Plan(dp_shard=4)

    waited = estimate_plans(question, [one, four]).breakdown_s["host"]
    run = simulate_plan(question, one, detail=Detail.LAYER).run
    listed = [span.end_s - span.start_s for span in run.trace.spans if span.name.startswith("tiles")]

    assert len(listed) >= MODEL.layers
    assert sum(listed) > 0.5 * waited[0] > waited[1]
    assert estimate_plans(question, [one]).step_s[0] == pytest.approx(run.step_s, rel=0.04)


def test_data_are_loaded_while_a_busy_device_works_unless_steps_are_logged() -> None:
    """Torchtitan waits for the device after it has loaded (train.py); logging a step waits before."""
    ahead, plan = scenario(32768), Plan(dp_shard=4, micro_batch_size=1)
    logged = replace(ahead, runtime=replace(ahead.runtime, logs_each_step=True))
    context = plan_context(ahead, plan)
    loading = float(loading_host_s(context.spec.host, context)[0])

    early, late = (estimate_plans(asked, [plan]).step_s[0] for asked in (ahead, logged))

    assert late - early == pytest.approx(loading, rel=0.01)
    assert early == pytest.approx(simulate_plan(ahead, plan, detail=Detail.LAYER).run.step_s, rel=0.02)


def test_a_stated_log_is_used_or_said_to_change_nothing() -> None:
    runtime, assumed = resolve({"name": "torchtitan", "logs_each_step": True})
    _, of_other = resolve({"name": "meshwright", "logs_each_step": True})

    assert runtime.logs_each_step
    assert not any("logs_each_step" in line for line in assumed)
    assert any("logs_each_step changes nothing" in line for line in of_other)


def test_a_rank_that_casts_its_own_parameters_is_quick_and_packs_nothing() -> None:
    """Compiled layers, and earlier versions, have FSDP2 around a single rank."""
    shapes = {"hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 1024, "vocab": 1024}
    model, plan = Model(name="narrow", family="x", layers=8, **shapes), Plan(tp=2, sequence_parallel=True)
    casts, wrapped = (
        estimate_plans(
            Scenario(
                model=model,
                cluster=load_cluster("h200x4"),
                workload=Workload(seq_len=256, global_batch_size=1),
                runtime=Runtime(name="meshwright", compute_dtype="bfloat16", version=version),
            ),
            [plan],
        ).estimate(0)
        for version in (None, "0.2")
    )

    assert casts.step_s.value < 0.8 * wrapped.step_s.value
    assert casts.memory.reserved_bytes < wrapped.memory.reserved_bytes
