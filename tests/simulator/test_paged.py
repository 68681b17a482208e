"""States of paged optimizers: where they are, what they cost where the GPU is full, and who has them."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from planner.question.question import Question, question_of
from planner.search.infeasible import ConstrainedQuestion, relaxations
from planner.search.plan_space.candidates import Bounds
from simulator.analytical.estimates import memory_of_plans
from simulator.config.adapter import Adapter
from simulator.config.estimate import Estimate
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.memory.estimate import with_replay
from simulator.step.paged import PAGED_ELEMENTS
from topology.catalog.cluster_file import load_cluster
from topology.cluster import Cluster
from topology.rates.host import host_rates
from topology.units import GIB

PLAN = Plan(recompute="full")
MODEL = load_model("llama3.2-1b")


def asked(
    optimizer: str, cluster: Cluster, *, model=MODEL, name: str = "torchtune", sequences: int = 0, **runtime
) -> Question:
    stated = Runtime(
        name=name, param_dtype="bfloat16", reduce_dtype="bfloat16", optimizer=optimizer, **runtime
    ).with_savers(("optimizer_in_backward",) if name == "torchtune" else ())
    workload = Workload(seq_len=2048, global_batch_size=sequences or cluster.gpu_count)
    return question_of(model, cluster, workload, framework=name, runtime=stated)


def estimate(question: Question, plan: Plan = PLAN) -> Estimate:
    return with_replay(question, plan, question.estimate([plan]).estimate(0))


def with_memory(cluster: Cluster, gib: float) -> Cluster:
    kinds = tuple(replace(kind, memory_bytes=round(gib * GIB)) for kind in cluster.gpu_kinds)
    groups = tuple(
        replace(one, node=replace(one.node, gpus=tuple(replace(gpu, memory_bytes=None) for gpu in one.node.gpus)))
        for one in cluster.groups
    )
    return replace(cluster, gpu_kinds=kinds, groups=groups)


def test_8_billion_on_a_gpu_of_24_gib() -> None:
    """Runs in 18.9 GiB by torchtune's README, which torch counts: states that are paged are none of torch's."""
    gpu, model = load_cluster("1xRTX4090"), load_model("llama3-8b")
    unpaged, paged = (estimate(asked(name, gpu, model=model)).memory for name in ("adamw8bit", "pagedadamw8bit"))

    assert not unpaged.fits
    assert paged.fits
    assert paged.peak_bytes.value / GIB == pytest.approx(18.9, rel=0.05)
    assert paged.paged_bytes == pytest.approx(2 * model.parameters, rel=1e-3)
    assert paged.host_bytes == paged.paged_bytes


def test_more_memory_is_never_slower_and_at_last_as_quick_as_states_that_are_not_paged() -> None:
    gpu = load_cluster("1xRTX4090")
    steps, paging = [], []
    for gib in (7.2, 7.8, 8.5, 9.5, 12, 24):
        found = estimate(asked("pagedadamw8bit", with_memory(gpu, gib)))
        assert found.memory.fits
        assert sum(found.breakdown_s.values()) == pytest.approx(found.step_s.value)
        assert found.step_s.low <= found.step_s.value <= found.step_s.high
        steps.append(found.step_s.value)
        paging.append(found.memory.paging_s)
    unpaged = estimate(asked("adamw8bit", gpu))

    assert steps == sorted(steps, reverse=True)
    assert paging[0] == pytest.approx(2 * found.memory.paged_bytes / host_rates(gpu, 1).copy_bytes_per_s)
    assert paging[-1] == found.memory.host_bytes == 0.0
    assert steps[-1] == pytest.approx(unpaged.step_s.value)
    states = unpaged.memory.reserved_bytes - found.memory.reserved_bytes
    assert states == pytest.approx(found.memory.paged_bytes, rel=0.02)


@pytest.mark.parametrize(("room", "moved"), [(40, 0), (39, 40), (25, 40), (3, 40)])
def test_all_of_it_moves_or_nothing(room: int, moved: int) -> None:
    """Chunks that are asked for in one order, step after step, while those that came first make room."""
    here: deque[int] = deque()
    for _ in range(3):  # steps; the last shows what goes on
        came = 0
        for chunk in range(40):
            if chunk not in here:
                came += 1
                here.append(chunk)
                if len(here) > room:
                    here.popleft()
    assert came == moved


def test_states_of_small_adapters_are_not_paged() -> None:
    """A matrix of rank 8 next to 2,048 columns has 16,384 numbers; one of rank 64 is paged."""
    gpu = load_cluster("1xRTX4090")
    for rank, paged in ((8, False), (64, True)):
        adapter = Adapter(rank=rank, target_modules=("q_proj", "o_proj"))
        memory = {name: estimate(asked(name, gpu, adapter=adapter)).memory for name in ("adamw8bit", "pagedadamw8bit")}
        assert (MODEL.hidden * rank >= PAGED_ELEMENTS) == paged
        assert (memory["pagedadamw8bit"].paged_bytes > 0) == paged
        assert (memory["pagedadamw8bit"].reserved_bytes == memory["adamw8bit"].reserved_bytes) == (not paged)


def test_the_host_must_have_the_memory_where_it_is_known() -> None:
    for gib, fits in ((1, False), (8, True)):
        gpu = with_memory(load_cluster(f'{{"gpu": "rtx-4090", "gpus_per_node": 1, "host_memory_gib": {gib}}}'), 7.8)
        memory = estimate(asked("pagedadamw8bit", gpu)).memory
        assert memory.host_bytes > 0
        assert memory.fits == fits
        assert (memory.verdict == "does not fit in host memory") == (not fits)


def test_the_bound_of_memory_is_below_the_replay() -> None:
    for optimizer in ("pagedadamw", "pagedadamw8bit"):
        question = asked(optimizer, load_cluster("2xA100-80GB"), name="transformers", version="4.48")
        for plan in (Plan(dp_shard=2, recompute="full"), Plan(dp_replicate=2, recompute="full")):
            bound = memory_of_plans(question, [plan]).reserved_bytes.max()
            assert bound <= estimate(question, plan).memory.reserved_bytes * 1.0001


def test_paging_is_a_way_out_and_so_is_a_loss_in_pieces_next_to_an_optimizer_in_backward() -> None:
    """Which forbids micro batches of fewer sequences than a step has: those that are legal are tried."""
    gpu = with_memory(load_cluster("1xRTX4090"), 11)
    question = asked("adamw8bit", gpu, sequences=2)
    found = relaxations(ConstrainedQuestion(question=question, bounds=Bounds()), None)
    for way in ("--optimizer pagedadamw8bit", "chunked_loss"):
        assert any(way in one for one in found), found


@pytest.mark.parametrize(
    ("name", "plan", "legal"),
    [  # accelerate's FSDP was FSDP1
        ("pytorch", Plan(dp_shard=2), False),
        ("pytorch", Plan(dp_replicate=2), True),
        ("pytorch", Plan(tp=2), False),
        ("transformers", Plan(dp_shard=2), False),
        ("transformers 4.48", Plan(dp_shard=2), True),
        ("deepspeed", Plan(dp_replicate=2, zero_stage=2), True),
        ("megatron-lm", Plan(dp_replicate=2), False),
        ("torchtitan", Plan(dp_replicate=2), False),
    ],
)
def test_who_has_them(name: str, plan: Plan, legal: bool) -> None:
    """Plain tensors, as in FSDP1 and ZeRO; not DTensors (bitsandbytes, issue 1633), nor optimizers of one's own."""
    name, _, version = name.partition(" ")
    stated = {"version": version} if version else {}
    problems = asked("pagedadamw8bit", load_cluster("2xA100-80GB"), name=name, **stated).problems(plan)
    assert ("paged" not in {one.rule for one in problems}) == legal
