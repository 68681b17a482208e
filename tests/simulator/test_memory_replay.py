"""What a rank asks of the allocator: measured reserved memory, sums that must agree, retries of a GPU that is nearly
full.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.question.cases import load_case
from planner.question.learned_runtime import costs_of
from planner.question.prediction import predict
from planner.question.question import question_of
from planner.validate.validation import validate_case
from simulator.analytical.scenario import Scenario
from simulator.calibration.calibration import Calibration
from simulator.calibration.intervals import replayed_memory_factors
from simulator.config.estimate import RATHER_SURE, SURE, Fit, sure_bytes
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.lowering.simulation import simulate_plan
from simulator.memory.allocator import CachingAllocator
from simulator.memory.plan_memory import PlanMemory, Replays
from simulator.memory.rank import RankReplay
from simulator.memory.replay import MemoryReplay, with_memory
from simulator.memory.tape import Act
from simulator.memory.tensors import Passes
from simulator.pipeline.schedules.table import Kind
from simulator.runtimes.stated import resolve
from simulator.step.held import saved_bytes, tensors_bytes
from tests.bench.learn_intervals import fresh_runs
from topology.catalog.cluster_file import load_cluster
from topology.catalog.clusters import cluster
from topology.rates.scaling import scale_memory

CASES = Path(__file__).parents[1] / "data" / "cases"
MEASURED = json.loads((CASES / "torchtitan_h200x4.json").read_text("utf-8"))
WITH_MEMORY = [case for case in MEASURED if case["measured"].get("peak_memory_gib")]


@pytest.mark.parametrize("case", WITH_MEMORY, ids=lambda case: case["id"])
def test_reserved_memory_is_what_torch_reserved(case) -> None:
    """FSDP, HSDP, DDP, tensor and context parallelism, pipelines, recomputation and compilation on four H200: within 5
    %.
    """
    row = validate_case(case)

    assert abs(row["error"]["memory"]) < 0.05


SIMUMAX = json.loads((CASES / "simumax_b200.json").read_text("utf-8"))


@pytest.mark.parametrize("case", SIMUMAX, ids=lambda case: case["id"])
def test_allocated_memory_is_what_megatron_core_allocated(case) -> None:
    """Tensor, expert and context parallelism and pipelines of Megatron-Core on eight B200: within 3 %."""
    row = validate_case(case)

    assert abs(row["error"]["memory"]) < 0.03


def test_metrics_after_backward_hold_two_float32_copies_beside_the_logits_that_the_trainer_keeps() -> None:
    """One layer and a large vocabulary under FSDP1: state and one gathered unit are small alongside 2 + 4 + 4 bytes a
    logit.
    """
    model = replace(load_model("llama3.2-1b"), layers=1, hidden=256, ffn=512, vocab=128_256, name="")
    workload = Workload(seq_len=2048, global_batch_size=64)
    runtime = resolve({"name": "llm-foundry"})[0]
    question = question_of(model, load_cluster("h200x4"), workload, runtime=runtime, framework="torchtitan", gpus=4)
    held = MemoryReplay(question, Plan(dp_shard=4, zero_stage=3, micro_batch_size=16, recompute="full")).rank(0)
    logits = 16 * 2048 * model.vocab

    assert held.allocated_bytes == pytest.approx(10 * logits, rel=0.03)


def replayed(plan: Plan, *, layers: int = 4, seq_len: int = 2048, batch: int = 8, framework: str = "torchtitan"):
    model = replace(load_model("llama3.2-1b"), layers=layers, name="")
    workload = Workload(seq_len=seq_len, global_batch_size=batch)
    question = question_of(model, load_cluster("h200x4"), workload, framework=framework, gpus=plan.gpus)
    return question, MemoryReplay(question, plan)


def live_after(passes: Passes) -> int:
    """Return the bytes that are there when a block's forward pass has ended."""
    live: dict[int, int] = {}
    for act, slot, nbytes in passes.forward:
        if act is Act.ALLOCATE:
            live[slot] = nbytes
        elif act is Act.FREE:
            live.pop(slot, None)
    return sum(live.values())


HELD = [("torchtitan", mode) for mode in ("none", "full", "selective", "selective-op")]


