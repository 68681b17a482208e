"""The rubric of the seeds, which nothing in the planner spells out: it must follow from costs.

"Avoid communication if possible. Minimise communication if possible. Minimise communication over the network as much as
possible": what fits on one GPU is replicated; tensor parallel stays where links are fast; pipeline crosses slow ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from planner.question.case_runtime import resolve_runtime
from planner.question.question import question_of
from planner.search.plan_space.candidates import Bounds
from planner.search.search import SearchOptions, suggest
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from tests.planner.conftest import TINY, make_cluster
from tests.planner.every_plan import enumerate_candidates
from topology.rates.scaling import scale_nvlink

# Larger micro batches and more stages a rank make more plans, of which none is another kind of plan.
SIMPLE = Bounds(max_micro_batch=4, max_virtual_stages=2)
SHORT = Bounds(max_micro_batch=1, max_virtual_stages=1)
FULL = replace(SHORT, stated={"recompute": ("full",)})
TITAN = resolve_runtime({"name": "torchtitan"})[0]
MEGATRON = resolve_runtime({"name": "megatron-lm"})[0]


def first(model, cluster, workload, *, framework="torchtitan", runtime=None, **options):
    question = question_of(model, cluster, workload, framework=framework, runtime=runtime)
    return suggest(question, SearchOptions(top=1, simulate=False, **options)).plans[0]


@pytest.mark.parametrize(("nodes", "nvlink"), [(1, True), (2, True), (1, False), (4, False)])
@pytest.mark.parametrize("framework", ["torchtitan", "megatron-lm"])
def test_what_fits_on_one_gpu_is_replicated(nodes, nvlink, framework):
    """A model of 100 million parameters: no tensor, context or pipeline parallelism anywhere."""
    plan = first(
        TINY,
        make_cluster(nodes, 8, nvlink=nvlink),
        Workload(seq_len=1024, global_batch_size=128),
        framework=framework,
        bounds=SIMPLE,
    ).plan

    assert (plan.tp, plan.cp, plan.pp) == (1, 1, 1)
    assert plan.data_parallel == nodes * 8


@pytest.mark.parametrize(
    ("name", "gpus", "framework", "batch", "stages"),
    [
        ("llama3-70b", 32, "torchtitan", 8, 1),
        ("llama3-70b", 32, "megatron-lm", 64, 32),
        ("gpt3-175b", 64, "megatron-lm", 64, 64),
        pytest.param("gpt3-175b", 64, "torchtitan", 8, 64, marks=pytest.mark.nightly),
    ],
)
def test_tensor_parallel_stays_inside_an_nvlink_island(name, gpus, framework, batch, stages):
    """Allowed to go across nodes of eight, it does not, even where there are fewer sequences than GPUs to share."""
    cluster = make_cluster(gpus // 8, 8)
    plan = first(
        load_model(name),
        cluster,
        Workload(seq_len=2048, global_batch_size=batch),
        framework=framework,
        bounds=replace(SHORT, max_tp=16, max_pp=stages),
    ).plan

    assert 1 < plan.tp <= cluster.gpus_per_node


def test_pipeline_crosses_the_slow_links():
    """70B on 8 nodes in Megatron-LM, which replicates parameters: over slow links stages take the place of data."""
    model, workload = load_model("llama3-70b"), Workload(seq_len=4096, global_batch_size=128)
    kept = {"dp_shard": 1, "zero_stage": 1, "tp": 8, "sequence_parallel": True}
    replicas, stages = Plan(dp_replicate=8, **kept), Plan(dp_replicate=2, pp=4, schedule="1F1B", **kept)
    gained = {}
    for network in (2e9, 400e9):
        question = question_of(model, make_cluster(8, 8, network=network), workload, framework="megatron-lm")
        alone, piped = question.estimate([replicas, stages]).step_s
        gained[network] = alone / piped
    slow = first(model, make_cluster(8, 8, network=2e9), workload, framework="megatron-lm", bounds=FULL).plan

    assert gained[2e9] > 1 > gained[400e9]
    assert slow.pp > 1
    assert slow.tp * slow.cp <= 8  # everything that talks in every layer is inside the node


def split(plan):
    """Return what plans have in common that differ in the split between tensor and data parallel."""
    return (plan.cp, plan.cp_method, plan.pp, plan.virtual_stages, plan.schedule, plan.recompute, plan.micro_batch_size)


@pytest.fixture(scope="module")
def eight_gpus():
    """Return legal plans of a 70B model on a node, and a function that costs them with links so many times faster.

    Sharded alike: they differ in the split between tensor and data parallel.
    """
    model, workload = load_model("llama3-70b"), Workload(seq_len=8192, global_batch_size=32)
    cluster, runtime = make_cluster(1, 8), replace(TITAN, compile=True)
    question = question_of(model, cluster, workload, framework="torchtitan", runtime=runtime)
    plans = [
        plan
        for plan in enumerate_candidates(question, bounds=Bounds(max_micro_batch=1, max_virtual_stages=4)).plans()
        if plan.dp_replicate == 1 and plan.dp_shard > 1 and plan.tp_overlap == "none" and plan.reshard_after_forward
    ]
    compared = {split(plan) for plan in plans if plan.tp == 1}
    plans = [plan for plan in plans if split(plan) in compared]

    @cache
    def costed(factor):
        faster = scale_nvlink(cluster, factor)
        return estimate_plans(Scenario(model=model, cluster=faster, workload=workload, runtime=runtime), plans)

    return plans, costed


@pytest.mark.parametrize("factor", [2.0, pytest.param(8.0, marks=pytest.mark.nightly)])
def test_with_faster_links_tensor_parallel_never_gets_relatively_worse(eight_gpus, factor):
    """Plans with and without more bandwidth inside a node: those with tensor parallelism gain at least as much.

    But for steps that wait longer for their hosts once the links are faster: what is gained is not theirs to show.
    Compiled, and of large layers, those are few.
    """
    plans, costed = eight_gpus
    before, after = costed(1.0), costed(factor)
    gain = before.step_s / after.step_s
    waits = after.breakdown_s["host"] > before.breakdown_s["host"] + 1e-6 * after.step_s
    pairs = {}
    for i, plan in enumerate(plans):
        if not waits[i]:
            pairs.setdefault(split(plan), {})[plan.tp] = gain[i]
    compared = 0
    for degrees in pairs.values():
        if 1 in degrees:
            assert all(degrees[tp] >= degrees[1] * (1 - 1e-9) for tp in degrees)
            compared += len(degrees) - 1
    assert compared > 30


def test_head_counts_divide():
    """64 heads on 6 GPUs: no plan listed splits heads unevenly, in any framework."""
    model, workload = load_model("llama3-70b"), Workload(seq_len=4096, global_batch_size=24)
    for framework in ("torchtitan", "megatron-lm", "deepspeed", "any"):
        plans = enumerate_candidates(question_of(model, make_cluster(1, 6), workload, framework=framework)).columns
        assert (model.heads % plans.tp == 0).all()
        assert set(plans.tp.tolist()) <= {1, 2}
