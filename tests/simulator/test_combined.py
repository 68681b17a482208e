"""Experts' all-to-all alongside the passes of another micro batch, as Megatron-LM's combined 1F1B has it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from planner.question.question import Question
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.bounds.screening import Screening
from simulator.columns.plan_columns import plan_columns
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.engine.simulate import simulate
from simulator.legality.frameworks import framework_of_runtime
from simulator.legality.rule import Grade
from simulator.lowering.training import lower_training
from simulator.memory.replay import MemoryReplay
from simulator.overlap.combined import LayerParts, hidden_lost_and_stalled_s, pair_s
from simulator.pipeline.schedule_program import makes, needs
from simulator.pipeline.schedules.registry import build_schedule
from simulator.pipeline.schedules.table import Kind
from tests.simulator.makespan import peak_in_flight
from topology.catalog.clusters import cluster

MEGATRON = Runtime(name="megatron-lm", param_dtype="bfloat16")
QWEN = replace(load_model("qwen3-30b-a3b"), layers=8)
ALONE = Plan(dp_replicate=8, ep=8, zero_stage=1)
PIPED = Plan(dp_replicate=4, ep=4, zero_stage=1, pp=2, virtual_stages=2, schedule="Interleaved1F1B")
TITAN = Plan(dp_shard=4, ep=4, pp=2, virtual_stages=2, schedule="DualPipeV", ep_overlap="combined")


def parts(figures: list[float]) -> LayerParts:
    names = ("around_s", "experts_s", "around_weight_s", "experts_weight_s", "first_s", "second_s", "around_host_s")
    names += ("experts_host_s", "around_weight_host_s", "experts_weight_host_s", "before_wait_s", "before_wait_host_s")
    return LayerParts(**{name: np.array([figure]) for name, figure in zip(names, figures, strict=False)})


def longest_path_s(
    forward: LayerParts, backward: LayerParts, layers: int, *, weights_later: bool, waits: bool
) -> float:
    """Return when `layers` pairs are done: the longest path through what waits for what, two streams and the host."""
    graph = nx.DiGraph()
    last: dict[str, str] = {}

    def run(name: str, stream: str, seconds: np.ndarray | float, *after: str) -> str:
        graph.add_node(name, seconds=float(np.max(seconds)))
        for before in (*after, last.get(stream, "")):
            if before:
                graph.add_edge(before, name)
        last[stream] = name
        return name

    def launch(name: str, seconds: np.ndarray, host_s: np.ndarray | float, *after: str, last_s: float = 0.0) -> str:
        issued = run(f"issue {name}", "host", host_s) if waits else ""
        run(name, "compute", seconds - last_s, *after)
        return run(f"last of {name}", "compute", last_s, issued)

    def exchange(name: str, seconds: np.ndarray | float, *after: str) -> str:
        return run(name, "wire", seconds, *after, last.get("host", ""))

    later = float(weights_later)
    around_weights, experts_weights = later * backward.around_weight_s, later * backward.experts_weight_s
    around_host, experts_host = later * backward.around_weight_host_s, later * backward.experts_weight_host_s
    tokens = gradients = ""
    for n in range(layers):
        combined = run(f"combine back {n}", "wire", backward.first_s, gradients)
        before = launch(f"router {n}", forward.before_wait_s, forward.before_wait_host_s, tokens)
        if waits:
            run(f"wait {n}", "host", 0.0, before)
        around = forward.around_s - forward.before_wait_s, forward.around_host_s - forward.before_wait_host_s
        attended = launch(f"attention {n}", *around)
        experts = backward.experts_s - experts_weights, backward.experts_host_s - experts_host
        experts_end = launch(f"experts back {n}", *experts, combined)
        dispatched = exchange(f"dispatch {n}", forward.first_s, attended)
        launch(f"experts' weights {n}", experts_weights, experts_host, last_s=float(experts_weights[0]) / 2)
        returned = exchange(f"dispatch back {n}", backward.second_s, experts_end)
        computed = launch(f"experts {n}", forward.experts_s, forward.experts_host_s, dispatched)
        tokens = run(f"combine {n}", "wire", forward.second_s, computed)
        around = backward.around_s - around_weights, backward.around_host_s - around_host
        gradients = launch(f"attention back {n}", *around, returned)
        launch(f"attention's weights {n}", around_weights, around_host)
    ends: dict[str, float] = {}
    for name in nx.topological_sort(graph):
        begun = max((ends[before] for before in graph.predecessors(name)), default=0.0)
        ends[name] = begun + graph.nodes[name]["seconds"]
    return max(ends.values())


@pytest.mark.parametrize("weights_later", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_pair_of_layers_takes_what_the_longest_path_says(weights_later: bool, waits: bool) -> None:
    rng = random.Random(3)
    for _ in range(20):
        forward = [rng.uniform(0.1, 2), rng.uniform(0.1, 2), 0, 0, rng.uniform(0, 3), rng.uniform(0, 3)]
        around, experts = rng.uniform(0.1, 4), rng.uniform(0.1, 4)
        backward = [around, experts, around * rng.uniform(0, 0.6), experts * rng.uniform(0, 0.6)]
        backward += [rng.uniform(0, 3), rng.uniform(0, 3)]
        if waits:
            hosts = [rng.uniform(0.1, 4) for _ in range(4)]
            forward += [*hosts[:2], 0, 0, forward[0] * rng.uniform(0, 1), hosts[0] * rng.uniform(0, 1)]
            backward += [*hosts[2:], hosts[2] * rng.uniform(0, 0.6), hosts[3] * rng.uniform(0, 0.6)]
        ahead, back = parts(forward), parts(backward)
        many, fewer = (longest_path_s(ahead, back, n, weights_later=weights_later, waits=waits) for n in (60, 30))

        assert pair_s(ahead, back, weights_later=weights_later)[0] == pytest.approx((many - fewer) / 30, rel=0.02)


def test_exchanges_that_fit_beside_compute_cost_only_the_sms_they_hold() -> None:
    forward, backward = parts([4, 4, 0, 0, 0.5, 0.5]), parts([8, 8, 3, 3, 0.5, 0.5])

    hidden, lost, stalled = hidden_lost_and_stalled_s(forward, backward, 0.1, weights_later=False)

    assert hidden[0] == pytest.approx(2.0)
    assert lost[0] == pytest.approx(0.2)
    assert not stalled[0]


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 2), (3, 2), (4, 3)])
def test_pairs_are_of_two_micro_batches_and_wait_for_nobody(ranks: int, stages: int) -> None:
    name = "1F1B" if stages == 1 else "Interleaved1F1B"
    plain, schedule = (
        build_schedule(name, ranks=ranks, micro_batches=3 * ranks, stages_per_rank=stages, paired=paired)
        for paired in (False, True)
    )
    done: set[object] = set()
    at = [0] * ranks
    for _ in range(sum(map(len, schedule.table))):
        for rank, row in enumerate(schedule.table):
            if at[rank] == len(row):
                continue
            leaves = row[at[rank]].leaves
            if all(result in done for leaf in leaves for result in needs(leaf, schedule.stages)):
                for leaf in leaves:  # its own forward is no part of the same pair
                    assert leaf.kind is Kind.FORWARD or (leaf.stage, Kind.FORWARD, leaf.micro_batch) in done
                done |= {makes(leaf) for leaf in leaves}
                at[rank] += 1

    assert at == [len(row) for row in schedule.table]
    assert any(action.parts for row in schedule.table for action in row)
    assert peak_in_flight(schedule) == peak_in_flight(plain)


def scenario(plan: Plan, runtime: Runtime, micro_batches: int) -> Scenario:
    workload = Workload(seq_len=4096, global_batch_size=micro_batches * plan.data_parallel)
    return Scenario(model=QWEN, cluster=cluster("dgx-h100", gpus=plan.gpus), workload=workload, runtime=runtime)


@pytest.mark.parametrize("word", ["combined", "delay_wgrad"])
@pytest.mark.parametrize(
    ("plan", "micro_batches"),
    [
        (ALONE, 2),
        (ALONE, 5),
        (ALONE.with_(dp_replicate=16, ep=16), 4),
        (ALONE.with_(dp_replicate=16, ep=16), 12),
        (PIPED, 4),
        (PIPED, 12),
    ],
)
def test_the_account_and_the_simulation_agree(plan: Plan, micro_batches: int, word: str) -> None:
    asked, alone, plan = scenario(plan, MEGATRON, micro_batches), plan, plan.with_(ep_overlap=word)
    table = estimate_plans(asked, [alone, plan])
    bound = Screening(asked)
    columns = plan_columns([plan])
    shared = bound.blocks(columns, [plan.recompute])
    screened = bound.plans(columns, shared, np.zeros(1, dtype=np.intp))

    assert screened.at_least_s()[0] <= table.step_s[1]
    assert screened.at_least_by_schedule_s()[0] <= table.step_s[1]
    runs = []
    for one in (alone, plan):
        lowered = lower_training(asked, one)
        runs.append(simulate(lowered.program, lowered.costs, spans=False).step_s)
    assert table.step_s[1] == pytest.approx(runs[1], rel=0.03)
    # Where 32 experts a rank keep the host busy, layers alongside each other leave it nothing to get ahead in.
    assert (table.step_s[1] < table.step_s[0]) == (runs[1] < runs[0]) == (plan.pp == 1)
    assert table.peak_bytes[1] >= table.peak_bytes[0]
    replay = MemoryReplay(asked, plan)
    reserved = max(replay.rank(rank).reserved_bytes for rank in range(plan.pp))
    # The formula screens, so it may not exceed what the allocator holds; of pipelines it misses more fragmentation.
    least = 0.95 if plan.pp == 1 else 0.9
    assert least * reserved < table.estimate(1).memory.reserved_bytes <= reserved


def test_layers_beside_each_other_hold_one_layer_more() -> None:
    asked, plans = scenario(ALONE, MEGATRON, 4), [ALONE.with_(ep_overlap=word) for word in ("none", "combined")]
    plain, paired = (MemoryReplay(asked, plan).rank(0).allocated_bytes for plan in plans)
    saved = estimate_plans(asked, plans).memory.categories["activations"][0, 0] / QWEN.layers

    assert plain <= paired <= plain + 1.5 * saved


@pytest.mark.parametrize(
    ("plan", "runtime", "says"),
    [
        (ALONE.with_(ep_overlap="delay_wgrad"), MEGATRON, ""),
        (PIPED.with_(ep_overlap="combined"), MEGATRON, ""),
        (TITAN, Runtime(version="0.2.2"), ""),
        (TITAN, Runtime(), "torchtitan 0.3 has nothing"),
        (TITAN.with_(recompute="full"), Runtime(version="0.2.2"), "none can"),
        (TITAN.with_(schedule="Interleaved1F1B"), Runtime(version="0.2.2"), "DualPipeV"),
        (ALONE.with_(ep_overlap="combined", recompute="full"), MEGATRON, "none or selective can"),
        (ALONE.with_(ep_overlap="combined", zero_stage=2), MEGATRON, "not modelled"),
        (ALONE.with_(ep_overlap="combined", ep=1), MEGATRON, "ep > 1"),
        (PIPED.with_(ep_overlap="combined", virtual_stages=1, schedule="1F1B"), MEGATRON, "virtual stages"),
        (ALONE.with_(ep_overlap="combined"), replace(MEGATRON, compute_dtype="float32"), "not float32"),
    ],
)
def test_where_it_is_legal(plan: Plan, runtime: Runtime, says: str, ask: Callable[[Scenario], Question]) -> None:
    problems = ask(scenario(plan, runtime, 8)).problems(plan)
    messages = [problem.message for problem in problems if problem.grade is Grade.ILLEGAL]

    assert any(says in message for message in messages) if says else not messages


@pytest.fixture
def ask() -> Callable[[Scenario], Question]:
    def question(asked: Scenario) -> Question:
        return Question(
            model=asked.model,
            cluster=asked.cluster,
            workload=asked.workload,
            runtime=asked.runtime,
            framework=framework_of_runtime(asked.runtime.name),
        )

    return question