@pytest.mark.parametrize(("framework", "recompute"), [*HELD, ("megatron-lm", "none"), ("megatron-lm", "selective")])
@pytest.mark.parametrize("tp", [1, 2])
def test_what_a_layer_holds_for_backward_is_what_its_description_says(framework, recompute, tp) -> None:
    """The tensors that are alive between a layer's passes add up to what its operators save."""
    sharding = {"dp_shard": 2} if framework == "torchtitan" else {"dp_replicate": 2, "zero_stage": 1}
    plan = Plan(**sharding, tp=tp, sequence_parallel=tp > 1, recompute=recompute)
    _, replay = replayed(plan, framework=framework)

    operators, context = replay.tensors.operators.dense_layer, replay.context
    for unit in (unit for stage in replay.tensors.stages for unit in stage if unit.block == "dense"):
        mode = context.spec.recompute[recompute]
        saved = saved_bytes(operators, mode, context) if unit.wrapped else tensors_bytes(operators, context)
        assert live_after(replay.tensors.passes(unit)) == pytest.approx(float(saved[0]), rel=1e-3)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_shard=4),
        Plan(dp_replicate=4),
        Plan(dp_shard=2, tp=2, sequence_parallel=True, recompute="full"),
        Plan(pp=4, schedule="1F1B"),
        Plan(pp=2, dp_shard=2, schedule="Interleaved1F1B", virtual_stages=2),
        Plan(dp_shard=2, cp=2, recompute="selective-op"),
        Plan(pp=2, dp_replicate=2, schedule="ZBVZeroBubble", virtual_stages=2),
    ],
    ids=str,
)
def test_a_step_lets_go_of_all_that_it_asked_for_but_gradients_and_state(plan) -> None:
    """After two steps as much is allocated as after one and the optimizer's state: nothing leaks."""
    _, replay = replayed(plan)
    for rank in range(plan.pp):
        memory = CachingAllocator()
        one = RankReplay(replay.tensors, rank, memory)
        one.start()
        one.step()
        after = memory.allocated_bytes
        one.step()

        assert memory.allocated_bytes == after
        assert memory.reserved_bytes >= memory.peak_allocated_bytes


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pp=2, dp_shard=2, schedule="GPipe"),
        Plan(pp=4, dp_shard=2, schedule="Interleaved1F1B", virtual_stages=4),
        Plan(pp=4, dp_shard=2, schedule="InterleavedZeroBubble", virtual_stages=4, recompute="selective-op"),
    ],
    ids=str,
)
def test_backward_passes_that_leave_nothing_behind_are_left_out(plan, monkeypatch) -> None:
    """What is held is the same to the byte. First halves of split passes leave gradients behind."""
    _, replay = replayed(plan, layers=16, batch=32 * plan.data_parallel)
    run, whole = RankReplay.run, []
    monkeypatch.setattr(RankReplay, "run", lambda self, action: (whole.append(action), run(self, action)))

    found = [replay.rank(rank) for rank in range(plan.pp)]
    leave = Kind.FORWARD, Kind.INPUT_GRAD
    backwards = sum(action.kind not in leave for row in replay.schedule.table for action in row)
    played = sum(action.kind not in leave for action in whole)

    assert found == [replay.rank(rank, every_event=True) for rank in range(plan.pp)]
    assert played < 0.75 * backwards


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pp=4, dp_shard=2, schedule="Interleaved1F1B", virtual_stages=4, reshard_after_forward=False),
        Plan(pp=4, dp_replicate=2, schedule="1F1B"),
        Plan(pp=8, dp_shard=2, schedule="ZBVZeroBubble", virtual_stages=2),
    ],
    ids=str,
)
def test_ranks_that_begin_alike_replay_their_beginning_once(plan, monkeypatch) -> None:
    """What each holds is the same to the byte, in any order, and where other replays end at a limit."""
    _, replay = replayed(plan, layers=18, batch=32 * plan.data_parallel)
    run, begun = RankReplay.begin, []
    monkeypatch.setattr(RankReplay, "begin", lambda self: (begun.append(self.rank), run(self)))
    held = [replay.rank(rank, every_event=True) for rank in range(plan.pp)]
    for order in (range(plan.pp), reversed(range(plan.pp))):
        begun.clear()
        _, replay = replayed(plan, layers=18, batch=32 * plan.data_parallel)
        for rank in order:
            less = held[rank].reserved_bytes - 1

            assert rank % 2 or replay.rank_within(rank, less) is None
            assert replay.rank_within(rank, held[rank].reserved_bytes) == held[rank]
        assert len(begun) < plan.pp + plan.pp // 2


def test_one_rank_that_gathers_its_parameters_from_the_host_never_holds_more_than_a_few_layers() -> None:
    """ZeRO-3 with parameters in host memory, on one GPU: eight more layers are kept nowhere."""
    plan = Plan(zero_stage=3, offload="parameters", recompute="full")
    short, long = (replayed(plan, layers=n, framework="deepspeed", batch=1)[1].rank(0) for n in (8, 16))
    layer = 2.0 * load_model("llama3.2-1b").parameters / 16

    assert long.allocated_bytes - short.allocated_bytes < layer


def test_replicas_that_add_up_gradients_hold_what_they_sum_beside_them() -> None:
    """FSDP2 keeps each unit's reduced gradient to the end of a backward pass if replicas sum it: a shard of all
    more.
    """
    shards = 4.0 * load_model("llama3.2-1b").parameters / 2
    held = {}
    for batch in (4, 8):
        question, _ = replayed(Plan(dp_replicate=2, dp_shard=2), layers=16, batch=batch)
        held[batch] = MemoryReplay(question, Plan(dp_replicate=2, dp_shard=2)).rank(0).by_stream["reduce"]

    assert held[8] - held[4] == pytest.approx(shards, rel=0.05)


def test_a_plan_that_retries_allocations_never_surely_fits() -> None:
    """Measured: Llama 3 8B, sequences of 8192, two replicas of two shards kept gathered, four micro batches, on four
    H200 took 9.1 s a step and retried allocations 12 times in each; its sums leave 14 GiB.
    """
    plan = Plan(dp_replicate=2, dp_shard=2, reshard_after_forward=False)
    question = question_of(
        load_model("llama3-8b"),
        load_cluster("h200x4"),
        Workload(seq_len=8192, global_batch_size=16),
        framework="meshwright",
    )

    memory = predict(question, plan).estimate.memory

    assert memory.retries_per_step > 0
    assert memory.fit is not Fit.YES
    assert memory.fit_probability < SURE
    assert "retried" in memory.verdict
    assert memory.headroom_bytes < 0


def test_a_plan_that_is_not_sure_to_fit_is_known_as_well_when_less_is_asked() -> None:
    """Its replay ends where it shows that the plan is not sure to fit; it goes on where that is not enough."""
    plan = Plan(dp_shard=2, pp=2, schedule="1F1B")
    question, _ = replayed(plan, layers=4)
    known, asked = PlanMemory(question, plan), PlanMemory(question, plan)
    limits = [sure_bytes(1.0, replayed_memory_factors(), sure) for sure in (SURE, RATHER_SURE)]
    known.left_bytes = asked.left_bytes = known.reserved_bytes / (sum(limits) / 2)

    assert not asked.may_be(SURE) or asked.at_most_likely(SURE) < SURE
    assert asked.may_be(RATHER_SURE)
    assert asked.at_most_likely(RATHER_SURE) == known.fit_probability < SURE
    assert (asked.ranks, asked.flush_s) == (known.ranks, known.flush_s)
    assert asked.least_flush_s <= asked.flush_s


def test_the_fullest_rank_of_a_plan_is_the_first_asked_of_the_next_through_its_pipeline(monkeypatch) -> None:
    """It shows most of what the next plan costs, so that the others are replayed only where that is listed."""
    plan = Plan(dp_shard=2, pp=4, schedule="1F1B", layers_per_stage=(1, 9, 1, 1))
    question, _ = replayed(plan, layers=12)
    replays, asked, within = Replays(question), [], MemoryReplay.rank_within
    monkeypatch.setattr(MemoryReplay, "rank_within", lambda *args: (asked.append(args[1]), within(*args))[1])

    assert replays[plan].at_most_likely(SURE) >= SURE
    assert (replays[plan].worst, sorted(asked)) == (1, [0, 1, 2, 3])
    asked.clear()
    assert replays[replace(plan, dp_shard=1, dp_replicate=2)].may_be(SURE)

    assert asked == [1]


def test_with_room_nothing_is_retried_and_the_estimate_keeps_its_step() -> None:
    question, _ = replayed(Plan(dp_shard=4), layers=16)

    found = predict(question, Plan(dp_shard=4)).estimate

    assert found.memory.retries_per_step == 0
    assert found.memory.fit is Fit.YES
    assert sum(found.breakdown_s.values()) == pytest.approx(found.step_s.value, rel=1e-6)
    assert sum(found.memory.by_category.values()) == pytest.approx(found.memory.peak_bytes.value, rel=1e-6)
    assert found.memory.reserved_bytes >= found.memory.peak_bytes.value
    assert 0 <= found.memory.fragmentation < 0.2


def test_a_step_that_runs_out_of_memory_is_predicted_as_if_it_had_enough() -> None:
    question, _ = replayed(Plan(dp_shard=4), layers=16)
    small = replace(question, cluster=scale_memory(question.cluster, 0.06))

    full, roomy = (predict(asked, Plan(dp_shard=4)).estimate for asked in (small, question))

    assert not full.memory.fits
    assert roomy.memory.fits
    assert full.step_s.value == pytest.approx(roomy.step_s.value, rel=1e-9)


@pytest.mark.parametrize("run", ["2026-11-23.2/05", "2026-11-22.3/10"])
def test_a_matrix_that_ends_share_stays_gathered_and_keeps_the_heads_gradient(run) -> None:
    """Measured: few wide layers, embeddings tied; without either, predictions are 6 and 7 % too small."""
    measured, question, plan = next(one for one in fresh_runs() if one[0]["id"] == run)

    reserved = predict(question, plan).estimate.memory.reserved_bytes

    assert question.model.tied_embeddings
    assert reserved == pytest.approx(measured["measured"]["reserved_bytes"], rel=0.04)


@pytest.mark.parametrize(
    ("run", "allocated"), [("2026-11-29.1/04", 49.83e9), ("2026-11-29.5/11", 39.02e9), ("2026-11-29.5/08", 65.99e9)]
)
def test_experts_keep_what_torch_kept_of_them(run, allocated) -> None:
    """The most bytes allocated in a step on one H200, by torch: experts of which selective recomputation keeps nothing,
    whose weights are cast in every pass and not remembered, and compiled ones, whose activation is not kept.
    """
    _, question, plan = next(one for one in fresh_runs() if one[0]["id"] == run)

    assert predict(question, plan).estimate.memory.peak_bytes.value == pytest.approx(allocated, rel=0.015)


@pytest.mark.parametrize(
    ("run", "reserved_gib", "allocated_gib"),
    [("2026-11-29.24/07", (68.09, 47.57), (52.83, 36.47)), ("2026-11-29.24/11", (34.44, 27.35), (27.40, 22.34))],
)
def test_both_ranks_of_a_pipeline_hold_what_torch_held(run, reserved_gib, allocated_gib) -> None:
    """Two plans of the ledger again, as the executor is now, on two H200 (2026-11-30, torch 2.11): one stage a rank,
    with experts, and two stages a rank.
    """
    _, question, plan = next(one for one in fresh_runs() if one[0]["id"] == run)

    ranks = PlanMemory(question, plan).ranks
    assert [one.reserved_bytes / 2**30 for one in ranks] == pytest.approx(reserved_gib, rel=0.03)
    assert [one.allocated_bytes / 2**30 for one in ranks] == pytest.approx(allocated_gib, rel=0.03)


def test_less_memory_than_a_plan_needs_ends_in_out_of_memory() -> None:
    _, replay = replayed(Plan(dp_shard=4), layers=16)
    needed = replay.rank(0).reserved_bytes

    assert not replay.rank(0, capacity_bytes=needed).out_of_memory
    assert replay.rank(0, capacity_bytes=needed).retries_per_step == 0
    assert replay.rank(0, capacity_bytes=0.6 * needed).out_of_memory


def test_a_learned_memory_factor_scales_what_is_held() -> None:
    case = load_case(WITH_MEMORY[0])
    before = predict(case.question, case.plan).estimate.memory

    known = Calibration(gpu=case.question.cluster.slowest_kind)
    known = replace(known, runtimes={("torchtitan", False): costs_of({"memory_factor": 1.1}, rows=20)})
    after = predict(replace(case.question, calibration=known), case.plan).estimate.memory

    assert after.reserved_bytes == pytest.approx(1.1 * before.reserved_bytes)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_a_step_of_very_many_micro_batches_holds_a_buffer_for_every_message(schedule) -> None:
    """2^31 messages of 256 tokens come to the second of four stages, and as many gradients: more memory than there
    is.
    """
    asked = question_of(
        load_model("tiny-llama"), cluster("dgx-h100"), Workload(seq_len=256, global_batch_size=2**31), gpus=8
    )
    plan = Plan(pp=4, dp_shard=2, schedule=schedule)

    memory = predict(asked, plan).estimate.memory

    messages = 2 * 2**30 * 256 * asked.model.hidden * 2
    assert not memory.fits
    assert memory.reserved_by_stage[1] >= messages
    assert schedule == "GPipe" or memory.reserved_by_stage[1] == pytest.approx(messages, rel=0.01)


def test_what_every_further_micro_batch_adds_is_added_where_all_go_forward_first() -> None:
    """24 micro batches of GPipe as they are, and as 8 and 16 of them tell."""
    question, _ = replayed(Plan(pp=2, dp_shard=2, schedule="GPipe"), batch=48)
    plan = Plan(pp=2, dp_shard=2, schedule="GPipe")
    whole = MemoryReplay(question, plan, micro_batches=24)

    for rank, found in enumerate(PlanMemory(question, plan).ranks):
        held = whole.rank(rank)
        assert found.allocated_bytes == pytest.approx(held.allocated_bytes, rel=1e-3)
        assert found.reserved_bytes == pytest.approx(held.reserved_bytes, rel=0.01)


def test_a_stage_that_is_left_without_layers_holds_little_beside_the_others() -> None:
    """A runtime cuts stages by their arithmetic: alongside the head of a wide vocabulary narrow layers do not fill four
    stages.
    """
    asked = {
        "model": {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
                  "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 131072},
        "cluster": {"gpu": "h100-sxm", "gpus_per_node": 8, "nodes": 1, "interconnect": "nvswitch"},
        "workload": {"seq_len": 1024, "global_batch_size": 8},
        "plan": {"pp": 4, "zero_stage": 1},
        "runtime": {"name": "nanotron", "param_dtype": "bfloat16", "compute_dtype": "bfloat16"},
    }  # fmt: skip
    case = load_case(asked)

    replay = MemoryReplay(case.question, case.plan)
    first, second, third, last = (replay.rank(rank).reserved_bytes for rank in range(4))

    assert [len(units) for units in replay.tensors.stages] == [5, 0, 0, 1]
    assert second == third < first / 5 < last / 5


@pytest.mark.parametrize(
    ("name", "plan", "runtime"),
    [
        ("llama3-8b", Plan(dp_shard=2, recompute="full"), Runtime()),
        ("llama3-8b", Plan(dp_shard=2, pp=2, schedule="1F1B"), Runtime()),
        ("llama3-8b", Plan(pp=2, virtual_stages=2, schedule="InterleavedZeroBubble"), Runtime()),
        ("qwen3-30b-a3b", Plan(dp_replicate=2, ep=2, zero_stage=1, ep_overlap="combined"), Runtime(name="megatron-lm")),
    ],
    ids=["shards", "pipeline", "split", "pairs"],
)
def test_memory_over_time_is_the_replays_laid_along_the_passes_of_the_run(name, plan, runtime) -> None:
    scenario = Scenario(
        model=replace(load_model(name), layers=8),
        cluster=cluster("dgx-h100", gpus=plan.gpus),
        workload=Workload(seq_len=2048, global_batch_size=4 * plan.data_parallel),
        runtime=runtime,
    )
    run = simulate_plan(scenario, plan, micro_batches=4).run

    counters = [one for one in with_memory(scenario, plan, run, 4).counters if one.name == "memory"]
    replay = MemoryReplay(scenario, plan, micro_batches=4)
    assert len(counters) == plan.pp
    for stage, counter in enumerate(counters):
        times, held = zip(*counter.samples, strict=True)
        assert list(times) == sorted(times)
        assert 0.0 < times[-1] < run.step_s
        assert max(held) == replay.rank(stage).allocated_bytes
